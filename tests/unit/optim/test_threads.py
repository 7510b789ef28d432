"""Threads of the kernels: instructions, quotas, teams of nodes, and that they sleep between calls."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_cxl import CPUAdam, OffloadConfig
from lightning_cxl.errors import ConfigError, LightningCXLWarning
from lightning_cxl.gradients.guard import Addition, GradientMeter
from lightning_cxl.machine.topology import nearest_cpu_nodes, usable_cpus
from lightning_cxl.native import _adam, _cpu
from lightning_cxl.optim.kernels import Stretch, ThreadTeams, kernel_threads


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("LIGHTNING_CXL_ISA", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return str(root)


def test_isas_agree_with_the_kernel_and_end_with_the_best():
    supported = _cpu.supported_isas()
    assert supported == ("baseline", "avx2", "avx512")[: len(supported)]
    assert _cpu.best_isa() == supported[-1]
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    assert ("avx2" in supported) == {"avx2", "fma"}.issubset(flags)


@pytest.mark.parametrize("isa", _cpu.supported_isas())
def test_override_reaches_the_optimizer(monkeypatch, isa):
    monkeypatch.setenv("LIGHTNING_CXL_ISA", isa)
    assert _cpu.best_isa() == isa
    assert CPUAdam([torch.nn.Parameter(torch.zeros(1))]).isa == isa


def test_bad_override_names_what_exists(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_ISA", "avx9")
    with pytest.raises(ValueError, match="LIGHTNING_CXL_ISA='avx9' cannot be used: this CPU supports baseline"):
        _cpu.best_isa()
    with pytest.raises(ValueError, match="avx9"):
        CPUAdam([torch.nn.Parameter(torch.zeros(1))])
    assert CPUAdam([torch.nn.Parameter(torch.zeros(1))], isa="baseline").isa == "baseline"


def test_importing_with_a_bad_override_works():
    code = "import lightning_cxl.native._cpu, lightning_cxl.native._adam"
    environment = {**os.environ, "LIGHTNING_CXL_ISA": "nonsense"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_explicit_isa_must_exist():
    with pytest.raises(ConfigError, match="isa 'avx9' cannot be used"):
        CPUAdam([torch.nn.Parameter(torch.zeros(1))], isa="avx9")


def test_affinity_without_any_limit(tmp_path):
    assert _cpu.available_threads(str(tmp_path)) == 16


@pytest.mark.parametrize(
    ("text", "threads"), [("max 100000\n", 16), ("200000 100000\n", 2), ("250000 100000\n", 3), ("1000 100000\n", 1)]
)
def test_quota_of_cgroup_v2(tmp_path, text, threads):
    files = {"proc/self/cgroup": "0::/user.slice/job\n", "sys/fs/cgroup/user.slice/job/cpu.max": text}
    assert _cpu.available_threads(write(tmp_path, files)) == threads


def test_the_tightest_ancestor_counts(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/cpu.max": "800000 100000\n",
    }
    assert _cpu.available_threads(write(tmp_path, files)) == 3


def test_inside_a_container_the_path_may_not_be_mounted(tmp_path):
    files = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}
    assert _cpu.available_threads(write(tmp_path, files)) == 4


def test_quota_of_cgroup_v1(tmp_path):
    files = {
        "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/job\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "500000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpuset/job/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpuset/job/cpu.cfs_period_us": "100000\n",
    }
    assert _cpu.available_threads(write(tmp_path, files)) == 5


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("4,2", 4), ("99", 16), ("0", 1), ("", 16), ("many", 16)])
def test_omp_num_threads_lowers(tmp_path, monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert _cpu.available_threads(str(tmp_path)) == threads


@pytest.mark.parametrize("num_threads", [2.5, "2", 0, -1], ids=repr)
def test_the_optimizer_takes_them(monkeypatch, num_threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CPUAdam([torch.nn.Parameter(torch.zeros(1))]).num_threads == _cpu.available_threads()
    assert CPUAdam([torch.nn.Parameter(torch.zeros(1))], num_threads=7).num_threads == 7
    with pytest.raises(ConfigError, match=r"num_threads must be at least 1, got .*: give a whole number"):
        CPUAdam([torch.nn.Parameter(torch.zeros(1))], num_threads=num_threads)


CHUNK = _adam.CHUNK


@pytest.fixture
def two_sockets(tmp_path):
    """Nodes 0 and 1 with two CPUs each; 2 and 3 without, near to 0 and to 1."""
    nodes = tmp_path / "sys/devices/system/node"
    rows = {0: ("0-1", "10 21 14 24"), 1: ("2-3", "21 10 24 14"), 2: ("", "14 24 10 26"), 3: ("", "24 14 26 10")}
    for node, (cpus, distances) in rows.items():
        folder = nodes / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "distance").write_text(distances + "\n")
    (nodes / "online").write_text("0-3\n")
    return tmp_path


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


def test_cpus_beyond_the_kernels_masks_are_left_out():
    teams = ThreadTeams({0: (0, 1024), 1: (1023, 2000)}, {0: 0, 1: 1}, where=lambda address: 1)
    assert list(teams.cpus) == [0, 0, 1, 1023]
    parameter = torch.nn.Parameter(torch.ones(10))
    parameter.grad = torch.ones(10)
    adam = CPUAdam([parameter], lr=0.1)
    adam.teams = teams
    adam.step()
    assert (parameter < 1).all()


@pytest.mark.parametrize(
    ("cpus", "options", "computes_on_host", "expected"),
    [
        (16, {}, False, 14),
        (3, {}, False, 1),
        (2, {}, False, 1),
        (1, {}, False, 1),
        (16, {}, True, 16),
        (16, {"overlap_step": True, "stream_weights": True}, True, 16),
        (16, {"overlap_step": False}, False, 16),
        (16, {"cpu_adam": False}, False, 16),
        (16, {"num_threads": 16}, False, 16),
        (16, {"num_threads": 3}, False, 3),
    ],
)
def test_cores_are_left_to_those_who_keep_a_device_busy(cpus, options, computes_on_host, expected, monkeypatch):
    monkeypatch.setattr(_cpu, "available_threads", lambda: cpus)
    assert kernel_threads(OffloadConfig(**options), computes_on_host) == expected


def kernel_tasks() -> set[Path]:
    """Return the threads of kernels: they sleep between calls."""
    return {path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "cxl-kernel\n"}


def seconds_on_cpu() -> float:
    return sum(int((path / "schedstat").read_text().split()[0]) for path in kernel_tasks()) / 1e9


def run_kernels(num_threads: int) -> None:
    meter = GradientMeter(num_threads)
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    weight.grad = torch.zeros(1 << 20)
    meter.copy_all([(torch.ones(1 << 20), weight.grad)])
    meter.accumulate_all([Addition(torch.ones(1 << 20), weight.grad, 1)])
    CPUAdam([weight], num_threads=num_threads).step()


def run_on_a_thread(num_threads: int) -> None:
    runner = threading.Thread(target=run_kernels, args=(num_threads,))
    runner.start()
    runner.join()


def test_a_child_forked_before_the_first_call_runs_kernels():
    """With tensors so small that operators of torch take one thread: its others are the parent's."""
    code = """
import os, signal, torch
from lightning_cxl import CPUAdam
weights = [torch.nn.Parameter(torch.zeros(30_000)) for _ in range(8)]
for weight in weights:
    weight.grad = torch.zeros(30_000)
optimizer = CPUAdam(weights)
torch.ones(1 << 22).add_(1)
if os.fork() == 0:
    signal.alarm(30)
    optimizer.step()
    os._exit(0)
assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_beside_the_main_thread_share_threads_that_sleep_between_them():
    run_on_a_thread(4)
    before = kernel_tasks()
    assert len(before) >= 6  # three of each module
    for _ in range(20):
        run_on_a_thread(4)  # threads belong to no caller
        run_on_a_thread(3)
    assert kernel_tasks() == before
    used = seconds_on_cpu()
    time.sleep(0.2)
    assert seconds_on_cpu() - used < 0.01


@pytest.fixture
def torch_threads():
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(1)


def test_on_the_main_thread_kernels_run_on_torchs_threads(torch_threads):
    torch.ones(1 << 22).add_(1)
    before = set(Path("/proc/self/task").iterdir())
    run_kernels(torch_threads)
    assert set(Path("/proc/self/task").iterdir()) <= before


def test_kernels_run_in_a_forked_child():
    """Its parent's threads are not there, and its parent's list of them says otherwise."""
    run_kernels(4)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        run_kernels(4)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
