"""Builds the device's library once per torch and source text, into a cache."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from lightning_cxl.config import cache_folder

SOURCES = Path(__file__).parent / "csrc"
UNITS = ("backend", "operators", "runtime")  # the slowest first
# C++20 is what the headers of torch need since 2.12; older ones take it
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden")


class BuildError(Exception):
    """There is a compiler, and it refuses the sources."""


def compiler() -> str | None:
    """Return the C++ compiler: $CXX, else g++, else c++; None without one."""
    names = [name for name in (os.environ.get("CXX"), "g++", "c++") if name]
    return next(filter(None, map(shutil.which, names)), None)


def why_unavailable() -> str | None:
    """Return why there can be no device here, for a skip; None where it can be built."""
    if platform.system() != "Linux":
        return f"the device apart needs Linux, not {platform.system()}"
    if not compiler():
        return "the device apart needs a C++ compiler: no $CXX, g++ or c++ is on PATH"
    if not Path(include_paths()[0], "ATen", "ATen.h").is_file():
        return f"this build of torch has no headers in {include_paths()[0]}"
    return None


def library() -> Path:
    """Return the built library, building it if there is none for this torch and these sources.

    A folder of sources is compiled as one unit, for most of the time goes into torch's headers. Objects are kept under
    the hash of what they were made of, so that a change compiles the units concerned alone.
    """
    folder = cache_folder() / "apart"
    folder.mkdir(parents=True, exist_ok=True)
    common = _digest(torch.__version__, _compiler_version(), *FLAGS, *_texts("*/*.h"))
    objects = {unit: folder / f"{unit}-{_digest(common, *_texts(f'{unit}/*.cpp'))}.o" for unit in UNITS}
    built = folder / f"apart-{_digest(*(o.name for o in objects.values()))}.so"
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two processes must not build the same thing at once
        if not built.exists():
            _build(objects, built)
    return built


def _build(objects: dict[str, Path], built: Path) -> None:
    todo = [unit for unit in objects if not objects[unit].exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda unit: _compile(unit, objects[unit]), todo))
    libraries = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu", "-lc10"]
    _make(built, "-shared", *objects.values(), *libraries)


def _compile(unit: str, target: Path) -> None:
    together = "".join(f'#include "{path.relative_to(SOURCES)}"\n' for path in sorted(SOURCES.glob(f"{unit}/*.cpp")))
    text = target.with_suffix(".cpp")
    text.write_text(together)
    _make(target, *FLAGS, f"-I{SOURCES}", *(f"-isystem{path}" for path in include_paths()), "-c", text)


def _make(target: Path, *arguments: object) -> None:
    """Run the compiler; the target appears only when it is complete."""
    partial = target.with_suffix(f".{os.getpid()}.partial")
    command = [compiler(), *map(str, arguments), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{' '.join(command)}\nfailed with code {done.returncode}:\n{done.stderr[-4000:]}")
    partial.rename(target)


def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True).stdout


def _texts(pattern: str) -> list[str]:
    return [f"{path.relative_to(SOURCES)}\n{path.read_text()}" for path in sorted(SOURCES.glob(pattern))]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
