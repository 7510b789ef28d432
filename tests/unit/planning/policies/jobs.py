"""Machines and jobs for tests of policies."""

from lightning_cxl.machine.speeds import Device, Machine, MachineTier
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job, MemoryClass, Move

GIB = 2**30
R = TensorRole


def machine(*, dram: int = 128, cards: tuple[int, ...] = (256,), unit: int = GIB, **options) -> Machine:
    """Return a machine with the speeds of arXiv 2507.03305's (quoted in tests/unit/planning/jobs/test_perf.py)."""
    near = tier("dram0", TierKind.DRAM, dram * unit, 278e9, 278e9, 278e9)
    far = [tier(f"cxl{i}", TierKind.CXL, size * unit, 69e9, 53e9, 38e9) for i, size in enumerate(cards)]
    device = Device(flops=150e12, h2d_bytes_per_s=55.6e9, d2h_bytes_per_s=55.6e9)
    return Machine(**{"name": "test", "tiers": (near, *far), "device": device, "write_contention": 6.2, **options})


def tier(name: str, kind: TierKind, capacity: int, adam: float, read: float, write: float) -> MachineTier:
    return MachineTier(
        name=name,
        kind=kind,
        capacity_bytes=capacity,
        adam_bytes_per_s=adam,
        device_read_bytes_per_s=read,
        device_write_bytes_per_s=write,
    )


def job_of(sizes: dict[TensorRole, int], *, fixed: dict[tuple[TensorRole, str], int] | None = None, **options) -> Job:
    """Return a job whose classes move what such classes do: optimizer state twice a step by the CPUs, and so on."""
    classes = [MemoryClass(role=role, nbytes=size, moves=moves_of(role, size)) for role, size in sizes.items()]
    classes += [
        MemoryClass(role=role, nbytes=size, tier=tier, moves=moves_of(role, size))
        for (role, tier), size in (fixed or {}).items()
    ]
    return Job(**{"name": "test", "classes": tuple(classes), "num_units": 8, **options})


def moves_of(role: TensorRole, size: int) -> tuple[Move, ...]:
    if role is R.ACTIVATIONS:
        return Move("forward", "d2h", size), Move("backward", "h2d", size)
    if role is R.COMPUTE_WEIGHTS:
        return Move("forward", "h2d", size), Move("backward", "h2d", size), Move("update", "cpu", size)
    if role is R.COMPUTE_GRADS:
        return Move("backward", "d2h", size), Move("update", "cpu", size)
    return (Move("update", "cpu", 2 * size),)


def paper_job(num_parameters: int, layers: int, hidden: int, context: int = 32768) -> Job:
    """Return the memory classes of arXiv 2507.03305."""
    n = num_parameters
    return job_of(
        {
            R.COMPUTE_GRADS: 2 * n, R.ACTIVATIONS: 2 * context * hidden * layers, R.COMPUTE_WEIGHTS: 2 * n,
            R.MASTER_WEIGHTS: 4 * n, R.MASTER_GRADS: 4 * n, R.VARIANCE: 4 * n, R.MOMENTUM: 4 * n,
        },
        num_units=layers,
    )  # fmt: skip


QWEN_7B = paper_job(7_615_616_512, 28, 3584)
NEMO_12B = paper_job(12_247_782_400, 40, 5120)


def bytes_by_tier(job: Job, splits) -> dict[str, float]:
    """Return what every tier holds, decorators and rules included."""
    held: dict[str, float] = {}
    for each in job.classes:
        for tier, share in (splits[each.role] if each.tier is None else {each.tier: 1.0}).items():
            held[tier] = held.get(tier, 0.0) + share * each.nbytes
    return held
