"""Planned bytes against measured ones: what a plan says that a run holds on the host, and what the run then held.

The job of `examples/configs/finetune_stdlib.yaml`, and a Llama of 196 M parameters at three sequence lengths, for two
steps on the CPU; every job in a process of its own. Three comparisons:

* roles: `lightning_cxl.planning.job` on the meta device, against the peak of every role in
  `strategy.report()`;
* report: what the strategy planned itself when the run began, against the same peaks;
* process: all roles and the working memory of forward and backward, against what the process grew by (anonymous memory
  of its own, `RssAnon`, at the peak, sampled every 2 ms). A tiny run comes first, so that what libraries take at their
  first use does not count. The rest is what the plan leaves out: what pools and arenas hold without using it (they
  grow by 16 and 32 MiB), holes in the C library's heap, buffers inside of kernels, Python objects. A second process,
  in which glibc gives every block of 128 KiB back at once, shows how much is the heap's.

The model is made before the Trainer has it.

    python examples/bench/planned.py [--only NAME ...] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from own_memory import Growth
from results import Results, machine, print_columns
from torch.utils.data import DataLoader

import lightning_cxl
from lightning_cxl.commands.plan import loss_on_meta
from lightning_cxl.config import OffloadConfig
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.inventory.dry_run import measure
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.planning.job import model_job

STEPS = 2
NO_HOLES = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
GOAL = 0.03
DEMO = {"hidden_size": 512, "num_layers": 6, "num_heads": 8, "intermediate_size": 1408, "vocab_size": 8192}
LARGE = {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "intermediate_size": 3072, "vocab_size": 32000}
TINY = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "intermediate_size": 512, "vocab_size": 512}


@dataclass(frozen=True)
class Case:
    """One job."""

    shape: dict[str, int]
    batch: int
    sequence: int
    precision: str = "32-true"


CASES = {
    "demo, 6 x 256": Case(DEMO, 6, 256),
    "200M, 1 x 256": Case(LARGE, 1, 256),
    "200M, 1 x 512": Case(LARGE, 1, 512),
    "200M, 1 x 1024": Case(LARGE, 1, 1024),
    "200M, 1 x 512, bf16-true": Case(LARGE, 1, 512, "bf16-true"),
}


# -- the child: one job ------------------------------------------------------------------------------------------------


class Held(Callback):
    """Notes what host tiers hold from the system, used or not, after every step."""

    def __init__(self) -> None:
        self.nbytes = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Look."""
        tiers = trainer.strategy.report()["tiers"].values()
        self.nbytes = max(self.nbytes, sum(tier["held_bytes"] for tier in tiers))


def train(case: Case) -> dict[str, Any]:
    """Run a job; return its report, what tiers held and how the process grew."""
    strategy = lightning_cxl.CXLOffloadStrategy(batch_tokens=case.batch * case.sequence)
    held = Held()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=STEPS, precision=case.precision, callbacks=[held],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(0, case.shape["vocab_size"], (STEPS * case.batch, case.sequence))
    data = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=case.batch)
    growth = Growth()
    growth.start()
    module = CausalLM(**case.shape)
    module.configure_model()  # see the module's docstring
    trainer.fit(module, data)
    grown = growth.stop()
    return {"report": strategy.report(), "held": held.nbytes, "grown": grown}


def plan(case: Case) -> dict[str, Any]:
    """Return what the plan of a job says; no weights are made."""
    module = CausalLM(**case.shape)
    with lightning_cxl.empty_weights():
        module.configure_model()
    model = module.model
    assert model is not None
    model.to("meta", torch.bfloat16 if case.precision == "bf16-true" else torch.float32)
    load = Workload(batch=case.batch, sequence=case.sequence, computes_on_host=True)
    config = OffloadConfig()
    seen = measure(model, config, load, loss_on_meta(model, case.batch, case.sequence, chunked=True))
    if seen.note:
        raise RuntimeError(seen.note)
    job = model_job("planned", list_tensors(model, None, config, load, measured=seen))
    roles = {role.value: nbytes for role, nbytes in job.bytes_of().items()}
    return {"roles": roles, "working": job.device_bytes, "num_parameters": job.num_parameters}


def child(name: str) -> None:
    """Run one job and print what was found as JSON."""
    warnings.simplefilter("ignore")
    case = CASES[name]
    train(Case(TINY, 2, 512, case.precision))
    found = train(case)
    print(json.dumps(found | {"plan": plan(case)}))


# -- the parent --------------------------------------------------------------------------------------------------------


def measured(name: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(f"the run of {name!r} ended with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, results: Results) -> None:
    found, without_holes = measured(name), measured(name, **NO_HOLES)["grown"]
    plan, report = found["plan"], found["report"]
    peaks = {role: sum(tiers.values()) for role, tiers in report["peak_roles"].items()}
    own = {role: sum(tiers.values()) for role, tiers in report["planned_roles"].items()}
    print(f"\n{name}, {plan['num_parameters']:,} parameters, MiB")
    rows = [("role", "planned", "report's plan", "peak", "planned / peak")]
    for role in dict.fromkeys([*plan["roles"], *peaks]):
        planned, peak = plan["roles"].get(role, 0), peaks.get(role, 0)
        rows.append((role, mib(planned), mib(own.get(role, 0)), mib(peak), ratio(planned, peak)))
    total, peak = sum(plan["roles"].values()), sum(peaks.values())
    rows.append(("all roles", mib(total), mib(sum(own.values())), mib(peak), ratio(total, peak)))
    with_work = total + plan["working"]
    for label, grown in (("the process", found["grown"]), ("the process, heap without holes", without_holes)):
        rows.append((f"and working memory: {label}", mib(with_work), "", mib(grown), ratio(with_work, grown)))
        outside = grown - found["held"]
        rows.append(
            ("  of it outside of tiers", mib(plan["working"]), "", mib(outside), ratio(plan["working"], outside))
        )
    rows.append(("  of it on tiers, not used", "", "", mib(found["held"] - peak), ""))
    print_columns(rows)
    results.at_most(f"{name}: worst role, planned off by", worst(plan["roles"], peaks), "of the peak", GOAL)
    results.at_most(f"{name}: worst role, report's plan off by", worst(own, peaks), "of the peak", GOAL)
    results.at_most(f"{name}: all roles, planned off by", abs(total / peak - 1), "of the peak", GOAL)
    results.add(f"{name}: with working memory, planned", with_work / found["grown"], "of what the process grew by")
    off = abs(with_work / without_holes - 1)
    results.at_most(f"{name}: with working memory, heap without holes, planned off by", off, "of the growth", GOAL)
    results.add(f"{name}: on tiers, not used", (found["held"] - peak) / 2**20, "MiB")


def worst(planned: dict[str, int], peaks: dict[str, int]) -> float:
    """Return how far the plan is off where it is off most."""
    roles = [*planned, *peaks]
    return max(abs(planned.get(role, 0) - peaks.get(role, 0)) / max(1, peaks.get(role, 0)) for role in roles)


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def ratio(planned: int, peak: int) -> str:
    return f"{planned / peak:.3f}" if peak else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return
    results = Results(
        machine(torch.get_num_threads()) | {"cases": {name: asdict(CASES[name]) for name in options.only}}
    )
    for name in options.only:
        compare(name, results)
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
