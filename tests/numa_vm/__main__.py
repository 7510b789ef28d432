"""``python -m tests.numa_vm``: the tests of ``inside/`` in a guest of every kind, or one command of your own."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.numa_vm import guest
from tests.numa_vm.machine import MACHINES, VmError

ROOT = Path(__file__).resolve().parent.parent.parent
_PYTEST = ("-m", "pytest", "-p", "pytest_timeout", "-o", "timeout=600", "--durations=8", "tests/numa_vm/inside")
_TRIES = 2


def main() -> int:
    """Return the exit code of the command, or the highest of the tests."""
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(guest.TIMED_OUT))  # so that the guest ends, too
    if options.check:
        guest.check()
        return 0
    worst, names = 0, [options.nodes] if options.nodes else list(MACHINES)
    if options.command:
        return _run(names[0], options.command, options.timeout)
    for name in names:
        print(f"numa_vm: {name}", flush=True)
        start = time.monotonic()
        code = _run(name, [sys.executable, *_PYTEST], options.timeout)
        print(f"numa_vm: {name}: exit code {code} after {time.monotonic() - start:.0f} s", flush=True)
        worst = max(worst, code)
    return worst


def _run(name: str, command: Sequence[str], timeout_s: float) -> int:
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    environment |= {"NUMA_VM": name, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    # plug-ins that no test here uses would be a quarter of the time before the first one
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for _ in range(_TRIES):  # an emulated guest with two CPUs now and then dies while it boots
        code = guest.run(MACHINES[name], command, environment=environment, timeout_s=timeout_s, folder=ROOT)
        if code != guest.DIED:
            break
    return code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.numa_vm", description=__doc__)
    parser.add_argument("--nodes", choices=MACHINES, help="the kind of machine")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per guest")
    parser.add_argument("--check", action="store_true", help="only fetch what is needed, and say what is missing")
    parser.add_argument("command", nargs="*", help="after --; tests when none is given")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VmError as error:
        print(f"numa_vm: {error}", file=sys.stderr)
        sys.exit(guest.DIED)
