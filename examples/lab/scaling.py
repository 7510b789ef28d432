"""The predicted step of one model on more and more GPUs: what `plan` says for each number, in one table.

    python examples/lab/scaling.py [--model NAME] [--seq N] [--machine FILE.yaml] [--json FILE] [--quick]

Every GPU has the same batch, so a step of twice as many GPUs has twice the tokens. Efficiency is tokens per second and
GPU in those of one GPU alone. Nothing here is measured: speeds are those of the machine file, times are the formulas of
`lightning_cxl/planning/job.py`.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401  # where `results` is
from results import print_columns

from lightning_cxl.commands.plan import PlannedModel, Settings, make_plan
from lightning_cxl.machine.speeds import Machine, load_machine
from lightning_cxl.text import format_bytes

PREDICTED = "predicted, not measured"
SIZES = (1, 2, 4, 8, 16, 32, 64)
MACHINE = Path(__file__).resolve().parents[1] / "machines" / "eight_gpus.yaml"


@dataclass(frozen=True)
class Row:
    """One number of GPUs; seconds and what follows from them are predicted."""

    num_gpus: int
    num_machines: int
    between_nodes: str
    seconds: float
    tokens_per_s: float
    efficiency: float
    host_bytes: int
    """Of each machine."""
    received_bytes: float
    """By each GPU from others, in one step."""
    bound_by: str
    fits: bool


def scaling(model: PlannedModel, settings: Settings, machine: Machine, sizes: Iterable[int] = SIZES) -> list[Row]:
    """Return a row for each number of GPUs, and for both ways to put a model on several machines.

    Args:
        model: to train.
        settings: of each GPU.
        machine: all machines are like it; more GPUs than it has are on several.
        sizes: numbers of GPUs; those that are not a whole number of machines are left out.
    """
    rows: list[Row] = []
    for size in sizes:
        count = min(size, machine.device.count)
        if size % count:
            continue
        for between in ("replicate", "shard") if size > count else ("replicate",):
            chosen = replace(settings, num_nodes=size // count, between_nodes=between)
            rows.append(_row(model, chosen, machine.with_devices(count), rows[0] if rows else None))
    return rows


def _row(model: PlannedModel, settings: Settings, machine: Machine, first: Row | None) -> Row:
    found = make_plan(model, settings, machine, "bandwidth")
    time, mesh = found.chosen.time, found.job.mesh
    assert time is not None, found.chosen.error or "the machine file has no speeds"
    tokens_per_s = found.job.num_tokens / time.seconds
    each = tokens_per_s / mesh.num_ranks
    alone = each if first is None else first.tokens_per_s / first.num_gpus
    return Row(
        num_gpus=mesh.num_ranks,
        num_machines=mesh.num_machines,
        between_nodes=settings.between_nodes if mesh.num_machines > 1 else "",
        seconds=time.seconds,
        tokens_per_s=tokens_per_s,
        efficiency=each / alone,
        host_bytes=found.host_bytes,
        received_bytes=sum(each.nbytes for each in found.job.exchanges),
        bound_by=time.bound_by,
        fits=found.fits,
    )


def table(rows: Iterable[Row]) -> list[Sequence[str]]:
    """Return the rows as columns of text, with a header."""
    header = "GPUs", "machines", "between them", "step s", "tokens/s", "efficiency"
    cells: list[Sequence[str]] = [(*header, "host, each machine", "received, each GPU", "busiest", "fits")]
    cells += [
        (
            str(row.num_gpus),
            str(row.num_machines),
            row.between_nodes or "-",
            f"{row.seconds:.3f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.efficiency:.0%}",
            format_bytes(row.host_bytes),
            format_bytes(round(row.received_bytes)) if row.received_bytes else "-",
            row.bound_by,
            "yes" if row.fits else "no",
        )
        for row in rows
    ]
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="as for `plan` (%(default)s)")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each GPU (%(default)s)")
    parser.add_argument("--machine", type=Path, default=MACHINE, help="machine file (eight_gpus.yaml)")
    parser.add_argument("--quick", action="store_true", help="1 and 16 GPUs only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args(arguments)
    machine = load_machine(args.machine)
    settings = Settings(sequence=args.seq, batch=args.batch, loss="chunked")
    rows = scaling(PlannedModel(args.model), settings, machine, (1, 16) if args.quick else SIZES)
    print(f"{args.model}, {args.batch} x {args.seq} tokens on each GPU, machines like {machine.name}: {PREDICTED}\n")
    print_columns(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"note": PREDICTED, "rows": [vars(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
