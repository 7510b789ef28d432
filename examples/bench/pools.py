"""Host memory that weights on SSD pass through, by layout of the pool.

    python examples/bench/pools.py [--models NAME ...] [--in-flight 2] [--json FILE]

Weights on SSD are read into slots of a pool in host memory. Three layouts of that pool, computed from the shapes of a
model; no weights are loaded:

  largest   each matrix gets a slot as large as the largest one (ZeRO-Infinity)
  shapes    each matrix gets a slot of its own shape (MemAscend)
  units     each unit gets a slot with room for all its tensors, vectors too, in whole blocks of the disk (ours)

All hold the matrices outside of units (embedding, output) and so many units as are in flight at once.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from results import Results, machine, print_columns
from torch import nn

from lightning_cxl.commands.parsers import check_target
from lightning_cxl.errors import ConfigError
from lightning_cxl.native import _cpu
from lightning_cxl.streaming.units import find_units
from lightning_cxl.weights.hf import model_on_meta

_BLOCK_BYTES = 4096
_GIB = 2**30


class PoolBytes(NamedTuple):
    """Bytes of a pool in three layouts, see `pool_bytes`."""

    largest: int
    shapes: int
    units: int

    def saving(self, nbytes: int) -> float:
        """Return which part of the layout `largest` another one saves."""
        return 1 - nbytes / self.largest


def pool_bytes(model: nn.Module, *, in_flight: int = 1, itemsize: int = 2) -> PoolBytes:
    """Return what a pool takes through which the weights of a model pass.

    Args:
        model: on any device; only shapes count. Tied weights are one.
        in_flight: units whose weights are in host memory at once.
        itemsize: bytes of one number.

    Raises:
        ConfigError: the model has no units.
    """
    units = [list(unit.parameters()) for _, unit in find_units(model)]
    if not units:
        raise ConfigError("the model has no units: a pool through which units pass has nothing to hold")
    inside = {id(parameter) for unit in units for parameter in unit}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    # units differ in some models: the largest ones may be in flight together
    outside_sizes = _matrices(outside)
    unit_sizes = [_matrices(unit) for unit in units]
    largest = max(itertools.chain(outside_sizes, *unit_sizes))
    num_slots = len(outside_sizes) + _of_largest([len(sizes) for sizes in unit_sizes], in_flight)
    shapes = sum(outside_sizes) + _of_largest([sum(sizes) for sizes in unit_sizes], in_flight)
    slots = [_blocks(sum(parameter.numel() for parameter in unit) * itemsize) for unit in units]
    rest = _blocks(sum(parameter.numel() for parameter in outside) * itemsize)
    return PoolBytes(
        largest=num_slots * largest * itemsize,
        shapes=shapes * itemsize,
        units=rest + _of_largest(slots, in_flight),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute what the arguments ask for; print a table and write JSON."""
    parser = argparse.ArgumentParser(
        "python examples/bench/pools.py",
        description=__doc__,
        epilog="example: python examples/bench/pools.py --models llama-3.1-8b --in-flight 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["llama-3.1-8b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"],
        metavar="NAME",
        help="folders with a config.json, hub ids, or shapes as of `plan` (default: four of 7B to 32B)",
    )
    parser.add_argument("--in-flight", type=int, default=1, metavar="N", help="units in host memory (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args(arguments)
    if args.in_flight < 1:
        parser.error("--in-flight must be at least 1")
    check_target(args.json)
    results = Results(machine(_cpu.available_threads()))
    found = {name: pool_bytes(model_on_meta(name), in_flight=args.in_flight) for name in args.models}
    print(f"GiB of 16-bit weights in host memory, {args.in_flight} of the units in flight\n")
    rows: list[tuple[str, ...]] = [("", *PoolBytes._fields, "shapes saves", "units saves")]
    for name, pool in found.items():
        savings = [pool.saving(pool.shapes), pool.saving(pool.units)]
        rows.append((name, *(f"{nbytes / _GIB:.2f}" for nbytes in pool), *(f"{saving:.2%}" for saving in savings)))
        for layout, nbytes in pool._asdict().items():
            results.add(f"{name}: {layout}", nbytes / _GIB, "GiB")
    means = [math.fsum(pool.saving(pool[layout]) for pool in found.values()) / len(found) for layout in (1, 2)]
    rows.append(("mean", "", "", "", *(f"{mean:.2%}" for mean in means)))
    for layout, mean in zip(PoolBytes._fields[1:], means, strict=True):
        results.add(f"mean saving of {layout}", mean, "of largest")
    print_columns(rows)
    if args.json:
        results.write(args.json)


def _matrices(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the numbers of elements of all that are no vectors: norms and biases stay in memory everywhere."""
    return [parameter.numel() for parameter in parameters if parameter.dim() > 1]


def _of_largest(values: Sequence[int], count: int) -> int:
    return sum(sorted(values)[-count:])


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


if __name__ == "__main__":
    main()
