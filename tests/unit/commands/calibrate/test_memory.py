"""Measurements of memory: buffers large enough, on the right node."""

from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import (
    ADAM,
    READ,
    WRITE,
    Figure,
    Options,
    cache_bytes,
    measure_nodes,
)
from lightning_cxl.machine.topology import Topology

TINY = Options(rounds=2, node_bytes=1 << 20)
CPU = "sys/devices/system/cpu"


def write_cache(root, cpu, index, level, size, shared, kind="Unified"):
    folder = root / CPU / f"cpu{cpu}/cache/index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared), ("type", kind)):
        (folder / name).write_text(f"{text}\n")


def test_last_level_caches_are_counted_once_and_only_those_of_this_process(tmp_path):
    for cpu in range(6):
        write_cache(tmp_path, cpu, 0, 1, "32K", str(cpu), "Data")
        write_cache(tmp_path, cpu, 1, 1, "32K", str(cpu), "Instruction")
        group = cpu // 2 * 2
        write_cache(tmp_path, cpu, 3, 3, "16384K" if group else "96M", f"{group}-{group + 1}")
    assert cache_bytes([0, 1, 2], tmp_path) == (96 + 16) << 20
    assert cache_bytes([4], tmp_path) == 16 << 20
    assert cache_bytes([77], tmp_path) == 0


def test_nodes_are_measured_and_memory_has_the_size_it_should(monkeypatch):
    sizes = []
    allocate = calibrate.NumaResource.allocate

    def spy(self, nbytes, **kwargs):
        sizes.append((self.node_id, nbytes))
        return allocate(self, nbytes, **kwargs)

    monkeypatch.setattr(calibrate.NumaResource, "allocate", spy)
    topology = Topology.detect()
    found = measure_nodes(topology, TINY, 0)
    real = [n for tier in topology.tiers if not tier.emulated for n in tier.node_ids]
    assert set(found) == {(n, access) for n in real for access in (READ, WRITE, ADAM)}
    assert sizes == [(n, 1 << 20) for n in real]
    assert all(figure.value > 1e6 and figure.spread >= 0 for figure in found.values())
    sizes.clear()
    measure_nodes(topology, TINY, 1 << 20)
    assert sizes == [(n, 4 << 20) for n in real]  # four times the caches


def test_bytes_that_are_counted(monkeypatch):
    """A second per sweep: reading and writing count every byte once, Adam's three updated arrays twice."""

    def measured(runs, rounds):
        for run in runs.values():
            run()
        return dict.fromkeys(runs, Figure(1.0, 0.0))

    monkeypatch.setattr(calibrate, "measure", measured)
    found = measure_nodes(Topology.detect(), TINY, 0)
    node = min(found)[0]
    assert [found[node, access].value for access in (READ, WRITE, ADAM)] == [1 << 20, 1 << 20, 7 << 18]
