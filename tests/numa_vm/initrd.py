"""The guest's first file system: a cpio archive with busybox, kernel modules, and what to run."""

import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_INIT = Path(__file__).with_name("guest_init.sh")
_FOLDER = stat.S_IFDIR | 0o755
_PROGRAM = stat.S_IFREG | 0o755


def initrd(busybox: Path, modules: Sequence[Path], job: str, shares: Mapping[str, str], mark: bytes) -> bytes:
    """Return the archive that boots a guest.

    Args:
        busybox: a static one.
        modules: to load, in order.
        job: shell text to run in the host's files.
        shares: folders of the host by the tag under which virtiofs offers them, the root first.
        mark: what ends the job's output.
    """
    entries = [(name, _FOLDER, b"") for name in ("bin", "dev", "proc", "sys", "modules", "job")]
    entries += [
        ("bin/busybox", _PROGRAM, busybox.read_bytes()),
        ("init", _PROGRAM, _INIT.read_bytes()),
        ("job/job.sh", _PROGRAM, job.encode()),
        ("job/mark", _PROGRAM, mark),
        ("job/shares", _PROGRAM, "".join(f"{tag} {folder}\n" for tag, folder in shares.items()).encode()),
    ]
    entries += [(f"modules/{path.name}", _PROGRAM, path.read_bytes()) for path in modules]
    return cpio(entries)


def job_text(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> str:
    """Return shell text that runs a command in a folder with exactly this environment."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(folder)} || exit 125\nexec env -i {shlex.join([*settings, *command])}\n"


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return a "newc" cpio archive of (name, mode, content).

    A header is ``070701`` and thirteen hexadecimal fields of eight digits: inode, mode, user, group, links, time, size,
    four device numbers, size of the name with its zero byte, checksum. Name and content are padded to four bytes.
    """
    archive = bytearray()
    for inode, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(raw), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + raw
        archive += b"\0" * (-len(archive) % 4) + content
        archive += b"\0" * (-len(archive) % 4)
    return bytes(archive)
