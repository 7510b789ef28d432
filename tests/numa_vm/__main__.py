"""``python -m tests.numa_vm``: the tests of ``inside/`` in a guest of every kind, or one command of your own."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.numa_vm import fetch, guest
from tests.numa_vm.machine import MACHINES, Machine, VmError, machine

ROOT = Path(__file__).resolve().parent.parent.parent
_PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=600", "--durations=8", "tests/numa_vm/inside")
_TRIES = 2


def main() -> int:
    """Return the exit code of the command, or 1 when tests fail on any machine."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(guest.TIMED_OUT))  # so that the guest ends, too
    why_not = missing()
    if why_not:
        print(f"numa_vm: {why_not}", file=sys.stderr)
        return guest.DIED
    if options.check:
        return 0
    if options.command:
        command, name = options.command, options.nodes or "cxl2"
        return _run(name, machine(name, hmat=False if options.no_hmat else None), command, options.timeout)
    failed = []
    for name in [options.nodes] if options.nodes else MACHINES:
        print(f"numa_vm: {name}", flush=True)
        start = time.monotonic()
        code = _run(name, machine(name), [sys.executable, *_PYTEST], options.timeout)
        print(f"numa_vm: {name}: exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
        failed += [name] if code else []
    if failed:
        print(f"numa_vm: failed on {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def missing() -> str:
    """Return what this machine lacks to run a guest, "" if nothing; the kernel and QEMU are fetched here."""
    if not guest.can_share_files():
        return "files cannot be shared with a guest: that needs mounts, so root, and in a container also SYS_ADMIN"
    try:
        fetch.busybox()
        fetch.file_server()
        fetch.qemu()
        fetch.kernel()
    except VmError as error:
        return str(error)
    return ""


def _run(name: str, wanted: Machine, command: Sequence[str], timeout_s: float) -> int:
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment |= {"NUMA_VM": name, "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    for _ in range(_TRIES):  # an emulated guest with two CPUs now and then dies while it boots
        code = guest.run(wanted, command, environment=environment, timeout_s=timeout_s, folder=ROOT)
        if code != guest.DIED:
            break
    return code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.numa_vm", description=__doc__)
    parser.add_argument("--nodes", help=f"one of {', '.join(MACHINES)}, or e.g. 'cpus=2,mem=3G;mem=1G,lat=250,bw=28G'")
    parser.add_argument("--no-hmat", action="store_true", help="firmware that says nothing of speeds; with a command")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per guest")
    parser.add_argument("--check", action="store_true", help="only fetch what is needed, and say what is missing")
    parser.add_argument("command", nargs="*", help="after --; tests when none is given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
