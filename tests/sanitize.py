"""Build the native modules with AddressSanitizer and UndefinedBehaviorSanitizer; run fuzz and numerics tests with them.

    python tests/sanitize.py [--threads] [PYTEST_ARGUMENT ...]

``--threads``: with ThreadSanitizer, tests of threads beside the main thread: it does not see how OpenMP's wait.

The modules go to ``build/sanitize``, beside links to the Python files of the package; the normal build stays as it is.
Any finding ends the process that has it. Before the tests, one of each kind is provoked, to see that it is noticed.
"""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OF_THREADS = "--threads" in sys.argv
BUILD = ROOT / "build" / ("sanitize-threads" if OF_THREADS else "sanitize")
PACKAGE = BUILD / "lightning_cxl"
KIND = "thread" if OF_THREADS else "address,undefined"
FLAGS = ["-O1", "-g", f"-fsanitize={KIND}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
COMPILER = "gcc"

PAST_THE_END = """
import numpy, array
from lightning_cxl.native import _adam
tensors = [numpy.zeros(1000, numpy.float32) for _ in range(4)]
w, g, m, v = (tensor.ctypes.data for tensor in tensors)
table = array.array("Q", [w, 0, 0, g, m, v, 0, 0, 0, 1001, 0, 0, 0, 0])
_adam.update(table, array.array("f", [1] * 9), 1, "baseline")
"""
MISALIGNED = PAST_THE_END.replace("1001, 0", "999, 0").replace("[w, 0, 0, g,", "[w, 0, 0, g + 1,")
RACE = PAST_THE_END.replace("1000", "300000").replace("1001, 0", "300000, 0")
RACE = RACE.replace("_adam.", "def update():\n  _adam.")
RACE += """
import threading
others = [threading.Thread(target=lambda: [update() for _ in range(20)]) for _ in range(2)]
for other in others: other.start()
for other in others: other.join()
"""
SELF_TESTS = {PAST_THE_END: "heap-buffer-overflow", MISALIGNED: "runtime error: load of misaligned address"}
if OF_THREADS:
    SELF_TESTS = {RACE: "ThreadSanitizer: data race"}


def extensions() -> list[dict[str, Any]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["tool"]["setuptools"]["ext-modules"])


def link_python_files() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    (PACKAGE / "native").mkdir(parents=True)
    for folder in (PACKAGE, PACKAGE / "native"):
        for path in (ROOT / folder.relative_to(BUILD)).iterdir():
            if path.suffix != ".so" and path.name not in ("__pycache__", "native"):
                (folder / path.name).symlink_to(path)


def build(extension: dict[str, Any]) -> None:
    """Compile one module with its own flags, except the level of optimization."""
    name = extension["name"].rpartition(".")[2]
    (source,) = extension["sources"]
    c_file = BUILD / f"{name}.c"
    subprocess.run([sys.executable, "-m", "cython", "-3", str(ROOT / source), "-o", str(c_file)], check=True)
    own = [flag for flag in extension.get("extra-compile-args", []) if not flag.startswith("-O")]
    includes = [sysconfig.get_paths()["include"], *(str(ROOT / path) for path in extension.get("include-dirs", []))]
    target = PACKAGE / "native" / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    command = [COMPILER, "-shared", "-fPIC", *own, *FLAGS, *(f"-I{path}" for path in includes), str(c_file)]
    subprocess.run([*command, "-o", str(target), *extension.get("extra-link-args", [])], check=True)


def environment() -> dict[str, str]:
    """Return the environment in which Python runs with the sanitizers' runtimes, and takes its memory from them."""
    libraries = []
    # libstdc++ too: the runtime looks for the function that throws C++ exceptions once, when the process starts
    for name in ("libtsan.so",) if OF_THREADS else ("libasan.so", "libubsan.so", "libstdc++.so"):
        path = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        if not Path(path.strip()).is_absolute():
            raise SystemExit(f"{COMPILER} has no {name}: install its sanitizer runtimes")
        libraries.append(path.strip())
    paths = map(str, (BUILD, ROOT, ROOT / "examples" / "bench"))
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([*paths, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def check_that_findings_are_noticed(env: dict[str, str]) -> None:
    for code, message in SELF_TESTS.items():
        result = subprocess.run([sys.executable, "-c", code], env=env, cwd=BUILD, capture_output=True, text=True)
        if result.returncode == 0 or message not in result.stderr:
            raise SystemExit(f"the sanitizers did not report {message!r}:\n{result.stderr}\n{code}")


class CheckModules:
    """Plugin of pytest: what the tests have imported are the sanitized modules."""

    def pytest_collection_finish(self) -> None:
        for extension in extensions():
            file = Path(str(importlib.import_module(extension["name"]).__file__))
            assert file.parent == PACKAGE / "native", file
            assert (b"__tsan_init" if OF_THREADS else b"__asan_init") in file.read_bytes(), file


def run_tests(arguments: list[str]) -> int:
    import pytest

    # capture=sys: what a sanitizer writes to file descriptor 2 before it ends the process is seen
    options = ["-m", "not slow", "--hypothesis-profile=few", "--capture=sys", "-p", "no:cacheprovider"]
    paths = ["-o", "pythonpath=", str(ROOT / "tests" / "numerics")]
    if not OF_THREADS:
        return int(pytest.main([*options, *paths, *arguments], plugins=[CheckModules()]))
    status: list[int] = []
    named = "thread or chunk or many_spans or any_address or size_of_a_piece or small_spans or random_bits"
    arguments = ["-k", named, "-o", "timeout=0", *arguments]
    arguments = [*options, *paths, *arguments]
    beside = threading.Thread(target=lambda: status.append(int(pytest.main(arguments, plugins=[CheckModules()]))))
    beside.start()
    beside.join()
    return status[0]


def main() -> int:
    arguments = [each for each in sys.argv[1:] if each != "--threads"]
    if arguments[:1] == ["--run"]:
        return run_tests(arguments[1:])
    link_python_files()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, extensions()))
    env = environment()
    check_that_findings_are_noticed(env)
    fuzz = [sys.executable, str(ROOT / "tests" / "fuzz.py"), "--only", "native", "--cases", "10000"]
    tests = [sys.executable, __file__, "--run", *sys.argv[1:]]
    for command in (tests,) if OF_THREADS else (fuzz, tests):
        if status := subprocess.run(command, env=env, cwd=ROOT).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
