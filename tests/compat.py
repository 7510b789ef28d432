"""Run what depends on torch most with the oldest and the newest torch that are declared.

    python -m tests.compat [--torch 2.11 2.15] [-- PYTEST_ARGUMENT ...]

Each version gets an environment, and a copy of the project below ``build/compat``, because compiled modules lie beside
the sources. Both are removed afterwards. Output of pip and pytest goes to ``build/compat/VERSION.log``.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.processes import ROOT, copy_tree

BUILD = ROOT / "build" / "compat"
INTEGRATION = ("checkpoint", "compiled", "lifecycle", "lightning", "parity_table", "peft", "qlora", "schedules")
TESTS = (
    *("tests/contract", "tests/unit/streaming", "tests/unit/test_torch_private.py"),
    *(f"tests/integration/test_{name}.py" for name in (*INTEGRATION, "ways_to_train")),
)


def declared_versions() -> list[str]:
    """Return the oldest and the newest torch of `pyproject.toml`, without their last number."""
    oldest, after = re.findall(r'"torch>=(\d+\.\d+),<(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    major, minor = after.split(".")
    return [oldest, f"{major}.{int(minor) - 1}"]


def run_one(version: str, arguments: list[str]) -> str:
    """Return one line about the tests with one version of torch."""
    place, log = BUILD / version, BUILD / f"{version}.log"
    shutil.rmtree(place, ignore_errors=True)
    tree, environment, results = place / "tree", place / "venv", place / "results.xml"
    own_python = environment / "bin" / "python"
    pip = [own_python, "-m", "pip", "install", "--disable-pip-version-check"]
    steps = (
        [sys.executable, "-m", "venv", environment],
        [*pip, f"torch=={version}.*"],  # first: with it installed, nothing else pulls another one
        [*pip, "-e", f"{tree}[test]"],
        [own_python, "-m", "pytest", "-ra", f"--junit-xml={results}", *TESTS, *arguments],
    )
    copy_tree(tree)
    began = time.monotonic()
    try:
        with log.open("w") as output:
            for step in steps:
                output.write(f"$ {' '.join(map(str, step))}\n")
                output.flush()
                env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
                code = subprocess.run(step, cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
                if code and "pytest" not in step:
                    return f"torch {version}: no environment, `{step[-1]}` ended with {code}; see {log}"
        installed = subprocess.run([own_python, "-c", ABOUT], cwd=tree, capture_output=True, text=True).stdout.strip()
        return f"{installed}: {summary(results)}, exit status {code}, {(time.monotonic() - began) / 60:.0f} min"
    finally:
        shutil.rmtree(place)


ABOUT = """
import platform, importlib.metadata as m
names = ("torch", "lightning", "transformers", "peft")
print(f"Python {platform.python_version()}", *(f"{name} {m.version(name)}" for name in names), sep=", ")
"""


def summary(results: Path) -> str:
    """Return how many tests passed, failed and were skipped, from pytest's file."""
    if not results.exists():
        return "no results"
    (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    count, failures, errors, skipped = (int(suite.get(each)) for each in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return f"{count - failed - skipped} passed, {failed} failed, {skipped} skipped"


def main() -> int:
    parser = argparse.ArgumentParser("tests.compat", description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=declared_versions(), metavar="VERSION", help="such as 2.13")
    parser.add_argument("pytest", nargs="*", help="after --: more arguments of pytest")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    lines = []
    for version in options.torch:
        lines.append(run_one(version, options.pytest))
        print(lines[-1], flush=True)
    return 0 if all(" 0 failed" in line and "exit status 0" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
