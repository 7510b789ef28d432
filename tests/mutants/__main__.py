"""Takes one protection away at a time, in a copy of the tree, and shows which test notices.

    python -m tests.mutants [word ...]

Without words all mutants run; with words those whose name or file contains one. The tests are those that `make test`
runs. A mutant of a kernel is compiled. Exits with 1 if a mutant survives.
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

from tests.mutants import (
    of_accelerate,
    of_all_folders,
    of_async_saves,
    of_copies,
    of_finetuning,
    of_hf_trainer,
    of_host_shards,
    of_inputs_on_ssd,
    of_quantised,
    of_ranks,
    of_sequences,
    of_sharding,
    of_shared_weights,
    of_state_on_ssd,
    of_storage,
    of_updates,
    of_user_loops,
    of_weights_on_ssd,
)
from tests.mutants.mutant import Mutant

ON_SSD = (
    *of_storage.MUTANTS,
    *of_state_on_ssd.MUTANTS,
    *of_weights_on_ssd.MUTANTS,
    *of_inputs_on_ssd.MUTANTS,
)
MUTANTS = (
    *of_copies.MUTANTS,
    *ON_SSD,
    *of_updates.MUTANTS,
    *of_finetuning.MUTANTS,
    *of_quantised.MUTANTS,
    *of_ranks.MUTANTS,
    *of_sequences.MUTANTS,
    *of_sharding.MUTANTS,
    *of_async_saves.MUTANTS,
    *of_user_loops.MUTANTS,
    *of_accelerate.MUTANTS,
    *of_shared_weights.MUTANTS,
    *of_hf_trainer.MUTANTS,
    *of_host_shards.MUTANTS,
    *of_all_folders.MUTANTS,
)
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180  # a mutant that hangs has been noticed, too
HEAVY = ("torch", "lightning.pytorch", "transformers", "torch.utils.cpp_extension")


def copy_tree(target: Path) -> None:
    """Copy what git knows, as it is in the working tree, and the compiled modules."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for path in (ROOT / "lightning_cxl" / "native").glob("*.so"):
        shutil.copy(path, target / "lightning_cxl" / "native")  # with the time of now: newer than its sources


def compile_kernels(root: Path) -> None:
    """Compile what is older than its sources: the one module that a mutant is in."""
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the mutant cannot be compiled:\n{done.stderr[-3000:]}")


def remember_kernels(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (root / "lightning_cxl" / "native").glob("*.so")}


def run_tests(root: Path, tests: tuple[str, ...], timeout_s: float | None = TIMEOUT_S) -> tuple[int | None, str]:
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


def _pytest(root: Path, tests: tuple[str, ...], output: Path) -> None:
    """In a child, which has imported nothing of the repository but this package: that goes now."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lightning_cxl")]:
        del sys.modules[name]
    os.chdir(root)
    sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    sys.dont_write_bytecode = True
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    import lightning_cxl

    assert Path(lightning_cxl.__file__).is_relative_to(root), f"{lightning_cxl.__file__} is not the copy"
    code = pytest.main(["-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "-m", "not full", *tests])
    sys.stdout.flush()
    os._exit(int(code))


def who_noticed(code: int | None, output: str) -> str | None:
    """Return the test that noticed; None if none did.

    Raises:
        RuntimeError: pytest did not run the tests.
    """
    if code is None:
        return f"(hung for {TIMEOUT_S} s)"
    if code == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+?::\S+)", output, re.MULTILINE)
    if found:
        return found[1]
    if code < 0 or code > 5:
        return f"(the process ended with {code})"
    raise RuntimeError(f"pytest ended with {code} and names no test:\n{output[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="mutants whose name or file contains one; none: all")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in m.takes_away or word in m.file for word in words)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(words)} in its name or file")
    for module in HEAVY:
        importlib.import_module(module)
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        copy_tree(root)
        for mutant in MUTANTS:  # all texts before the first run
            mutant.texts(root)
        everything = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        code, output = run_tests(root, everything, timeout_s=None)  # minutes, where all mutants run
        if code != 0:
            print(f"the tests do not pass as they are:\n{output[-3000:]}")
            return 2
        for number, mutant in enumerate(chosen, 1):
            start_s = time.monotonic()
            original, kernels = mutant.apply(root), remember_kernels(root)
            try:
                if mutant.file.startswith("cython_ext/"):
                    compile_kernels(root)
                by = who_noticed(*run_tests(root, mutant.tests))
            finally:
                (root / mutant.file).write_text(original)
                for path, content in kernels.items():
                    path.write_bytes(content)
            if by is None:
                survivors.append(mutant)
            seconds = time.monotonic() - start_s
            name = f"{mutant.file.removeprefix('lightning_cxl/')}: {mutant.takes_away}"
            print(f"{number:3} {seconds:4.0f} s  {name}\n           {by or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
