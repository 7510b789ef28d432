"""The guest's first file system: a cpio archive with busybox, a kernel module, and what to run."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_INIT = Path(__file__).with_name("guest_init.sh")


def initrd(folder: Path, busybox: Path, module: Path, job: str, shares: Mapping[str, str]) -> bytes:
    """Return the archive that boots a guest, made in `folder`; `shares`: by their virtiofs tags, the root first."""
    files = {"bin/busybox": busybox.read_bytes(), "init": _INIT.read_bytes(), "modules/one.ko": module.read_bytes()}
    files["job/job.sh"] = job.encode()
    files["job/shares"] = "".join(f"{tag} {point}\n" for tag, point in shares.items()).encode()
    for name, contents in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
        path.chmod(0o755)
    for name in ("dev", "proc", "sys"):
        (folder / name).mkdir()
    names = "".join(f"{path.relative_to(folder)}\n" for path in sorted(folder.rglob("*")))
    command = [busybox, "cpio", "-o", "-H", "newc"]
    return subprocess.run(command, input=names.encode(), cwd=folder, stdout=subprocess.PIPE, check=True).stdout


def job_text(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> str:
    """Return shell text that runs a command in a folder with exactly this environment."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(folder)} || exit 125\nexec env -i {shlex.join([*settings, *command])}\n"
