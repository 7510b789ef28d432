"""What the process may use of the CPU: instruction sets, their override, threads under quotas."""

import os
import subprocess
import sys

import pytest
import torch

from lightning_cxl.errors import ConfigError
from lightning_cxl.native import _cpu
from lightning_cxl.optim.cpu_adam import CPUAdam


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
    assert CPUAdam([torch.zeros(1, requires_grad=True)]).isa == isa


def test_bad_override_names_what_exists(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_ISA", "avx9")
    with pytest.raises(ValueError, match="LIGHTNING_CXL_ISA='avx9' cannot be used: this CPU supports baseline"):
        _cpu.best_isa()
    with pytest.raises(ValueError, match="avx9"):
        CPUAdam([torch.zeros(1, requires_grad=True)])
    assert CPUAdam([torch.zeros(1, requires_grad=True)], isa="baseline").isa == "baseline"


def test_importing_with_a_bad_override_works():
    code = "import lightning_cxl.native._cpu, lightning_cxl.native._adam"
    environment = {**os.environ, "LIGHTNING_CXL_ISA": "nonsense"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_explicit_isa_must_exist():
    with pytest.raises(ConfigError, match="isa 'avx9' cannot be used"):
        CPUAdam([torch.zeros(1, requires_grad=True)], isa="avx9")


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


def test_the_optimizer_takes_them(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CPUAdam([torch.zeros(1, requires_grad=True)]).num_threads == _cpu.available_threads()
    assert CPUAdam([torch.zeros(1, requires_grad=True)], num_threads=7).num_threads == 7
    with pytest.raises(ConfigError, match="num_threads must be at least 1, got 0"):
        CPUAdam([torch.zeros(1, requires_grad=True)], num_threads=0)
