"""The manifest: a small JSON file that says which versions of which records belong to a generation."""

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cxl.errors import CheckpointError

FORMAT = 2


class Entry(NamedTuple):
    """Where a generation has a record."""

    version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The state of all records at one commit."""

    number: int
    """Counts up in a folder, also over runs; never used twice."""
    details: dict[str, Any]
    """What the caller of `commit` gave."""
    records: dict[str, Entry | None]
    """None for one that was not written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What lies in a folder, as far as it was committed."""

    store_id: str
    """In the names of the data files."""
    drives: tuple[str, ...]
    """Their paths, for messages."""
    chunk_bytes: int
    """Checksums depend on it."""
    last_number: int
    """Of the generations so far."""
    records: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Size in bytes and offsets of the versions."""
    generations: tuple[Generation, ...] = ()
    """Oldest first, two at most."""

    def encode(self) -> bytes:
        """Return the contents of the file."""
        body = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return json.dumps({"format": FORMAT, "crc": zlib.crc32(body.encode()), "body": body}).encode()

    def said(self) -> str:
        """Return the generations in words, for messages."""
        return " and ".join(f"generation {each.number} {each.details}" for each in self.generations)


def decode(contents: bytes, path: Path) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        CheckpointError: the file is damaged, or of another version of this package.
    """
    try:
        outer = json.loads(contents)
        version, crc, body = outer["format"], outer["crc"], outer["body"]
        damaged = version == FORMAT and zlib.crc32(body.encode()) != crc
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"it is not what a manifest looks like ({error})") from None
    if version != FORMAT:
        raise CheckpointError(
            f"`{path}` has format {version}, this version of lightning_cxl reads format {FORMAT}: use the version "
            f"that wrote it, or another folder"
        )
    if damaged:
        raise _damaged(path, "its checksum does not match")
    fields = json.loads(body)
    return Manifest(
        store_id=fields["store_id"],
        drives=tuple(fields["drives"]),
        chunk_bytes=fields["chunk_bytes"],
        last_number=fields["last_number"],
        records={name: (nbytes, tuple(offsets)) for name, (nbytes, offsets) in fields["records"].items()},
        generations=tuple(_generation(each) for each in fields["generations"]),
    )


def _generation(fields: dict[str, Any]) -> Generation:
    records = {name: None if entry is None else Entry(*entry) for name, entry in fields["records"].items()}
    return Generation(fields["number"], fields["details"], records)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the manifest `{path}` is damaged: {why}. Without it nothing in the folder can be read: put it back from a "
        f"backup, or use another folder and a checkpoint with checkpoint='copy'. Delete this one when none refers to it"
    )
