"""The guest's first file system: a cpio archive with busybox, a kernel module, and what to run."""

import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_INIT = Path(__file__).with_name("guest_init.sh")
_FOLDER = stat.S_IFDIR | 0o755
_PROGRAM = stat.S_IFREG | 0o755


def initrd(busybox: Path, module: Path, job: str, shares: Mapping[str, str]) -> bytes:
    """Return the archive that boots a guest; `shares`: folders of the host by their virtiofs tags, the root first."""
    files = {"bin/busybox": busybox.read_bytes(), "init": _INIT.read_bytes(), "modules/one.ko": module.read_bytes()}
    files["job/job.sh"] = job.encode()
    files["job/shares"] = "".join(f"{tag} {folder}\n" for tag, folder in shares.items()).encode()
    entries = [(name, _FOLDER, b"") for name in ("bin", "dev", "proc", "sys", "modules", "job")]
    return cpio([*entries, *((name, _PROGRAM, contents) for name, contents in files.items())])


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
