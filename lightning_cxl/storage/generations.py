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

import contextlib
import json
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError
from lightning_cxl.storage.drive import Drive
from lightning_cxl.storage.folder import MANIFEST, PART, Folder
from lightning_cxl.storage.record import Generation, Manifest, Record, decode
from lightning_cxl.storage.system import System

# ----------------------------------------------------------------------------------------------------
# The places of one store: its locked folders, the drives in them, and their files.

log = logging.getLogger(__name__)

_USE_ANOTHER = "Use another folder."
WHAT_TO_DO = (
    f"{_USE_ANOTHER} A checkpoint with checkpoint='reference' needs what lies here: before you delete it, save it "
    "whole with `torch.save(lightning_cxl.plain_checkpoint(torch.load(CHECKPOINT)), NEW_FILE)`."
)


class Places:
    """Locks folders, cleans them, and opens one drive for each path."""

    def __init__(self, paths: Sequence[Path], *, keeps: bool, system: System) -> None:
        self._system = system
        self._keeps = keeps
        self.paths = tuple(str(path) for path in paths)
        self.files_stay = False
        self.drives: list[Drive] = []
        self._files: dict[int, tuple[Folder, Path]] = {}  # by the number of their drive
        with contextlib.ExitStack() as stack:
            folders = self._lock(stack, paths)
            self.home = folders[0]
            self.found = self._read_manifest(keeps)
            self.files_stay = self.found is not None
            self.store_id = self.found.store_id if self.found else secrets.token_hex(8)
            stack.push(self._leave)
            for index, folder in enumerate(folders):
                self._open_drive(stack, index, folder)
            self._opened = stack.pop_all()

    def _lock(self, stack: contextlib.ExitStack, paths: Sequence[Path]) -> list[Folder]:
        if not paths:
            raise ConfigError("storage needs at least one path: a folder on a drive")
        if len({Path(path).resolve() for path in paths}) < len(paths):
            raise ConfigError(f"each path is used once, got {', '.join(f'`{path}`' for path in paths)}")
        folders: list[Folder] = []
        for path in paths:
            folders.append(Folder(path, self._system))
            stack.callback(folders[-1].close)
        return folders

    def _read_manifest(self, keeps: bool) -> Manifest | None:
        contents = self.home.read(MANIFEST)
        if contents is None:
            return None
        found = decode(contents, self.home.path / MANIFEST)
        if not keeps:
            raise ConfigError(f"`{self.home.path}` holds {found.said()}, and this run keeps none. {WHAT_TO_DO}")
        if len(found.drives) != len(self.paths):
            raise ConfigError(
                f"`{self.home.path}` holds {found.said()} on {len(found.drives)} drives ({', '.join(found.drives)}), "
                f"and this run has {len(self.paths)}. {WHAT_TO_DO}"
            )
        return found

    def _check_other(self, folder: Folder) -> None:
        """Refuse a folder with data of another store that keeps a generation."""
        if folder.read(MANIFEST) is not None:
            raise ConfigError(f"`{folder.path}` holds a generation of its own, of another run. {WHAT_TO_DO}")
        contents = folder.read(PART)
        if contents is not None:
            self._check_not_needed(folder.path, contents)

    def _check_not_needed(self, path: Path, part: bytes) -> None:
        """Refuse a path that `part` says belongs to another store, if that store has a generation."""
        try:
            fields = json.loads(part)
            home = Path(fields["home"]) / MANIFEST
            needed = decode(home.read_bytes(), home).store_id == fields["store"]
        except FileNotFoundError:  # the disk of the folder may not be mounted, or someone has lost the manifest
            needed = not home.parent.is_dir() or (home.parent / PART).exists()
        except (ValueError, KeyError, TypeError, OSError, CheckpointError) as error:
            raise ConfigError(
                f"`{path}` holds a part of another run, and it cannot be checked whether that is needed: {error}. "
                f"{_USE_ANOTHER}"
            ) from None
        if needed:
            missing = ", which is missing: mount its drive, or put it back from a backup"
            raise ConfigError(
                f"`{path}` holds a part of a generation whose manifest is `{home}`"
                f"{'' if home.exists() else missing}. {WHAT_TO_DO if home.exists() else _USE_ANOTHER}"
            )

    def _open_drive(self, stack: contextlib.ExitStack, index: int, folder: Folder) -> None:
        new = self.found is None
        if new:
            self._check_other(folder)
        path = folder.data_path(self.store_id, index)
        self._files[index] = (folder, path)
        drive = Drive(path, self._system, make=new)
        stack.callback(drive.close)
        drive.prepare()
        self.drives.append(drive)
        if not self._keeps:  # so that nothing is left of a run that is killed; `close` removes what cannot go now
            with contextlib.suppress(StorageError):
                folder.remove(path)
        folder.remove_orphans(self.store_id)
        folder.sync()

    def _part(self, drive: int) -> bytes:
        return json.dumps({"store": self.store_id, "drive": drive, "home": str(self.home.path.resolve())}).encode()

    def keep_files(self) -> None:
        """Say that files stay at `close`, and note in other folders whose they are."""
        if self.files_stay:
            return
        for index, (folder, _) in self._files.items():
            if index > 0:
                folder.write_new(PART, self._part(index))
                folder.publish(PART)
        self.files_stay = True

    def mark_home(self) -> None:
        """Note, once the manifest is there, that there is one: if it gets lost, the data must not be deleted."""
        if self.home.read(PART) is None:
            self.home.write_new(PART, self._part(0))
            self.home.publish(PART)

    def _leave(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self._remove_files()
        except StorageError as another:
            if error is None:
                raise
            # users need the first error; the next store here removes the files
            log.warning(f"the error that ended the storage was not the only one: {another}")

    def _remove_files(self) -> None:
        if not self.files_stay:
            for folder, path in self._files.values():
                folder.remove(path)
                folder.remove(folder.path / PART)

    def close(self) -> None:
        """Close all files, remove those that do not stay, and let go of the locks. Idempotent."""
        self._opened.close()


class Generations:
    """What is committed. Not thread-safe."""

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
        """Return the offsets of a record that an earlier run left; None if it left none of this name."""
        if name not in self._found_records:
            return None
        found_nbytes, versions = self._found_records[name]
        if found_nbytes != nbytes:
            raise ConfigError(
                f"{self._holds()}, in which `{name}` has {found_nbytes} bytes and not {nbytes}. {WHAT_TO_DO}"
            )
        return versions

    def check_found(self, records: Mapping[str, int]) -> None:
        """Check that an earlier run, if there was one, left records of these names and bytes."""
        for name, nbytes in records.items() if self.kept else ():
            if self.found_versions(name, nbytes) is None:
                raise ConfigError(f"{self._holds()}, which has no record `{name}`. {WHAT_TO_DO}")

    def _holds(self) -> str:
        return f"`{self._places.home.path}` holds {self._manifest(self.kept, ()).said()}"

    def get(self, number: int) -> Generation:
        for generation in self.kept:
            if generation.number == number:
                return generation
        known = ", ".join(str(generation.number) for generation in self.kept) or "none"
        raise CheckpointError(f"`{self._places.home.path}` holds no generation {number}; it holds: {known}")

    def free_version(self, record: Record) -> int:
        """Return the version that takes the next write."""
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
        """Check that one more generation can be added."""
        if len(self.kept) > 1:
            numbers = " and ".join(str(each.number) for each in self.kept)
            raise StorageError(f"generations {numbers} are both kept: settle one of them before the next commit")

    def add(self, details: dict[str, Any], records: Iterable[Record]) -> int:
        """Commit the present versions of `records`, which lie on the disk, and return the generation's number."""
        records = list(records)
        self._last_number += 1
        new = Generation(self._last_number, details, {record.name: record.entry() for record in records})
        self._replace([*self.kept, new], records, new)
        return new.number

    def keep_only(self, generation: Generation, records: Iterable[Record]) -> None:
        """Let go of all others."""
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
