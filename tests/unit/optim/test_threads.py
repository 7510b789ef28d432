"""What the kernels may use: instructions, threads under quotas, and teams of threads on several nodes."""

import os
import platform

import pytest
import torch

from lightning_cxl import CPUAdam
from lightning_cxl.errors import ConfigError, LightningCXLWarning
from lightning_cxl.machine.topology import nearest_cpu_nodes, usable_cpus
from lightning_cxl.native import _adam, _cpu
from lightning_cxl.optim.kernels import Stretch, ThreadTeams
from tests.unit.machine.test_ranks import write_machine


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("LIGHTNING_CXL_ISA", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_isas_agree_with_the_kernel_and_end_with_the_best():
    supported = _cpu.supported_isas()
    assert _cpu.best_isa() == supported[-1]
    if platform.machine() == "aarch64":
        assert supported == ("baseline", "neon")
        return
    assert supported == ("baseline", "avx2", "avx512")[: len(supported)]
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    assert ("avx2" in supported) == {"avx2", "fma"}.issubset(flags)


@pytest.mark.parametrize("isa", _cpu.supported_isas())
def test_override_reaches_the_optimizer(monkeypatch, isa):
    monkeypatch.setenv("LIGHTNING_CXL_ISA", isa)
    assert _cpu.best_isa() == isa
    assert CPUAdam([torch.nn.Parameter(torch.zeros(1))]).isa == isa


def test_isas_that_this_cpu_does_not_have_are_refused(monkeypatch):
    weights = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match="isa 'avx9' cannot be used"):
        CPUAdam(weights, isa="avx9")
    monkeypatch.setenv("LIGHTNING_CXL_ISA", "avx9")
    for use in (_cpu.best_isa, lambda: CPUAdam(weights)):
        with pytest.raises(ValueError, match="LIGHTNING_CXL_ISA='avx9' cannot be used: this CPU supports baseline"):
            use()
    assert CPUAdam(weights, isa="baseline").isa == "baseline"


def quota(text):
    return {"proc/self/cgroup": "0::/user.slice/job\n", "sys/fs/cgroup/user.slice/job/cpu.max": text}


ANCESTORS = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
    "sys/fs/cgroup/cpu.max": "800000 100000\n",
}
CONTAINER = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}
VERSION_1 = {
    "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/job\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "500000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpuset/job/cpu.cfs_quota_us": "100000\n",
    "sys/fs/cgroup/cpuset/job/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 16), (quota("max 100000\n"), 16), (quota("200000 100000\n"), 2), (quota("250000 100000\n"), 3),
        (quota("1000 100000\n"), 1), (VERSION_1, 5),
        (ANCESTORS, 3),  # the tightest counts
        (CONTAINER, 4),  # its own path is not mounted
    ],
)  # fmt: skip
def test_quotas_of_control_groups(tmp_path, files, threads):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert _cpu.available_threads(str(tmp_path)) == threads


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("4,2", 4), ("99", 16), ("0", 1), ("", 16), ("many", 16)])
def test_omp_num_threads_lowers(tmp_path, monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert _cpu.available_threads(str(tmp_path)) == threads


CHUNK = _adam.CHUNK


@pytest.fixture
def two_sockets(tmp_path):
    """Nodes 0 and 1 with two CPUs each; 2 and 3 without, near to 0 and to 1."""
    distances = ("10 21 14 24", "21 10 24 14", "14 24 10 26", "24 14 26 10")
    return write_machine(tmp_path, ([0, 1], [2, 3], [], []), distances)


def test_cpus_and_nearest_nodes(two_sockets):
    assert usable_cpus(two_sockets, frozenset(range(4))) == {0: (0, 1), 1: (2, 3)}
    assert usable_cpus(two_sockets, frozenset({0, 3, 9})) == {0: (0,), 1: (3,)}
    assert nearest_cpu_nodes(two_sockets, frozenset({0, 1})) == {0: 0, 1: 1, 2: 0, 3: 1}
    # a process bound to one socket: everything is nearest to it
    assert nearest_cpu_nodes(two_sockets, frozenset({1})) == dict.fromkeys(range(4), 1)


def test_one_node_with_cpus_needs_no_teams(two_sockets):
    assert ThreadTeams.detect(two_sockets, frozenset({2, 3})) is None
    teams = ThreadTeams.detect(two_sockets, frozenset(range(4)))
    assert teams is not None and list(teams.cpus) == [0, 0, 0, 1, 1, 2, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_stretches_follow_the_pages(dtype):
    flat = torch.zeros(5 * CHUNK + 7, dtype=dtype)
    nodes = [0, 0, 3, 1, None, 2]
    starts = {flat.data_ptr() + index * CHUNK * flat.element_size(): node for index, node in enumerate(nodes)}
    teams = ThreadTeams({0: (0,), 1: (1,)}, {0: 0, 1: 1, 2: 0, 3: 1}, where=starts.__getitem__)
    assert teams.stretches(flat) == [
        Stretch(0, 2 * CHUNK, 0),
        Stretch(2 * CHUNK, 4 * CHUNK, 1),
        Stretch(4 * CHUNK, 5 * CHUNK + 7, 0),  # unknown counts as the first team
    ]


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teams_do_not_change_the_result(state, dtype):
    def trained(teams):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in (3 * CHUNK + 100, 50, 2 * CHUNK)]
        adam = CPUAdam(parameters, lr=1e-2, state=state)
        adam.teams = teams
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            adam.step()
        return [p.detach() for p in parameters] + [t for s in adam.state.values() for t in s.values()]

    alternating = ThreadTeams({0: (0,), 1: (0,)}, {0: 0, 1: 1}, where=lambda address: address >> 17 & 1)
    for one, other in zip(trained(None), trained(alternating), strict=True):
        assert torch.equal(one, other)


def test_a_kernel_that_does_not_say_where_pages_are_is_asked_once():
    asked = []

    def refuse(address):
        asked.append(address)
        raise PermissionError(1, "Operation not permitted")

    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3 * CHUNK + 100, 50)]
    adam = CPUAdam(parameters, lr=0.1)
    adam.teams = ThreadTeams({0: (0,), 1: (1,)}, {0: 0, 1: 1}, where=refuse)
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.shape)
    with pytest.warns(LightningCXLWarning, match="refuses to say where pages are .*Operation not permitted") as found:
        adam.step()
    adam.step()
    assert len(found) == len(asked) == 1
    assert not adam.teams.cpus, "all work is in one team: its CPUs must not get all threads"
    assert all(torch.equal(p, p[:1].expand_as(p)) and (p < 1).all() for p in parameters)
    assert [int(state["step"]) for state in adam.state.values()] == [2, 2]
