import pytest

from lightning_cxl.machine.topology import cgroup_limits, host_available_bytes, host_limit_bytes

MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712\n"
MEMINFO = "MemTotal: 4194304 kB\nMemAvailable: 3145728 kB\n"


@pytest.fixture
def host(tmp_path):
    """Return ``host({"proc/self/cgroup": ..., ...})``: a 4 GiB machine with 3 GiB available and these files."""

    def make(files):
        for path, text in {"proc/meminfo": MEMINFO, **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


def v1(path, limit, usage=0, inactive_file=0):
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"inactive_file 12345\ntotal_inactive_file {inactive_file}\ntotal_active_file 0\n",
    }


def v2(path, limit, usage=0, inactive_file=0, high="max"):
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive_file}\nactive_file 0\n",
    }


def test_v1_unlimited(host):
    root = host({"proc/self/cgroup": "4:memory:/a\n0::/\n", **v1("/a", UNLIMITED_V1), **v1("", UNLIMITED_V1)})
    assert cgroup_limits(root) == ()
    assert (host_limit_bytes(root), host_available_bytes(root)) == (4096 * MIB, 3072 * MIB)


@pytest.mark.parametrize(("version", "line"), [(v1, "4:memory:/a/b\n"), (v2, "0::/a/b\n")])
def test_own_group_limits(host, version, line):
    root = host({"proc/self/cgroup": line, **version("/a/b", 512 * MIB, 300 * MIB, inactive_file=100 * MIB)})
    assert host_limit_bytes(root) == 512 * MIB
    assert host_available_bytes(root) == (512 - 300 + 100) * MIB


@pytest.mark.parametrize(("version", "line"), [(v1, "4:cpu,memory:/a/b\n"), (v2, "0::/a/b\n")])
def test_every_ancestor_counts(host, version, line):
    files = {**version("/a/b", 2048 * MIB, 1024 * MIB), **version("/a", 3072 * MIB, 2944 * MIB)}
    root = host({"proc/self/cgroup": line, **files})
    assert host_limit_bytes(root) == 2048 * MIB
    assert host_available_bytes(root) == 128 * MIB


@pytest.mark.parametrize(("version", "line"), [(v1, "4:memory:/docker/0ab\n"), (v2, "0::/../outside/0ab\n")])
def test_container_sees_its_own_group_at_the_mounts_top(host, version, line):
    root = host({"proc/self/cgroup": line, **version("", 256 * MIB, 56 * MIB)})
    assert host_limit_bytes(root) == 256 * MIB
    assert host_available_bytes(root) == 200 * MIB


@pytest.mark.parametrize(("limit", "high"), [("max", 64 * MIB), (128 * MIB, 64 * MIB), (64 * MIB, 128 * MIB)])
def test_v2_high_limits_too(host, limit, high):
    root = host({"proc/self/cgroup": "0::/a\n", **v2("/a", limit, 10 * MIB, high=high)})
    assert host_limit_bytes(root) == 64 * MIB
    assert host_available_bytes(root) == 54 * MIB


def test_a_group_over_its_limit_has_nothing_left(host):
    root = host({"proc/self/cgroup": "0::/a\n", **v2("/a", 64 * MIB, 70 * MIB)})
    assert host_available_bytes(root) == 0


def test_other_controllers_are_ignored(host):
    root = host({"proc/self/cgroup": "3:cpuset:/a\n2:name=memory-like:/a\n", **v1("/a", 64 * MIB)})
    assert cgroup_limits(root) == ()
