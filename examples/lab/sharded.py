"""How well the work of several ranks overlaps on one machine, in simulated time: 2, 4 and 8 GPUs of a machine file.

    python examples/lab/sharded.py [--prefetch 0 1 2] [--json FILE] [--quick]

Units of Llama 3.1 8B are read from host memory, gathered, computed, reduced, written and updated, each on resources of
its own that ranks share: see `examples/lab/schedule/sharded.py`. Updates run behind the next forward, as they do by
default. The ideal is what the busiest resource takes, in forward and in backward. Each line says, too, what `plan`
predicts for the same work.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import bench_path  # noqa: F401  # where `results` is
from footprint import PUBLISHED, ModelShape
from results import Results, machine, print_columns
from schedule.sharded import ShardedUnits, simulate
from simulation.links import HostTraffic, Links
from simulation.machine_links import links_of

from lightning_cxl.inventory.tensors import Mesh
from lightning_cxl.machine.speeds import Machine, load_machine
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job, MemoryClass, Move, UnitShards, exchanges, predict_step

GOAL = 1.10
_MACHINE = Path(__file__).resolve().parents[1] / "machines" / "eight_gpus.yaml"
_ADAM_READ, _ADAM_WRITTEN = 14, 12
"""Bytes of one parameter: halves of weights, momentum and variance are read and written, a gradient is read."""


def units_of(shape: ModelShape, tokens: int, host: Machine, num_ranks: int) -> ShardedUnits:
    """Return a model in equal units on a machine, all of it in the machine's first tier."""
    numel = shape.num_parameters / shape.num_layers
    forward_s = shape.forward_flops(1, tokens) / shape.num_layers / host.device.flops
    links, tier = links_of(host), host.tiers[0].name
    assert host.links.peer_bytes_per_s is not None, "the machine file does not say how fast devices reach each other"
    return ShardedUnits(
        num_ranks=num_ranks,
        num_units=shape.num_layers,
        forward_s=forward_s,
        backward_s=3 * forward_s,
        weight_bytes=2 * numel,
        activation_bytes=shape.activation_bytes(1, tokens) / shape.num_layers,
        adam=HostTraffic(_ADAM_READ * numel, _ADAM_WRITTEN * numel),
        links=Links(links.device, {"host": links.tiers[tier]}),
        peer_bytes_per_s=host.links.peer_bytes_per_s,
        peer_latency_s=host.links.peer_latency_s,
    )


def predicted_s(units: ShardedUnits, host: Machine) -> float:
    """Return what `plan` predicts for the same work."""
    n, mesh = units.num_units, Mesh(num_devices=units.num_ranks)
    shard = round(units.shard_bytes)
    read, inputs = n * units.shard_bytes, n * units.activation_bytes
    moves = (
        (TensorRole.COMPUTE_WEIGHTS, (Move("forward", "h2d", read), Move("backward", "h2d", read))),
        (TensorRole.COMPUTE_GRADS, (Move("backward", "d2h", n * units.shard_bytes),)),
        (TensorRole.ACTIVATIONS, (Move("forward", "d2h", inputs), Move("backward", "h2d", inputs))),
        (TensorRole.MOMENTUM, (Move("update", "cpu", n * units.adam.nbytes),)),
    )
    job = Job(
        name="units",
        classes=tuple(MemoryClass(role=role, nbytes=0, moves=each) for role, each in moves),
        num_units=n,
        forward_flops=n * units.forward_s * host.device.flops,
        backward_flops=n * units.backward_s * host.device.flops,
        overlap=units.overlap,
        exchanges=exchanges([UnitShards("unit", shard, shard)] * n, mesh),
    )
    alone = replace(host, write_contention=float("inf")).with_devices(units.num_ranks)
    return predict_step(job, {role: {host.tiers[0].name: 1.0} for role in job.free_classes()}, alone).seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefetch", nargs="+", type=int, default=[0, 1, 2], help="units ahead (0 1 2)")
    parser.add_argument("--quick", action="store_true", help="2 GPUs and one length only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args(arguments)
    host, shape, results = load_machine(_MACHINE), PUBLISHED["llama-3.1-8b"], Results(machine(1))
    rows: list[Sequence[str]] = [("GPUs, tokens", "ahead", "step s", "x ideal", "x longest", "planned", "busiest")]
    ratios: dict[str, tuple[int, float]] = {}
    for count in (2,) if args.quick else (2, 4, 8):
        for tokens in (2048,) if args.quick else (1024, 2048, 4096, 16384):
            units, name = units_of(shape, tokens, host, count), f"{count}, {tokens}"
            planned = predicted_s(units, host)
            for ahead in args.prefetch:
                step = simulate(replace(units, prefetch=ahead))
                ratio, longest = step.seconds / step.ideal_s, step.seconds / step.longest_s
                busiest = f"{step.bound_by('forward')}; {step.bound_by('backward')}"
                times = f"{step.seconds:.3f}", f"{ratio:.3f}", f"{longest:.3f}", f"{planned / step.seconds:.3f}"
                rows.append((name, str(ahead), *times, busiest))
                ratios[f"{name}, {ahead} ahead"] = ahead, ratio
    print(f"one step of {shape.name} on {host.name}, simulated; busiest in forward and in backward\n")
    print_columns(rows)
    print()
    for name, (ahead, ratio) in ratios.items():
        if ahead:
            results.at_most(name, ratio, "x ideal", GOAL)
        else:
            results.add(name, ratio, "x ideal")
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)


if __name__ == "__main__":
    main()
