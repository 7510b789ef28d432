"""What the guest is made of, fetched once into a cache: a Debian kernel with one module, and QEMU where it is old."""

import glob
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.numa_vm.machine import VmError

# newest first of those that Debian 12 and 13 can reach; given to apt on its command line, the system's sources stay
_KERNEL_SUITES = ("bookworm-backports", "trixie")
_KERNEL = "linux-image-cloud-amd64"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PACKAGES = "qemu-system-x86 qemu-system-common busybox-static"
# Debian 12's 7.2 corrupts a guest with two emulated CPUs more often than not
_MIN_QEMU = 8


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_cxl" / "numa_vm"


def kernel() -> tuple[Path, Path]:
    """Return the guest's kernel, and the only module that is needed and not built in, fetched if need be."""
    home = cache_folder() / "kernel"
    if not home.exists():
        with _workspace() as tmp:
            tree = _unpack(_download(tmp, _KERNEL_SUITES, [_KERNEL]), tmp / "tree")
            ready = tmp / "ready"
            ready.mkdir()
            shutil.copy(next(tree.glob("boot/vmlinuz-*")), ready / "vmlinuz")
            (module,) = tree.rglob("overlay.ko*")
            raw = module.read_bytes()
            (ready / "overlay.ko").write_bytes(lzma.decompress(raw) if module.suffix == ".xz" else raw)
            ready.rename(home)
    return home / "vmlinuz", home / "overlay.ko"


def qemu() -> list[str]:
    """Return the command of a QEMU that is new enough, fetched if need be."""
    if _qemu_version("qemu-system-x86_64") >= _MIN_QEMU:
        return ["qemu-system-x86_64"]
    home = cache_folder() / "qemu"
    command = home / "usr/bin/qemu-system-x86_64"
    if not command.exists():
        names = ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"]
        with _workspace() as tmp:
            _unpack(_download(tmp, ("bookworm-backports",), names), tmp / "tree").rename(home)
    if _qemu_version(str(command)) < _MIN_QEMU:
        raise VmError(f"{command} does not run: its libraries come with `apt-get install {_PACKAGES}`")
    share = home / "usr/share"
    return [str(command), "-L", str(share / "qemu"), "-L", str(share / "seabios")]


def busybox() -> Path:
    found = shutil.which("busybox")
    if found is None or b"ld-linux" in Path(found).read_bytes()[:4096]:
        raise VmError(f"there is no static busybox: `apt-get install {_PACKAGES}`")
    return Path(found)


def file_server() -> Path:
    """Return virtiofsd, which shows the host's files to the guest."""
    for path in (Path("/usr/lib/qemu/virtiofsd"), Path("/usr/libexec/virtiofsd")):
        if path.exists():
            return path
    raise VmError(f"there is no virtiofsd: `apt-get install {_PACKAGES}`, from Debian 13 on also virtiofsd")


@contextmanager
def _workspace() -> Iterator[Path]:
    """Give a folder in the cache for what is not complete yet; what is gets its final name by `Path.rename`."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        yield Path(folder)


def _qemu_version(command: str) -> int:
    try:
        match = re.search(r"version (\d+)", _output(command, "--version"))
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(match[1]) if match else 0


def _download(into: Path, suites: Sequence[str], names: Sequence[str]) -> list[Path]:
    """Download packages from the first suite that has them all; a meta package stands for the kernel it depends on."""
    lists = into / "lists"
    (lists / "partial").mkdir(parents=True)
    mirror = debian_mirror("\n".join(Path(name).read_text() for name in _apt_sources()))
    for suite in suites:
        (into / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {mirror} {suite} main\n")
        options = [f"Dir::Etc::sourcelist={into / 'sources.list'}", "Dir::Etc::sourceparts=-"]
        options += [f"Dir::State::lists={lists}", "Dir::Cache::pkgcache=", "Dir::Cache::srcpkgcache="]
        options += ["APT::Sandbox::User=root", "Acquire::Retries=3"]
        flags = [flag for option in options for flag in ("-o", option)]
        try:
            _output("apt-get", *flags, "update", "-qq")
            for name in names:
                shown = _output("apt-cache", *flags, "show", "--no-all-versions", name)
                real = re.search(r"^Depends:.*?(linux-image-\S+)", shown, re.MULTILINE)
                _output("apt-get", *flags, "download", "-qq", real[1] if real else name, cwd=into)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"numa_vm: nothing from {suite}: {error}", file=sys.stderr)
            continue
        return sorted(into.glob("*.deb"))
    raise VmError(f"apt-get cannot download {', '.join(names)} of {' or '.join(suites)} from {mirror}")


def _apt_sources() -> list[str]:
    found = ["/etc/apt/sources.list", *glob.glob("/etc/apt/sources.list.d/*")]
    return [name for name in found if os.path.isfile(name)]


def debian_mirror(sources: str) -> str:
    """Return the address of the Debian archive that apt's sources name, Debian's own if they name none."""
    match = re.search(r"^(?:URIs:|deb(?:\s+\[[^]]*\])?)\s+(\S+/debian)/?(?:\s|$)", sources, re.MULTILINE)
    return match[1] if match else "http://deb.debian.org/debian"


def _unpack(packages: Sequence[Path], tree: Path) -> Path:
    for package in packages:
        _output("dpkg-deb", "-x", str(package), str(tree))
    return tree


def _output(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout
