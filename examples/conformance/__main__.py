"""Does training with offload do what training without it does? Programs of users, in each library that offloads.

    python examples/conformance [--contenders NAME ...] [--programs WORD ...] [--json FILE]

Everything runs on the CPU, in float32, in a process of its own, and is compared with a plain loop of torch:

* bits: everything that the user sees, and the weights at the end, have the same bits.
* same: weights differ by less than 1 % of what the training changed, and what the user sees by less than 1 %: rounding.
* WRONG: they differ more, and nothing was said. Twenty trainings: the process kept more than the weights of one.
* error: the library or torch refuses, or fails; the first line is in the JSON file.
* killed, hangs: the process ended by a signal, or took longer than two minutes.

A library that is not installed is left out. torchao's CPUOffloadOptimizer needs CUDA or XPU.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported

import psutil
import torch
from contenders import CONTENDERS, PACKAGES
from programs import PROGRAMS, Program

COMPILED = ("CPUAdamBuilder", "ShareMemCommBuilder")
PATIENCE_S = 120
ROUNDING = 0.01


def work(program: Program, part: int, contender: str, folder: Path, answer: Path) -> None:
    """Run one part of a program in this process; write what comes out."""
    log = os.open(folder / f"log-{part}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    warnings.simplefilter("ignore")
    settings = dict(program.settings)
    lives = settings.pop("lives", 1)
    sizes = []
    try:
        for _ in range(lives):
            torch.manual_seed(3)
            model = program.model()
            start = {name: each.detach().clone() for name, each in model.named_parameters()}
            run = CONTENDERS[contender](model, **settings)
            seen = program.parts[part](run, folder)
            weights = {name: each.detach().clone() for name, each in run.weights().items()}
            run.close()
            size = sum(each.nbytes for each in start.values())
            del run, model
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)
        kept = (sizes[-1] - sizes[lives // 4]) / size
        torch.save({"seen": seen, "start": start, "weights": weights, "kept": kept if lives > 1 else 0}, answer)
    except BaseException as error:
        text = next(iter(str(error).strip().splitlines()), "")
        torch.save({"error": f"{type(error).__name__}: {text}"}, answer)
    os._exit(0)  # some libraries have threads of their own


def outcome(program: Program, contender: str) -> dict[str, Any]:
    """Run a program in processes of its own; returns what the last one wrote, or how a process ended."""
    with tempfile.TemporaryDirectory() as name:
        for part in range(len(program.parts)):
            answer = Path(name) / f"answer-{part}"
            arguments = (program, part, contender, Path(name), answer)
            process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
            process.start()
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                return {"ended": "hangs"}
            last = part + 1 == len(program.parts)
            if answer.exists() and (last or "error" in (found := torch.load(answer))):
                return torch.load(answer) if last else found
            if last or (process.exitcode and "killed" not in program.name):
                return {"ended": f"killed ({process.exitcode})"}
    raise AssertionError("a program has parts")


def far(mine: list[torch.Tensor], wanted: list[torch.Tensor], scale: list[torch.Tensor]) -> float:
    """Return the norm of the difference over that of `scale`."""
    squares = [(a.double() - b.double()).square().sum() for a, b in zip(mine, wanted, strict=True)]
    return float((sum(squares) / max(float(sum(each.double().square().sum() for each in scale)), 1e-30)) ** 0.5)


def judge(found: dict[str, Any], plain: dict[str, Any]) -> tuple[str, str]:
    """Return a verdict, and what it rests on."""
    if "ended" in found:
        return found["ended"].split()[0], found["ended"]
    if "error" in found:
        return "error", found["error"]
    if any(each is not None and each.is_meta for each in found["seen"]):
        return "error", "what the user reads is on the device `meta`"
    names = list(plain["weights"])
    mine, wanted = [found["weights"][each] for each in names], [plain["weights"][each] for each in names]
    moved = [plain["weights"][each] - plain["start"][each] for each in names]
    seen = [(a, b) for a, b in zip(found["seen"], plain["seen"], strict=True) if a is not None]
    weights = far(mine, wanted, moved)
    values = max((far([a], [b], [b]) for a, b in seen), default=0.0)
    if found["kept"] > 1:
        return "WRONG", f"kept {found['kept']:.1f} times the weights"
    if not max(weights, values) < ROUNDING:  # neither what is no number
        return "WRONG", f"weights {weights:.2%} of the training off, values {values:.2%}"
    same = all(map(torch.equal, mine, wanted)) and all(torch.equal(a, b) for a, b in seen)
    return ("bits" if same else "same"), f"weights {weights:.1e}, values {values:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS)[1:], default=list(CONTENDERS)[1:])
    parser.add_argument("--programs", nargs="+", default=[""], metavar="WORD", help="those whose names contain a word")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    there = [each for each in options.contenders if importlib.util.find_spec(PACKAGES.get(each, "torch"))]
    for each in there:  # once, before processes are forked
        importlib.import_module(PACKAGES.get(each, "torch"))
    if {"ZeRO-2", "ZeRO-3"} & {*there}:  # it compiles at first use, which takes minutes
        build = "".join(f"get_accelerator().create_op_builder('{each}').load();" for each in COMPILED)
        code = f"from deepspeed.accelerator import get_accelerator; {build}"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    torch.set_num_threads(1)
    gc.freeze()  # processes that are forked need not look through what is imported

    versions = {each: importlib.metadata.version(PACKAGES.get(each, "torch")) for each in there}
    rows: list[dict[str, Any]] = []
    print("| program | " + " | ".join(f"{each} {versions[each]}" for each in there) + " |")
    print("|---|" + "---|" * len(there))
    for program in PROGRAMS:
        if not any(word in program.name for word in options.programs):
            continue
        plain = outcome(program, "torch")
        if "weights" not in plain:
            sys.exit(f"{program.name}: torch alone fails: {plain}")
        verdicts = {each: judge(outcome(program, each), plain) for each in there}
        rows += [
            {"program": program.name, "contender": each, "verdict": a, "why": b} for each, (a, b) in verdicts.items()
        ]
        print(f"| {program.name} | " + " | ".join(verdict for verdict, _ in verdicts.values()) + " |", flush=True)
    if options.json:
        about = {"versions": versions, "python": platform.python_version(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
