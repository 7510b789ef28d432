# cython: language_level=3, embedsignature=True
"""What this process may use of the CPU: instruction sets and threads."""

import math
import os
import pathlib

cdef extern from *:
    """
    #ifdef __x86_64__
    static int cxl_has_avx2(void)
    {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    }
    static int cxl_has_avx512(void)
    {
        return cxl_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    #else
    static int cxl_has_avx2(void) { return 0; }
    static int cxl_has_avx512(void) { return 0; }
    #endif
    #ifdef __aarch64__
    enum { CXL_HAS_NEON = 1 };
    #else
    enum { CXL_HAS_NEON = 0 };
    #endif
    """
    bint cxl_has_avx2() nogil
    bint cxl_has_avx512() nogil
    bint CXL_HAS_NEON


def supported_isas():
    """Return the instruction sets that kernels can use here, slowest first: CPU and operating system both agree."""
    isas = ["baseline"]
    if cxl_has_avx2():
        isas.append("avx2")
    if cxl_has_avx512():
        isas.append("avx512")
    if CXL_HAS_NEON:
        isas.append("neon")
    return tuple(isas)


def best_isa():
    """Return the instruction set kernels use: ``LIGHTNING_CXL_ISA`` where it is set, else the fastest supported.

    Raises:
        ValueError: ``LIGHTNING_CXL_ISA`` names an instruction set that does not exist or that this CPU lacks.
    """
    supported = supported_isas()
    wanted = os.environ.get("LIGHTNING_CXL_ISA", "")
    if not wanted:
        return supported[-1]
    if wanted not in supported:
        raise ValueError(
            f"LIGHTNING_CXL_ISA={wanted!r} cannot be used: this CPU supports {', '.join(supported)}. "
            "Set it to one of these, or unset it for the fastest."
        )
    return wanted


def available_threads(root="/"):
    """Return how many threads this process should compute with, at least 1.

    The CPUs it may run on, capped by the CPU quota of its cgroups (version 1 and 2, every ancestor) and by
    ``OMP_NUM_THREADS``.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    limits = [len(os.sched_getaffinity(0))]
    base = pathlib.Path(root)
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        limits += _quotas(base / "sys/fs/cgroup", controllers, group)
    first_level = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first_level.isdigit():
        limits.append(int(first_level))
    return max(1, min(limits))


def _quotas(mount, controllers, group):
    """Return the CPU quotas of `group` and its ancestors, in whole threads (rounded up)."""
    if controllers and "cpu" not in controllers.split(","):
        return []
    directory = mount / controllers if controllers else mount
    parts = pathlib.PurePosixPath(group.lstrip("/")).parts
    quotas = []
    # inside a container the path may name groups that are not mounted: those read as no limit
    for depth in range(len(parts), -1, -1):
        level = directory.joinpath(*parts[:depth])
        if controllers:
            words = [_read(level / "cpu.cfs_quota_us").strip(), _read(level / "cpu.cfs_period_us").strip()]
        else:
            words = _read(level / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(math.ceil(int(words[0]) / int(words[1])))
    return quotas


def _read(path):
    """Return the text of a kernel file, empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
