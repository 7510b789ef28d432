"""Run Accelerate's own tests with our accelerator in the place of theirs, and compare with the same tests as they are.

    python -m tests.upstream

Fetches the source package of the installed version, and what its tests need, into ``build/upstream``. A test that fails
or is skipped as it is does not count. Exits with 1 where a difference is not in `KNOWN`. pytest loads this module as a
plug-in, which exchanges the accelerator. Tests of lightning, trl and torch are in no source package.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.processes import ROOT

BUILD = ROOT / "build" / "upstream"
MOST_S = 1800
NEEDED = ("parameterized==0.9.0",)
KNOWN = {
    "test_accelerator.AcceleratorTester.test_free_memory_dereferences_prepared_components": (
        "looks at the free memory of the whole machine: fails, with their accelerator too, where other processes "
        "free 50 MiB meanwhile"
    ),
    "test_grad_sync.SyncScheduler.test_gradient_sync_cpu_multi": (
        "asks that gradients are not averaged yet before the last micro-batch: with several processes `accumulate` "
        "averages each of them, as with `sync_each_batch`"
    ),
    "test_optimizer.CPUOptimizerTester.test_accelerated_optimizer_pickling": (
        "prepares an optimizer without its model, which is refused: masters and state are placed with the model"
    ),
}
"""What is meant to differ, and why."""


def pytest_configure() -> None:
    """Exchange the accelerator, before a test imports it."""
    import accelerate.accelerator

    from lightning_cxl.accelerate import CXLAccelerator

    accelerate.Accelerator = accelerate.accelerator.Accelerator = CXLAccelerator


def fetch() -> Path:
    """Return the folder with their tests."""
    shutil.rmtree(BUILD, ignore_errors=True)
    version = importlib.metadata.version("accelerate")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    package = ["--no-deps", "--no-binary", "accelerate", f"accelerate=={version}"]
    subprocess.run([*pip, "download", "--dest", str(BUILD), *package], check=True)
    subprocess.run([*pip, "install", "--target", str(BUILD / "needed"), "--no-deps", *NEEDED], check=True)
    with tarfile.open(BUILD / f"accelerate-{version}.tar.gz") as file:
        file.extractall(BUILD, filter="data")
    return BUILD / f"accelerate-{version}" / "tests"


def outcomes(tests: Path, name: str, *options: str) -> dict[str, str]:
    """Run those tests that make an accelerator; return "passed", "failed" or "skipped" by test."""
    makes = ("ccelerator(", "debug_launcher(")  # the latter starts scripts of the package, which make theirs
    files = [each.name for each in sorted(tests.glob("test_*.py")) if any(word in each.read_text() for word in makes)]
    result, paths = BUILD / f"{name}.xml", (str(ROOT), str(BUILD / "needed"))
    apart = ("-c", os.devnull, "--rootdir", ".")  # from our own settings
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *apart, f"--junitxml={result}", *options, *files]
    with (BUILD / f"{name}.log").open("w") as log:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        options = {"stdout": log, "stderr": subprocess.STDOUT, "timeout": MOST_S}
        subprocess.run([sys.executable, *pytest], cwd=tests, env=env, **options)
    found = {}
    for case in ElementTree.parse(result).iter("testcase"):
        tags = {each.tag for each in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def main() -> int:
    tests = fetch()
    plain = outcomes(tests, "plain")
    ours = outcomes(tests, "ours", "-p", "tests.upstream")
    counted = [test for test, outcome in plain.items() if outcome == "passed"]
    different = [test for test in counted if ours.get(test) != "passed"]
    unknown = [test for test in different if test not in KNOWN]
    for test in different:
        print(f"{'known' if test in KNOWN else 'UNKNOWN'}: {test}: {KNOWN.get(test, ours.get(test, 'did not run'))}")
    print(f"{len(counted) - len(different)} of {len(counted)} tests that pass as they are pass with ours, ", end="")
    print(f"{len(different) - len(unknown)} differ as known, {len(unknown)} differ; output in {BUILD / 'ours.log'}")
    return 1 if unknown or not counted else 0


if __name__ == "__main__":
    sys.exit(main())
