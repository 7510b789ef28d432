"""How long the package and its commands take to start: CPU seconds of the import, and until a command says something.

    python examples/bench/start.py [--rounds 9] [--against FOLDER] [--json FILE]

Every start is a process of its own; all take turns in random order. `import` is what the package adds to torch and
Lightning, a difference of medians of CPU seconds (user and system). `--help` is CPU seconds until the process ends, and
`first sign` wall-clock seconds until the first byte on stdout or stderr. `--against` is a folder with another version
of the package, compiled, that takes part.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from results import Results, machine, print_columns

HERE = Path(__file__).resolve().parents[2]
BASE = "import torch, lightning.pytorch"
HELPS = [["--help"], *([name, "--help"] for name in ("fit", "plan", "export", "env", "calibrate"))]
SIGNS = [["env"], ["plan", "--model", "llama-3.1-8b"], ["calibrate", "--quick"], ["export", "a.ckpt", "b"], ["fit"]]


def cpu_seconds(tree: Path, arguments: Sequence[str]) -> float:
    """Return user and system time of Python with these arguments, with the package of a tree."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_sign(tree: Path, arguments: Sequence[str]) -> float:
    """Return wall-clock seconds until a command shows its first byte; it is stopped then."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "lightning_cxl", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.kill()
        process.communicate()
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="starts of each (default: 9)")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another version, compiled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args(arguments)
    trees = {"this": HERE} | ({} if args.against is None else {"other": args.against.resolve()})
    found: dict[tuple[str, str], list[float]] = {}
    jobs = [("", BASE, lambda: cpu_seconds(HERE, ["-c", BASE]))]
    for tree, path in trees.items():
        code = f"{BASE}; import lightning_cxl"
        jobs.append((tree, "import", lambda path=path, code=code: cpu_seconds(path, ["-c", code])))
        for each in HELPS:
            run = ["-m", "lightning_cxl", *each]
            jobs.append((tree, " ".join(each), lambda path=path, run=run: cpu_seconds(path, run)))
        for each in SIGNS:
            jobs.append((tree, f"first sign of {each[0]}", lambda path=path, each=each: first_sign(path, each)))
    order = random.Random(0)
    for _ in range(args.rounds):
        for tree, name, job in order.sample(jobs, len(jobs)):
            found.setdefault((tree, name), []).append(job())
    medians = {key: statistics.median(values) for key, values in found.items()}
    for tree in trees:
        medians[tree, "import"] -= medians["", BASE]
    results = Results(machine(1))
    print(f"{BASE}: {medians['', BASE]:.2f} CPU seconds")
    names = list(dict.fromkeys(name for tree, name, _ in jobs if tree))
    print_columns([("seconds, medians", *trees), *((n, *(f"{medians[t, n]:.2f}" for t in trees)) for n in names)])
    for (tree, name), seconds in medians.items():
        results.add(f"{tree}: {name}" if tree else name, seconds, "s")
    if args.json:
        results.write(args.json)


if __name__ == "__main__":
    main()
