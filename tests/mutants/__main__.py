"""Takes one guard out of the code at a time, in a copy of the tree, and shows which test notices.

    python -m tests.mutants [--check] [word ...]

Without words all mutations run; with words those whose name, function or tests contain one. With `--check` none runs:
each is looked up in the code. Exits with 1 if a mutation is noticed by no test, or cannot be applied any more.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutation import Mutation, read_table
from tests.processes import ROOT, copy_tree

TABLE = Path(__file__).with_name("mutations.txt")
HEAVY = ("torch", "lightning.pytorch", "transformers")


def built_device() -> Path:
    """Return the library of the device apart, which a process of its own builds: this one is to import no tests."""
    command = [sys.executable, "-c", "from tests.apart import build; print(build.library())"]
    return Path(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip())


def run_tests(root: Path, tests: str, timeout_s: float | None = None) -> tuple[int | None, str]:
    """Run tests on the tree at `root`; returns pytest's exit code (None if it hung) and what it printed."""
    output = root / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(root, tests, output))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None, output.read_text()
    return process.exitcode, output.read_text()


def _pytest(root: Path, tests: str, output: Path) -> None:
    """In a child, which has imported nothing of the repository but this package: that goes now."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lightning_cxl")]:
        del sys.modules[name]
    os.chdir(root)
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = True
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    import lightning_cxl

    assert Path(lightning_cxl.__file__).is_relative_to(root), f"{lightning_cxl.__file__} is not the copy"
    # of a test that is named, all cases; of a file, those of `make test`
    cases = [] if "::" in tests else ["-m", "not full"]
    options = ["-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", *cases]
    code = pytest.main([*options, *(f"tests/{each}" for each in tests.split())])
    sys.stdout.flush()
    os._exit(int(code))


def noticed_by(code: int | None, output: str) -> str | None:
    """Return the test that noticed; None if none did. Raises RuntimeError where pytest did not run."""
    if code == 0:
        return None
    if code is None:
        return "(hung)"
    if found := re.search(r"^(?:FAILED|ERROR) (\S+?::\S+)", output, re.MULTILINE):
        return found[1]
    if code < 0 or code > 5:
        return f"(the process ended with {code})"
    raise RuntimeError(f"pytest ended with {code} and names no test:\n{output[-3000:]}")


def run_group(root: Path, tests: str, mutations: list[Mutation]) -> int:
    """Run the tests without and with each mutation; returns how many were not noticed."""
    start_s = time.monotonic()
    code, output = run_tests(root, tests)
    if code != 0:
        print(f"{tests}: fails as it is:\n{output[-3000:]}")
        return len(mutations)
    # a mutation that hangs is noticed, too; one of the device apart is compiled first
    limit_s, survivors = 120 + 4 * (time.monotonic() - start_s), 0
    for mutation in mutations:
        start_s = time.monotonic()
        path, text = mutation.applied(root)
        original = path.read_text()
        path.write_text(text)
        try:
            by = noticed_by(*run_tests(root, tests, limit_s))
        finally:
            path.write_text(original)
        survivors += by is None
        print(f"{time.monotonic() - start_s:4.0f} s  {mutation.guard}\n        {by or 'SURVIVED'}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="mutations whose name, function or tests contain one; none: all")
    parser.add_argument("--check", action="store_true", help="do not run tests")
    args = parser.parse_args()
    groups: dict[str, list[Mutation]] = {}
    num_chosen = num_failed = 0
    for tests, mutations in read_table(TABLE).items():
        for each in mutations:
            if not args.words or any(word in f"{each.guard} {each.where} {tests}" for word in args.words):
                num_chosen += 1
                try:
                    each.applied(ROOT)
                    groups.setdefault(tests, []).append(each)
                except LookupError as error:
                    print(error)
                    num_failed += 1
    num_chosen or parser.error("no mutation has such a word in its name, function or tests")
    if not args.check:
        for module in HEAVY:
            importlib.import_module(module)
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy_tree(Path(folder), with_compiled=True)
            cache = Path(folder) / "cache"
            shutil.copytree(built_device().parent, cache / "apart")
            os.environ["LIGHTNING_CXL_CACHE"] = str(cache)  # mutations of the device are built there
            num_failed += sum(run_group(Path(folder), *group) for group in groups.items())
    print(f"{num_chosen - num_failed} of {num_chosen} mutations {'apply' if args.check else 'were noticed'}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
