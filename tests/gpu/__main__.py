"""Everything that only a machine with a GPU can show, in one command and one file: `make gpu`.

    python -m tests.gpu [--device cuda] [--json gpu.json] [--minutes 10] [--only NAME ...]

Takes the Python, the torch and the packages that are there, needs no network, and installs nothing: the compiled
modules are built in place. Each part is a process of its own with a time of its own; one that fails or hangs does not
keep the others from running, and the file is written again after each. `--device apart` rehearses all of it on a
machine without a GPU: its figures mean nothing.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ("_numa", "_cpu", "_adam", "_grads", "_membench")
TESTS = ("tests/contract", "tests/integration", "tests/unit/streaming", "tests/unit/transfer")
"""All that use the device under test, but for those of several ranks, which need a device each."""
CHECKS = {"environment": 60, "bit_identical": 60, "peak_of_depth": 60, "overlap": 40, "lengths": 40,
          "second_device": 30, "out_of_memory": 60}  # fmt: skip
"""Seconds that each may take; see `tests.gpu.checks`."""
TAIL_CHARS = 4000

Part = dict[str, Any]


def run(command: Sequence[str], limit_s: float, **environment: str) -> Part:
    """Run a process group; return how it ended, and the ends of what it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of tests of this file
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env={**own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    state = ""
    try:
        output, errors = process.communicate(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        state = "timeout"
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    state = state or ("passed" if process.returncode == 0 else "failed")
    part = {"state": state, "seconds": round(time.monotonic() - start, 2), "output": output}
    if state != "passed":
        part["error"] = f"exit status {process.returncode}\n{output[-TAIL_CHARS:]}\n{errors[-TAIL_CHARS:]}"
    return part


def with_figures(part: Part) -> Part:
    """Take the figures from the last line of a part's output that is JSON."""
    lines = [line for line in part["output"].splitlines() if line.startswith("{")]
    if lines:
        part["figures"] = json.loads(lines[-1])
        part["state"] = part["figures"].pop("state", part["state"])
    elif part["state"] == "passed":
        part |= {"state": "failed", "error": "printed no figures"}
    return part


def build(limit_s: float) -> Part:
    """Compile the native modules in place, with the setuptools and Cython that are there."""
    command = "from setuptools import setup; setup()"
    part = run([sys.executable, "-c", command, "build_ext", "--inplace", "--parallel", str(len(COMPILED))], limit_s)
    # of this tree: another one that is installed here would be found, too
    load = f"import sys; from lightning_cxl.native import {', '.join(COMPILED)} as last; "
    load += f"sys.exit(not last.__file__.startswith({str(ROOT)!r}) and 'the modules are not of this tree')"
    loaded = run([sys.executable, "-c", load], 60)
    if loaded["state"] != "passed":  # the build says whether they are new
        hint = "needs setuptools, Cython>=3.1 and a C compiler, each as it is installed here"
        part |= {"state": "failed", "error": f"{hint}\n{part.get('error', '')}\n{loaded['error']}"}
    return part


def pytest(paths: Sequence[str], device: str, limit_s: float) -> Part:
    """Run tests; those that have ended are counted even where the time is up."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.plugin", "-o", "filterwarnings=default"]
        command += ["--device", device, "-m", "not on_cpu and not full", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", "--no-header", *paths]
        if importlib.util.find_spec("xdist"):
            command += ["-n", str(max(1, (os.cpu_count() or 1) - 2)), "--dist", "load"]
        part = run(command, limit_s, LIGHTNING_CXL_TEST_LOG=str(log))
        tests = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    counts = {state: sum(each["state"] == state for each in tests) for state in ("passed", "failed", "skipped")}
    part["figures"] = {
        **counts,
        "failures": [each for each in tests if each["state"] == "failed"],
        "reasons_to_skip": sorted({each["error"] for each in tests if each["state"] == "skipped"}),
    }
    if counts["passed"] == 0 and part["state"] == "passed":
        part |= {"state": "failed", "error": "no test ran"}
    return part


def bench(device: str, limit_s: float) -> Part:
    job = ["--shape", "llama-3.2-1b", "--seq", "8192", "--steps", "5", "--device", "cuda"]
    if device != "cuda":
        job = ["--shape", "tiny", "--seq", "64", "--steps", "3", "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "examples/bench/gpu.py", *job, "--only", "cxl_offload", "--json", str(path)]
        part = run(command, limit_s)
        part["command"] = " ".join(command[1:-2])
        if path.exists():
            part["figures"] = json.loads(path.read_text())
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "apart"], default="cuda")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=10, help="for everything")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts to run, as the file names them")
    args = parser.parse_args()
    start, slower = time.monotonic(), 1 if args.device == "cuda" else 5  # a CPU rehearses, which others may use, too

    def checked(name: str, limit_s: float) -> Part:
        return with_figures(run([sys.executable, "-m", "tests.gpu.checks", name, args.device], limit_s))

    parts: dict[str, tuple[float, Any]] = {
        "build": (240, build),
        **{name: (limit, lambda limit_s, name=name: checked(name, limit_s)) for name, limit in CHECKS.items()},
        "benchmark": (150, lambda limit_s: bench(args.device, limit_s)),
        "tests": (300, lambda limit_s: pytest(TESTS, args.device, limit_s)),
    }
    if unknown := set(args.only or ()) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(parts)}")
    report: dict[str, Any] = {"device": args.device, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "parts": {}}
    for name, (limit_s, action) in parts.items():
        if args.only and name not in args.only:
            continue
        left = 60 * args.minutes * slower - (time.monotonic() - start)
        try:
            part = action(min(limit_s * slower, left)) if left > 5 else {"state": "no time"}
        except Exception as error:  # the others still run
            part = {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        part.pop("output", None)
        report["parts"][name] = part
        report["seconds"] = round(time.monotonic() - start, 1)
        report["states"] = {key: each["state"] for key, each in report["parts"].items()}
        args.json.write_text(json.dumps(report, indent=1, default=str))
        print(f"{name:16} {part['state']:8} {part.get('seconds', 0):7.1f} s", flush=True)
    print(f"written to {args.json}")
    raise SystemExit(any(state in ("failed", "timeout", "no time") for state in report.get("states", {}).values()))


if __name__ == "__main__":
    main()
