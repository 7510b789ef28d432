"""``python -m lightning_cxl calibrate``: measure, show, keep."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_cxl.commands import parsers
from lightning_cxl.commands.calibrate.measure import NamedEngine, Row, measure_machine
from lightning_cxl.commands.calibrate.options import QUICK, Options
from lightning_cxl.commands.calibrate.ssd import check_ssd
from lightning_cxl.commands.measuring.files import check_target
from lightning_cxl.commands.measuring.results import Results, machine, print_columns
from lightning_cxl.commands.measuring.timing import cpu_seconds, others_fraction
from lightning_cxl.devices.device_type import devices_apart
from lightning_cxl.errors import LightningCXLError
from lightning_cxl.machine.calibration import save_calibration
from lightning_cxl.machine.machine_file import save_machine
from lightning_cxl.machine.speeds import machine_of
from lightning_cxl.machine.topology import Topology
from lightning_cxl.native import _cpu
from lightning_cxl.ssd_options import SsdOptions
from lightning_cxl.transfer.engine import make_engine

_SCALES = {"B/s": (1e-9, "GB/s"), "FLOP/s": (1e-12, "TFLOP/s"), "ns": (1.0, "ns"), "s": (1e6, "us")}


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments ask for, print a table, and keep the result."""
    args = parsers.calibrate().parse_args(arguments)
    check_target(args.json)
    check_target(args.output)
    for folder in args.ssd:
        check_ssd(folder)
    start, busy = time.perf_counter(), cpu_seconds()
    topology = Topology.detect()
    threads = torch.get_num_threads()
    torch.set_num_threads(_cpu.available_threads())
    devices = devices_apart()
    try:
        calibration, rows = measure_machine(
            topology,
            [NamedEngine(f"{each.name} {i}", make_engine(each.device)) for i, each in enumerate(devices)],
            QUICK if args.quick else Options(),
            ssds=args.ssd,
        )
    finally:
        torch.set_num_threads(threads)
    calibration = replace(calibration, others_fraction=others_fraction(busy, cpu_seconds()))
    _print(rows)
    if calibration.doubtful:
        print(
            f"  doubtful: other processes took {calibration.others_fraction:.0%} of the CPU time meanwhile; measure "
            "again without them"
        )
    names = [each.name for each in devices]
    kept = save_calibration(calibration, topology, names)
    print(f"\n{time.perf_counter() - start:.0f} s; kept in {kept}")
    if args.json:
        _results(rows).write(args.json)
    if args.output:
        drives = tuple(folder.resolve() for folder in args.ssd)
        described = topology.with_ssd(SsdOptions(drives)) if drives else topology
        found = machine_of(described, devices[0].device.type if devices else "cpu")
        if found is None:
            raise LightningCXLError(
                f"{args.output} was not written: not every node could be measured, see above. Free memory on the "
                "others and measure again."
            )
        save_machine(found, args.output)
        print(f"written: {args.output}")


def _print(rows: Sequence[Row]) -> None:
    table: list[tuple[str, ...]] = [("", "", "", "spread")]
    for name, unit, figure in rows:
        scale, shown = _SCALES[unit]
        table.append((name, f"{figure.value * scale:.2f}", shown, f"{figure.spread:.0%}"))
    print_columns(table)


def _results(rows: Sequence[Row]) -> Results:
    results = Results(machine(_cpu.available_threads()))
    for name, unit, figure in rows:
        results.add(name, figure.value, unit)
        results.add(f"{name}, spread", figure.spread, "x median")
    return results
