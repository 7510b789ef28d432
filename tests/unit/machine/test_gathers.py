"""Shared memory or peers: what link speeds say."""

import pytest

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.gathers import GatherLinks, GatherSeconds, predict_gather

GB = 10**9
NVLINK = GatherLinks(
    ranks=8,
    host_link_bytes_per_s=50 * GB,
    host_memory_bytes_per_s=320 * GB,
    peer_bytes_per_s=350 * GB,
    peers_use_host_link=False,
)
PCIE = GatherLinks(
    ranks=4,
    host_link_bytes_per_s=25 * GB,
    host_memory_bytes_per_s=200 * GB,
    peer_bytes_per_s=20 * GB,
    peers_use_host_link=True,
)


def test_devices_with_links_of_their_own_send_each_other_their_parts():
    found = predict_gather(8 * GB, NVLINK)
    assert found.shared == pytest.approx(8 / 40)  # the host's memory is read by eight
    assert found.peers == pytest.approx(max(1 / 40, 7 / 350))
    assert not found.shares_weights
    assert found.explain() == (
        "weights come together by gathers between ranks: 320.00 GB/s, shared host memory 40.00 GB/s (predicted)"
    )


def test_slow_links_of_their_own_are_what_is_waited_for():
    slow = GatherLinks(**{**{name: getattr(NVLINK, name) for name in NVLINK.__slots__}, "peer_bytes_per_s": 30 * GB})
    assert predict_gather(8 * GB, slow).peers == pytest.approx(7 / 30)
    assert predict_gather(8 * GB, slow).shares_weights


def test_without_such_links_every_device_reads_host_memory():
    found = predict_gather(4 * GB, PCIE)
    assert found.shared == pytest.approx(4 / 25)
    assert found.peers == pytest.approx(1 / 25 + 3 / 20)  # one link for both
    assert found.shares_weights
    assert found.explain().startswith("weights come together by shared host memory: 25.00 GB/s, gathers between ranks")


def test_what_takes_as_long_is_shared():
    assert GatherSeconds(1, 2.0, 2.0, "measured").shares_weights
    assert GatherSeconds(1, 2.0, 2.0, "measured").explain().startswith("weights come together by shared host memory")


@pytest.mark.parametrize(("name", "value"), [("ranks", 0), ("peer_bytes_per_s", 0.0), ("host_link_bytes_per_s", -1.0)])
def test_numbers_of_no_machine_are_refused(name, value):
    numbers = {field: getattr(PCIE, field) for field in PCIE.__slots__}
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {value}"):
        GatherLinks(**{**numbers, name: value})
