"""Host memory and step time of one job that several ranks of a machine train: FSDP2, this package, DeepSpeed ZeRO-3.

A Llama in bfloat16 with AdamW, blocks recomputed in the backward, 64 tokens for each rank, gloo, the CPU as device, one
thread for each rank. What each contender keeps, in bytes per parameter, all ranks together:

* fsdp2: FSDP2 alone; float32 shards and gradients, gathered and reduced in bfloat16, torch's fused AdamW:
  4 weights + 4 gradients + 8 state = 16.
* fsdp2, offload: the same with `CPUOffloadPolicy`, which on the CPU has nothing to move.
* ours: bfloat16 shards and gradients, lower halves of float32 masters, `CPUAdam`: 2 + 2 + 2 + 8 = 14.
* zero-3: DeepSpeed's ZeRO-3, optimizer and parameters offloaded to the CPU, `DeepSpeedCPUAdam`: 2 weights + 2 gradients
  + 4 gradients in float32 + 4 masters + 8 state = 20, with groups and buckets as small as a block and a matrix. It is
  left out where DeepSpeed is missing: `DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed ninja`. At first
  use it compiles two extensions, which takes minutes and needs a C++ compiler.

Every contender has processes of its own, which stay; steps are done block by block in turns, in a new random order each
round. A step takes as long as its slowest rank. *Grown*: anonymous and shared memory (`Pss_Anon`, `Pss_Shmem`) of all
ranks at the peak, less what there was before the model; pages that ranks share count once. It is sampled in steps that
are not timed, three at the beginning and one in each round, and a tiny job comes before. *Loss off*: the largest
distance of a loss from that of fsdp2, over all ranks and steps; first losses must be the same.

*Floor*: no step can be shorter than its arithmetic, its exchanged bytes and its update's bytes at the speeds that all
ranks have at once with plain matrix products and copies, which are measured in the same rounds.

    python examples/bench/several_ranks.py [--ranks 2 4] [--rounds 9] [--steps 2] [--size 20M] [--json FILE]
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import Results, machine, print_columns
from sharded_contenders import CONTENDERS, KEPT, SHAPES, TOKENS, Step, compile_deepspeed, has_deepspeed, make_model
from torch import nn

from lightning_cxl.commands.calibrate import cpu_seconds, others_fraction
from lightning_cxl.inventory.tensors import Mesh
from lightning_cxl.planning.job import exchanges, groups_of
from lightning_cxl.streaming.units import find_units

UPDATED = 12 + 12
"""Bytes per parameter that an update must read and write: float32 weights and state; gradients come on top."""
SAME_LOSS = 1e-5
"""How far first losses may be apart: weights, tokens and formats are the same."""
MIB = 2**20
PATIENCE_S = 300


# -- one rank of a contender -------------------------------------------------------------------------------------------


def speeds(size: str) -> tuple[float, float]:
    """Return bytes per second of a copy, read and written, and flops per second of a bfloat16 product; all at once."""
    source = torch.ones(16 * MIB // 4)
    target = source.clone()
    width, inner = SHAPES[size]["hidden_size"], SHAPES[size]["intermediate_size"]
    left, right = torch.ones(TOKENS, width, dtype=torch.bfloat16), torch.ones(inner, width, dtype=torch.bfloat16)
    copies, products = 8, 50
    dist.barrier()
    start = time.perf_counter()
    for _ in range(copies):
        target.copy_(source)
    copied = time.perf_counter()
    for _ in range(products):
        nn.functional.linear(left, right)
    multiplied = time.perf_counter() - copied
    return copies * 2 * source.nbytes / (copied - start), products * 2 * TOKENS * width * inner / multiplied


def work(name: str, rank: int, ranks: int, size: str, folder: str, pipe: Any) -> None:
    """Do what the parent says and answer, as one rank of a contender."""
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # DeepSpeed asks for them; nothing is opened
    made = torch.Generator().manual_seed(17 + rank)

    def block(step: Step, count: int, vocabulary: int) -> dict[str, Any]:
        losses, begin = [], time.perf_counter()
        for _ in range(count):
            losses.append(step(torch.randint(0, vocabulary, (1, TOKENS), generator=made)))
        return {"seconds": (time.perf_counter() - begin) / count, "losses": losses}

    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        with CONTENDERS[name]("tiny", ranks) as step:
            block(step, 2, SHAPES["tiny"]["vocab_size"])
        pipe.send(None)
        with contextlib.ExitStack() as life:
            while (order := pipe.recv()) != "end":
                dist.barrier()
                if order == "make":
                    step = life.enter_context(CONTENDERS[name](size, ranks))
                    pipe.send(None)
                elif order == "speeds":
                    pipe.send(speeds(size))
                else:
                    pipe.send(block(step, order, SHAPES[size]["vocab_size"]))
    except Exception as error:
        traceback.print_exc()
        pipe.send(error.__class__(f"rank {rank}: {error}"))
    os._exit(0)  # some contenders have threads of their own


# -- the parent --------------------------------------------------------------------------------------------------------


class Group:
    """The processes of one contender: forks, since all of them import the same."""

    def __init__(self, name: str, ranks: int, size: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        self.processes, self._pipes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (name, rank, ranks, size, self._folder.name, theirs)
            self.processes.append(context.Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
            self._pipes.append(ours)
            theirs.close()

    def ask(self, order: Any) -> list[Any]:
        """Give an order to all ranks, and return their answers."""
        for pipe in self._pipes:
            pipe.send(order)
        return self.answers()

    def answers(self) -> list[Any]:
        """Wait for an answer of each rank.

        Raises:
            ChildProcessError: a rank has failed.
        """
        found = []
        for pipe in self._pipes:
            if not pipe.poll(PATIENCE_S):
                raise ChildProcessError(f"no answer within {PATIENCE_S} seconds")
            found.append(pipe.recv())
            if isinstance(found[-1], Exception):
                raise ChildProcessError(str(found[-1]))
        return found

    def memory(self) -> int:
        """Return the bytes of all ranks that no file on disk backs; a page that several map counts once."""
        found = 0
        for process in self.processes:
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    found += int(line.split()[1]) * 1024
        return found

    def watched(self, *orders: Any) -> tuple[int, list[Any]]:
        """Return the most memory while orders are followed, and the answers to the last."""
        over, peak = threading.Event(), [self.memory()]

        def watch() -> None:
            while not over.wait(0.01):
                peak.append(self.memory())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            answers = [self.ask(order) for order in orders][-1]
        finally:
            over.set()
            thread.join()
        return max(*peak, self.memory()), answers

    def close(self) -> None:
        """End the processes, whatever they do: what they hold is theirs alone."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def losses_of(answers: list[dict[str, Any]]) -> list[float]:
    """Return the losses of a block: step after step, all ranks of each."""
    return [loss for step in zip(*(each["losses"] for each in answers), strict=True) for loss in step]


