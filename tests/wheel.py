"""Install the wheel of this machine in empty environments without a compiler, and train with it there.

    python tests/wheel.py [PYTHON ...]

For each CPython: an environment below ``build/wheels-check`` with the wheel and what ``dist/requirements.lock`` locks;
the commands `env` and `verify`, and ``examples/quickstart.py``, outside of the clone, after ``make wheels``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels-check"
UV = ROOT / "build" / "wheel-tools" / "bin" / "uv"
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
ABOUT = """
import platform, shutil, sys, torch, lightning_cxl
from lightning_cxl.native import _adam, _cpu, _grads, _membench, _numa
for module in (lightning_cxl, _adam, _cpu, _grads, _membench, _numa):
    assert module.__file__.startswith(sys.prefix), module.__file__
assert _adam.__file__.endswith(".abi3.so"), _adam.__file__
assert _cpu.best_isa() != "baseline" or " avx2 " not in open("/proc/cpuinfo").read()
compilers = [found for name in ("cc", "gcc", "clang", "c++", "g++", "ld") if (found := shutil.which(name))]
assert not compilers, compilers
print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {_cpu.best_isa()}")
"""


class Failed(Exception):
    """A command of the check has failed; says which."""


def run(command: list[str | Path], place: Path, log: Path, **environment: str) -> str:
    """Return what a command prints; everything goes to the log as well."""
    result = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = result.stdout.decode(errors="replace")
    with log.open("a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n{output}\n")
    if result.returncode:
        raise Failed(f"`{' '.join(map(str, command[:4]))}` ended with {result.returncode}, see {log}")
    return output


def check(python: str, dist: Path, place: Path, log: Path) -> str:
    """Return one line about an environment of one CPython."""
    environment, elsewhere = place / "venv", place / "elsewhere"
    bin_folder = environment / "bin"
    elsewhere.mkdir(parents=True)
    began = time.monotonic()
    usual = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run([UV, "venv", "--python", python, environment], place, log, **usual)
    install = [UV, "pip", "install", "--python", bin_folder / "python", "--only-binary", ":all:"]
    run([*install, "--require-hashes", "-r", dist / "requirements.lock"], place, log, **usual)
    run([*install, "--no-deps", "--no-index", "--find-links", dist, "lightning_cxl"], place, log, **usual)
    bare = {"PATH": str(bin_folder), "HOME": str(elsewhere)}
    about = run([bin_folder / "python", "-c", ABOUT], elsewhere, log, **bare).splitlines()[-1]
    run(["lightning-cxl", "env"], elsewhere, log, **bare)
    (elsewhere / "model").mkdir()
    (elsewhere / "model" / "config.json").write_text(json.dumps(MODEL))
    run(["lightning-cxl", "verify", "--model", "model", "--json", "verify.json"], elsewhere, log, **bare)
    shutil.copy2(ROOT / "examples" / "quickstart.py", elsewhere)
    report = run([bin_folder / "python", "quickstart.py"], elsewhere, log, **bare)
    if "in all, each role at its peak" not in report:
        raise Failed(f"examples/quickstart.py prints no report, see {log}")
    return f"{about}: env, verify and quickstart pass, {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser("tests/wheel.py", description=__doc__.partition("\n")[0])
    parser.add_argument("python", nargs="*", default=[sys.executable], help="interpreters (default: this one)")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    status = 0
    for index, python in enumerate(options.python):
        place, log = BUILD / str(index), BUILD / f"{index}.log"
        shutil.rmtree(place, ignore_errors=True)
        log.unlink(missing_ok=True)
        try:
            print(check(python, ROOT / "dist", place, log), flush=True)
        except Failed as failure:
            print(f"{python}: {failure}", flush=True)
            status = 1
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
