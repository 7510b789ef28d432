"""Weights in memory that the ranks of one machine share, beside FSDP2's gathers over gloo, on the CPU.

Both are measured in the same processes, in turns, in a new random order each round.

* Gather alone: one unit of a size, from shards to FSDP2's output. *gloo*: the gather that FSDP2 does by itself.
  *shared*: copies out of the segments of the other ranks. *roof*: copies of the same bytes within a process, of memory
  of its own that is as large as the unit, by all ranks at once: no copy can be faster. Speeds are of the bytes that a
  rank gets from the others.
* Step: forward, backward and AdamW of a small Llama, with two copies of the model, one of which shares weights. Losses
  must be equal bit for bit.

A round takes as long as its slowest rank. CPU seconds are those of all ranks together.

    python examples/bench/shared_host.py [--ranks 2 4] [--rounds 15] [--steps 12] [--size 20M] [--json FILE]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import Results, machine, print_columns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl.commands.measuring import cpu_seconds, others_fraction
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, NumaResource, allocate_pages
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.sharding.shared_memory import SharedWeights, share_weights
from lightning_cxl.sharding.torch_private import flat_shard, fsdp_units
from lightning_cxl.transfer.engine import HostEngine

MIB = 2**20
UNIT_BYTES = {"20M": (1 * MIB, 16 * MIB, 64 * MIB), "tiny": (64 * 1024, 1 * MIB)}
SHAPES = {
    "20M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "vocab_size": 2048},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
}
TOKENS = 64
Timed = dict[str, tuple[list[float], list[float]]]
"""Of each contender: seconds of the slowest rank, and CPU seconds of all, round by round."""


class Dram:
    """Lets weights lie on node 0."""

    source = NumaResource("dram", 0, Topology.detect())

    def place(self, parameter: nn.Parameter, nbytes: int) -> int:
        """Return the one place there is."""
        return 0

    def back(self, place: int, nbytes: int, fd: int) -> Buffer:
        """Give memory to a file."""
        return allocate_pages(self.source, nbytes, HUGE_PAGE_BYTES, fd)


def share(model: nn.Module) -> SharedWeights:
    return share_weights(model, Dram(), HostEngine())


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> Timed:
    """Run all once to warm up, and then in turns; the order is the same on all ranks."""
    order = random.Random(1)
    found: Timed = {name: ([], []) for name in runs}
    for number in range(rounds + 1):
        for name in order.sample(sorted(runs), len(runs)):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            spent = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64)
            slowest, summed = spent.clone(), spent.clone()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(summed)
            if number:
                found[name][0].append(slowest[0].item())
                found[name][1].append(summed[1].item())
    return found


def gathers(nbytes: int, rounds: int) -> Timed:
    """Time gathers of one unit of `nbytes`, and a plain copy of what a rank gets from the others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    module = nn.Linear(1024, nbytes // 4096, bias=False)
    fully_shard(module)
    (unit,) = fsdp_units(module)
    gloo = unit.gather
    shared = share(module)
    (unit,) = fsdp_units(module)
    module.unshard()  # settles the dtype
    module.reshard()
    own = flat_shard(unit.shards[0])
    outputs = {name: torch.empty(own.numel() * ranks) for name in ("gloo", "shared", "roof")}
    source = torch.ones(own.numel() * (ranks - 1))

    def gather(with_: Any, output: torch.Tensor) -> None:
        part = output.narrow(0, rank * own.numel(), own.numel())
        work = with_(output, part, unit.process_group)
        if work is not None:
            work.wait()

    for name in ("gloo", "shared"):
        outputs[name].narrow(0, rank * own.numel(), own.numel()).copy_(own)
    timed = in_turns(
        {
            "gloo": lambda: gather(gloo, outputs["gloo"]),
            "shared": lambda: gather(unit.gather, outputs["shared"]),
            "roof": lambda: outputs["roof"].narrow(0, 0, source.numel()).copy_(source),
        },
        rounds,
    )
    assert torch.equal(outputs["gloo"], outputs["shared"])
    shared.close()
    return timed


def training(size: str, steps: int) -> tuple[Timed, int]:
    """Time steps of a small Llama with both; returns also the number of parameters."""
    names = ("gloo", "shared")
    losses: dict[str, list[float]] = {name: [] for name in names}
    runs = {}
    for name in names:
        torch.manual_seed(3)
        config = LlamaConfig(
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=TOKENS, **SHAPES[size]
        )
        model = LlamaForCausalLM(config)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        if name == "shared":
            shared = share(model)
        runs[name] = step_of(model, losses[name])
    timed = in_turns(runs, steps)
    assert losses["gloo"] == losses["shared"], "sharing changes a loss"
    shared.close()
    return timed, num_parameters


def step_of(model: nn.Module, losses: list[float]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = torch.Generator().manual_seed(17 + dist.get_rank())

    def step() -> None:
        tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=made)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.folder}/store", rank=options.rank, world_size=options.ranks[0]
    )
    init_device_mesh("cpu", (options.ranks[0],))
    found: dict[str, Any] = {
        "gathers": {str(nbytes): gathers(nbytes, options.rounds) for nbytes in UNIT_BYTES[options.size]}
    }
    found["steps"], found["parameters"] = training(options.size, options.steps)
    if options.rank == 0:
        (options.folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def processes(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a number of ranks, and return what they have found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--ranks", str(ranks), "--size", options.size]
        command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(ranks)]
        failed = [rank for rank, process in enumerate(started) if process.wait()]
        if failed:
            raise SystemExit(f"rank {failed[0]} of {ranks} failed; its error is above")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def report(ranks: int, found: dict[str, Any], results: Results) -> None:
    print(f"\n{ranks} ranks: gather alone, GB/s of each rank")
    rows = [
        ("unit", "gloo", "shared", "roof", "gloo / shared, seconds", "shared / roof, seconds", "CPU: gloo / shared")
    ]
    for size, timed in found["gathers"].items():
        received = int(size) * (ranks - 1) / ranks
        speeds = [received / statistics.median(timed[name][0]) / 1e9 for name in ("gloo", "shared", "roof")]
        ratios = [ratio(timed, "gloo", "shared"), ratio(timed, "shared", "roof"), ratio(timed, "gloo", "shared", 1)]
        unit = f"{int(size) / MIB:g} MiB"
        rows.append((unit, *(f"{speed:.2f}" for speed in speeds), *(f"{each:.2f}" for each in ratios)))
        for name, speed in zip(("gloo", "shared", "roof"), speeds, strict=True):
            results.add(f"{ranks} ranks, {unit}: {name}", speed, "GB/s")
        results.add(f"{ranks} ranks, {unit}: gloo / shared", ratios[0], "x")
        results.add(f"{ranks} ranks, {unit}: shared / roof", ratios[1], "x")
    print_columns(rows)
    timed = found["steps"]
    print(f"{ranks} ranks: step of a Llama of {found['parameters'] / 1e6:.1f} M parameters, {TOKENS} tokens a rank")
    rows = [("", "seconds", "CPU seconds")]
    for name in ("gloo", "shared"):
        seconds, cpu = (statistics.median(each) for each in timed[name])
        rows.append((name, f"{seconds:.3f}", f"{cpu:.3f}"))
        results.add(f"{ranks} ranks: step, {name}", seconds, "s")
        results.add(f"{ranks} ranks: CPU seconds of a step, {name}", cpu, "s")
    print_columns(rows)
    results.at_most(f"{ranks} ranks: step, shared / gloo", ratio(timed, "shared", "gloo"), "x", 1.0)
    results.add(f"{ranks} ranks: CPU seconds, shared / gloo", ratio(timed, "shared", "gloo", 1), "x")
    for row in results.rows[-1:]:
        print(f"  {row.name}: {row.value:.3f} {row.unit}")


def ratio(timed: Timed, name: str, base: str, column: int = 0) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(timed[name][column], timed[base][column], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="of the gather alone")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--size", choices=SHAPES, default="20M")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    results = Results(machine(1))
    begin = cpu_seconds()
    for ranks in options.ranks:
        report(ranks, processes(ranks, options), results)
    others = others_fraction(begin, cpu_seconds())
    results.add("CPU time of other processes", others, "of all")
    print(f"\nother processes took {others:.0%} of the CPU time\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
