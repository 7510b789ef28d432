"""Simulated links take what the performance model predicts, but for caches and contention."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from simulation.links import HostTraffic
from simulation.machine_links import links_of

from lightning_cxl.machine.speeds import Cache, load_machine
from lightning_cxl.planning.job import predict_adam_seconds, predict_copy_seconds

MACHINES = Path(__file__).resolve().parents[3] / "examples" / "machines"
PAPER = load_machine(MACHINES / "paper_a.yaml")
PLAIN = replace(
    PAPER,
    cache=Cache(),
    write_contention=math.inf,
    tiers=tuple(replace(tier, device_write_buffer_bytes=0) for tier in PAPER.tiers),
)
SPLITS = [{"dram0": 1 - share, "cxl0": share} for share in (0, 0.2, 0.5, 0.8, 1)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_takes_what_is_predicted(direction, split):
    nbytes = 2**31
    seconds = links_of(PAPER).route(direction, split).seconds(nbytes)
    assert seconds == pytest.approx(predict_copy_seconds(nbytes, split, PLAIN, direction))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_an_adam_update_takes_what_is_predicted(split):
    traffic = {tier: HostTraffic(16, 12) * (share * 10**9) for tier, share in split.items() if share}
    seconds = links_of(PAPER).host_route(traffic).seconds(28 * 10**9)
    assert seconds == pytest.approx(predict_adam_seconds(10**9, split, PLAIN))


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_links(path):
    machine = load_machine(path)
    assert list(links_of(machine).tiers) == list(machine.names)


def test_a_mix_slower_than_one_direction_is_as_fast_as_that():
    slow = replace(PLAIN, tiers=tuple(replace(tier, adam_bytes_per_s=1e9) for tier in PLAIN.tiers))
    assert links_of(slow).tiers["cxl0"].duplex == 1
