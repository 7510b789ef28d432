"""Who can share memory, by names alone."""

import platform

import pytest

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.same_machine import Place, own_place, why_apart

HERE = Place("boot", "pid:[1]", "node1")


def test_processes_of_one_kernel_and_namespace_share():
    assert why_apart([own_place(), own_place()]) is None
    # containers have names of their own, and may see each other all the same
    assert why_apart([HERE, HERE._replace(host="other")]) is None


def test_one_rank_gathers_nothing():
    assert why_apart([HERE]) == "one rank has the whole weights, so nothing is gathered"


def test_another_machine_is_named():
    there = HERE._replace(boot_id="later", host="node2")
    assert why_apart([HERE, HERE, there]) == (
        "rank 2 of the group runs in another machine (`node2`) than rank 0 (`node1`)"
    )


def test_another_container_is_named():
    hidden = HERE._replace(namespace="pid:[2]", host="pod")
    assert why_apart([HERE, hidden]) == (
        "rank 1 of the group runs in another namespace of process ids (`pod`) than rank 0 (`node1`)"
    )


def test_a_cpu_that_may_show_stores_in_another_order_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "the kind aarch64" in why_apart([HERE, HERE])
    assert why_apart([HERE]) == "one rank has the whole weights, so nothing is gathered"


def test_the_place_is_read_from_the_kernel(tmp_path):
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("abc\n")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[7]")
    assert own_place(tmp_path)[:2] == ("abc", "pid:[7]")
    with pytest.raises(UnsupportedError, match=r"does not say where this process runs.*share a machine.*Show.*proc"):
        own_place(tmp_path / "nothing")