def measure(names: list[str], ranks: int, options: argparse.Namespace) -> dict[str, dict[str, list[Any]]]:
    """Return seconds, losses and peaks of each contender, and the speeds of the machine."""
    found: dict[str, dict[str, list[Any]]] = {}
    order, groups, before = random.Random(1), {}, {}
    with contextlib.ExitStack() as life:
        for name in names:
            group = Group(name, ranks, options.size)
            try:
                group.answers()
                before[name] = group.memory()
                peak, answers = group.watched("make", 3)
            except (ChildProcessError, EOFError) as error:
                print(f"{name} did not run: {error}", flush=True)
                group.close()
                continue
            life.callback(group.close)
            groups[name] = group
            found[name] = {"grown": [peak - before[name]], "seconds": [], "losses": losses_of(answers)}
            print(f"{ranks} ranks, {name}: grown by {found[name]['grown'][0] / MIB:.0f} MiB", flush=True)
        rates = found["machine"] = {"copy": [], "product": []}
        for _ in range(options.rounds):
            for name in order.sample(sorted(groups), len(groups)):
                answers = groups[name].ask(options.steps)
                found[name]["seconds"].append(max(each["seconds"] for each in answers))
                peak, watched = groups[name].watched(1)
                found[name]["grown"].append(peak - before[name])
                found[name]["losses"] += losses_of(answers) + losses_of(watched)
            measured = groups[names[0]].ask("speeds")
            rates["copy"].append(sum(each[0] for each in measured))
            rates["product"].append(sum(each[1] for each in measured))
    return found


