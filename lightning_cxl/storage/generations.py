"""The generations that a store keeps, and the manifest that names them.

[Note: Generations]
With ``keeps=True`` each record has two versions, but those that shall not be kept. A version that a generation of the
manifest names is committed and is never written: a write goes to the other one.

1. `Store.commit` waits for all writes, syncs every drive, and replaces the manifest as a whole: new file, fsync,
   rename, fsync of the folder. The manifest then has two generations, the one before and the new one, and the caller
   writes what belongs to the new one elsewhere, for example a checkpoint file.
2. `Store.settle` replaces the manifest by one with a single generation. From now on the versions that only others had
   take writes. Between 1 and 2 a record whose two versions are both committed takes none.

A crash leaves one or two generations, and all their versions are as they were written and synced. A new run chooses
one with `restore` and lets go of the other one with `settle`. Records that it makes beside those of the earlier run
lie behind them. Where replacing the manifest fails, nobody knows which of both files lies on the disk: versions of both
stay protected until the next replacement succeeds.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError
from lightning_cxl.storage.folder import MANIFEST
from lightning_cxl.storage.manifest import Generation, Manifest
from lightning_cxl.storage.places import WHAT_TO_DO, Places
from lightning_cxl.storage.record import Record


class Generations:
    """What is committed. Not thread-safe.

    Args:
        places: where the manifest lies.
        chunk_bytes: of the store's transfers.
    """

    def __init__(self, places: Places, chunk_bytes: int) -> None:
        found = places.found
        self._places = places
        self._chunk_bytes = chunk_bytes
        self._last_number = found.last_number if found else 0
        self._found_records = found.records if found else {}
        self.kept = list(found.generations) if found else []
        self._unsure: list[Generation] = []  # whose manifest may lie on the disk or not

    @property
    def found_records(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Size and offsets of the records that an earlier run left."""
        return self._found_records

    def found_versions(self, name: str, nbytes: int) -> tuple[int, ...] | None:
        """Return the offsets of a record that an earlier run left; None if it left none of this name.

        Raises:
            ConfigError: it left one of another size.
        """
        if name not in self._found_records:
            return None
        found_nbytes, versions = self._found_records[name]
        if found_nbytes != nbytes:
            raise ConfigError(
                f"{self._holds()}, in which `{name}` has {found_nbytes} bytes and not {nbytes}. {WHAT_TO_DO}"
            )
        return versions

    def check_found(self, records: Mapping[str, int]) -> None:
        """Check that an earlier run, if there was one, left records of these names and bytes.

        Raises:
            ConfigError: it left others.
        """
        for name, nbytes in records.items() if self.kept else ():
            if self.found_versions(name, nbytes) is None:
                raise ConfigError(f"{self._holds()}, which has no record `{name}`. {WHAT_TO_DO}")

    def _holds(self) -> str:
        return f"`{self._places.home.path}` holds {self._manifest(self.kept, ()).said()}"

    def get(self, number: int) -> Generation:
        """Return a generation.

        Raises:
            CheckpointError: there is none of this number.
        """
        for generation in self.kept:
            if generation.number == number:
                return generation
        known = ", ".join(str(generation.number) for generation in self.kept) or "none"
        raise CheckpointError(f"`{self._places.home.path}` holds no generation {number}; it holds: {known}")

    def free_version(self, record: Record) -> int:
        """Return the version that takes the next write.

        Raises:
            StorageError: all are committed.
        """
        protecting = (*self.kept, *self._unsure)
        entries = [generation.records.get(record.name) for generation in protecting] if record.keeps else []
        committed = {entry.version for entry in entries if entry is not None}
        for version in range(len(record.versions)):
            if version not in committed:
                return version
        numbers = " and ".join(str(generation.number) for generation in protecting)
        raise StorageError(
            f"record `{record.name}` cannot be written: all its versions belong to generations {numbers}. Settle one "
            f"of them first"
        )

    def check_room(self) -> None:
        """Check that one more generation can be added.

        Raises:
            StorageError: two are kept.
        """
        if len(self.kept) > 1:
            numbers = " and ".join(str(each.number) for each in self.kept)
            raise StorageError(f"generations {numbers} are both kept: settle one of them before the next commit")

    def add(self, details: dict[str, Any], records: Iterable[Record]) -> int:
        """Commit the present versions of `records`, which lie on the disk, and return the generation's number.

        Raises:
            StorageError: the manifest could not be replaced.
        """
        records = list(records)
        self._last_number += 1
        new = Generation(self._last_number, details, {record.name: record.entry() for record in records})
        self._replace([*self.kept, new], records, new)
        return new.number

    def keep_only(self, generation: Generation, records: Iterable[Record]) -> None:
        """Let go of all others.

        Raises:
            StorageError: the manifest could not be replaced.
        """
        if self.kept != [generation] or self._unsure:
            self._replace([generation], records)

    def _replace(self, kept: list[Generation], records: Iterable[Record], new: Generation | None = None) -> None:
        self._places.home.write_new(MANIFEST, self._manifest(kept, records).encode())
        self._places.keep_files()
        if new is not None:
            self._unsure.append(new)
        self._places.home.publish(MANIFEST)
        self.kept, self._unsure = kept, []
        self._places.mark_home()

    def _manifest(self, kept: list[Generation], records: Iterable[Record]) -> Manifest:
        known = {record.name: (record.nbytes, record.versions) for record in records}
        return Manifest(
            self._places.store_id,
            self._places.paths,
            self._chunk_bytes,
            self._last_number,
            {**self._found_records, **known},
            tuple(kept),
        )
