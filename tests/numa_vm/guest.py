"""Runs one command in a guest: starts the file server and QEMU, passes the output on, returns the exit code.

No KVM is needed: QEMU emulates (TCG). Times inside mean nothing, what is placed where is real. The host's files are
shared read-only, with a layer in the guest's memory over them: the command may write anywhere and nothing of it stays.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.numa_vm import fetch
from tests.numa_vm.initrd import initrd, job_text
from tests.numa_vm.machine import Machine, VmError, numa_arguments

TIMED_OUT = 124
DIED = 125
"""The guest ended without a result."""
_KERNEL_OPTIONS = (
    "console=ttyS0 loglevel=4 panic=-1 mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=on "
    "cryptomgr.notests audit=0 apparmor=0 rcupdate.rcu_expedited=1 8250.nr_uarts=1 memhp_default_state=online_movable"
)
_SERVER_START_S = 10
_CONSOLE_BYTES = 4000


def run(
    machine: Machine, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, folder: Path
) -> int:
    """Run a command in a fresh guest and return its exit code, `TIMED_OUT` or `DIED`.

    It runs as root in a folder of the host, with this environment alone; its output comes out of this process's. Boot
    and command together may take `timeout_s`.
    """
    shares = {f"share{index}": point for index, point in enumerate(mount_points(folder), 1)}
    shares = {"root": "/", **{tag: point for tag, point in shares.items() if point != "/"}}
    kernel, module = fetch.kernel()
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="numa_vm-")))
        job, status = job_text(command, str(folder), environment), scratch / "status"
        (scratch / "initrd").write_bytes(initrd(scratch / "tree", fetch.busybox(), module, job, shares))
        sockets = {tag: _serve_files(tag, point, scratch, cleanup) for tag, point in shares.items()}
        source, sink = os.pipe()
        cleanup.callback(os.close, source)
        arguments = [*fetch.qemu(), *_machine_arguments(machine), *_device_arguments(sockets, sink, status)]
        arguments += ["-kernel", str(kernel), "-initrd", str(scratch / "initrd"), "-append", _KERNEL_OPTIONS]
        _start(arguments, scratch / "console", cleanup, pass_fds=[sink])
        os.close(sink)  # so that the pipe ends with QEMU
        deadline = time.monotonic() + timeout_s
        while select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (data := os.read(source, 1 << 16)):
                break
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            print(f"numa_vm: stopped after {timeout_s:g} s", file=sys.stderr)
            return TIMED_OUT
        said = status.read_text(errors="replace") if status.exists() else ""
        if said.startswith("exit "):
            return int(said.removeprefix("exit "))
        for log in ("console", "root.log"):
            sys.stderr.write((scratch / log).read_text(errors="replace")[-_CONSOLE_BYTES:])
        print(f"numa_vm: the guest ended without a result. {said}", file=sys.stderr)
        return DIED


def mount_points(folder: Path) -> list[str]:
    """Return where the file systems that hold a folder and this Python are mounted, outer ones first."""
    paths = [Path(os.path.realpath(path)) for path in (folder, sys.prefix, sys.base_prefix)]
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    points = {line.split()[4].encode().decode("unicode_escape") for line in table} | {"/"}
    found = {next(str(p) for p in (path, *path.parents) if str(p) in points) for path in paths}
    return sorted(found)


def check() -> None:
    """Fetch what a guest needs."""
    # the file server works on a mount of its own, which is read-only
    mount = ["unshare", "-m", "--propagation", "private", "mount", "--bind", "/proc", "/proc"]
    done = subprocess.run(mount, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise VmError(
            f"files cannot be shared with a guest, as mounts are refused ({done.stderr.strip()}): run this as "
            f"root, in a container with the capability SYS_ADMIN"
        )
    fetch.busybox()
    fetch.file_server()
    fetch.qemu()
    fetch.kernel()


def _machine_arguments(machine: Machine) -> list[str]:
    arguments = ["-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max,la57=off", *numa_arguments(machine)]
    arguments += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    arguments += ["-device", "virtio-rng-pci,bus=pcie.0"]
    return [*arguments, "-chardev", "stdio,id=con,signal=off", "-serial", "chardev:con"]


def _device_arguments(sockets: Mapping[str, Path], sink: int, status: Path) -> list[str]:
    arguments = ["-device", "virtio-serial-pci,bus=pcie.0"]
    for name, path in (("job", f"/dev/fd/{sink}"), ("status", status)):
        arguments += ["-chardev", f"file,id={name},path={path}"]
        arguments += ["-device", f"virtserialport,chardev={name},name={name}"]
    for tag, socket in sockets.items():
        arguments += ["-chardev", f"socket,id={tag},path={socket}"]
        arguments += ["-device", f"vhost-user-fs-pci,bus=pcie.0,chardev={tag},tag={tag},queue-size=1024"]
    return arguments


def _serve_files(tag: str, point: str, scratch: Path, cleanup: ExitStack) -> Path:
    """Offer a mounted file system under a tag and return the server's socket.

    The server sees a private, read-only mount, so that not even the guest's root can write through it.
    """
    socket, top, log = scratch / f"{tag}.sock", scratch / f"{tag}.mount", scratch / f"{tag}.log"
    top.mkdir()
    server = fetch.file_server()
    if server.parent.name == "libexec":  # the one in Rust, from Debian 13 on
        command = [server, "--socket-path", socket, "--shared-dir", top, "--cache", "always", "--sandbox", "chroot"]
    else:
        command = [server, f"--socket-path={socket}", "-f"]
        for option in (f"source={top}", "sandbox=chroot", "cache=always", "log_level=warn", "xattr"):
            command += ["-o", option]
    script = 'mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; shift 2; exec "$@"'
    shell = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh", point, top]
    process = _start([str(part) for part in (*shell, *command)], log, cleanup)
    deadline = time.monotonic() + _SERVER_START_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise VmError(f"virtiofsd did not start for {point}: {log.read_text(errors='replace').strip()}")
        time.sleep(0.01)
    return socket


def _start(
    arguments: Sequence[str], log: Path, cleanup: ExitStack, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that writes to a log and ends with `cleanup`, its children, too."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, pass_fds=pass_fds,
            start_new_session=True,
        )  # fmt: skip
    cleanup.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
