"""``python -m lightning_cxl bench NAME``: which benchmarks there are. Each is imported when it runs."""

import argparse
import importlib
from collections.abc import Mapping, Sequence

_BENCHMARKS: Mapping[str, tuple[str, str]] = {
    "adam": (
        "the optimizer step and the gradient check, against memory and torch",
        "lightning_cxl.commands.bench.adam",
    ),
    "ssd": ("reads and writes of the SSD tier, against fio and a plain loop", "lightning_cxl.commands.bench.ssd"),
    "pools": ("host memory for weights on SSD, by layout of the pool; computed", "lightning_cxl.commands.bench.pools"),
}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names with the other arguments."""
    width = max(map(len, _BENCHMARKS))
    lines = [f"  {name:{width}}  {what}" for name, (what, _) in _BENCHMARKS.items()]
    parser = argparse.ArgumentParser(
        "python -m lightning_cxl bench",
        usage="%(prog)s NAME [OPTIONS]",
        description="\n".join(["Measure a part of this package on this machine:", "", *lines]),
        epilog="%(prog)s NAME --help shows the options of a benchmark.\nexample: %(prog)s adam",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(_BENCHMARKS), metavar="NAME", help="what is measured")
    name = parser.parse_args(arguments[:1]).name
    importlib.import_module(_BENCHMARKS[name][1]).main(arguments[1:])