def floor(size: str, ranks: int, rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the seconds that a step needs at least, by part."""
    model = make_model(size)
    mesh, numel = Mesh(num_devices=ranks), sum(each.numel() for each in model.parameters())
    exchanged = ranks * sum(each.nbytes for each in exchanges(groups_of(model, find_units(model), mesh), mesh))
    copy, product = statistics.median(rates["copy"]), statistics.median(rates["product"])
    multiplied = numel - model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    return {
        "arithmetic": 8 * multiplied * TOKENS * ranks / product,  # forward twice, backward
        "exchange": 2 * exchanged / copy,  # read and written
        "update": (UPDATED + 2) * numel / copy,
    }


def report(ranks: int, found: dict[str, dict[str, list[Any]]], options: argparse.Namespace, results: Results) -> None:
    rates = found.pop("machine")
    numel = sum(each.numel() for each in make_model(options.size).parameters())
    parts = floor(options.size, ranks, rates)
    copy, product = (statistics.median(rates[name]) / 1e9 for name in ("copy", "product"))
    print(f"\n{ranks} ranks, {numel / 1e6:.1f} M parameters; all ranks together copy {copy:.2f} GB/s (both ways)")
    print(f"and multiply {product:.1f} GFLOP/s. Floor of a step: {sum(parts.values()):.3f} s, ", end="")
    print(", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items()))
    results.add(f"{ranks} ranks: floor", sum(parts.values()), "s")
    rows = [("", "kept B/p.", "grown B/p.", "MiB", "s per step", "x fsdp2", "fastest", "last loss", "loss off")]
    for name, each in found.items():
        seconds, grown = statistics.median(each["seconds"]), max(each["grown"])
        base = found.get("fsdp2", each)
        ratio = statistics.median(a / b for a, b in zip(each["seconds"], base["seconds"], strict=True))
        off = [abs(a - b) for a, b in zip(each["losses"], base["losses"], strict=True)]
        rows.append(
            (
                name, str(KEPT[name]), f"{grown / numel:.2f}", f"{grown / MIB:.0f}", f"{seconds:.3f}",
                f"{ratio:.2f}", f"{min(each['seconds']):.3f}", f"{each['losses'][-1]:.4f}", f"{max(off):.4f}",
            )
        )  # fmt: skip
        results.add(f"{ranks} ranks, {name}: grown", grown / numel, "B/parameter")
        results.add(f"{ranks} ranks, {name}: step", seconds, "s")
        results.add(f"{ranks} ranks, {name}: step / fsdp2", ratio, "x")
        results.add(f"{ranks} ranks, {name}: loss off", max(off), "")
    print_columns(rows)
    firsts = {name: each["losses"][:ranks] for name, each in found.items()}  # of each rank, before any update
    every = torch.tensor(list(firsts.values()))
    if (every.amax(0) - every.amin(0)).max() > SAME_LOSS:
        raise SystemExit(f"the first losses differ by more than {SAME_LOSS}: {firsts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of one contender in a round")
    parser.add_argument("--size", choices=SHAPES, default="20M")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    names = options.only or list(CONTENDERS)
    if "zero-3" in names and not has_deepspeed():
        print("DeepSpeed is not installed, see --help: zero-3 is left out", flush=True)
        names = [name for name in names if name != "zero-3"]
        if not names:
            raise SystemExit("no contender is left")
    elif "zero-3" in names:
        compile_deepspeed()
    results, begin = Results(machine(1)), cpu_seconds()
    for ranks in options.ranks:
        report(ranks, measure(names, ranks, options), options, results)
    others = others_fraction(begin, cpu_seconds())
    results.add("CPU time of other processes", others, "of all")
    print(f"\nother processes took {others:.0%} of the CPU time")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
