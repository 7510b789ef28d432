"""In which order arXiv 2507.03305 hands out local memory: level by level, and within one as its authors' code does."""

from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Job, MemoryClass

LEVELS: tuple[tuple[TensorRole, ...], ...] = (
    (TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_GRADS, TensorRole.MASTER_WEIGHTS),
    (TensorRole.COMPUTE_WEIGHTS,),
    (TensorRole.ACTIVATIONS,),
    (TensorRole.COMPUTE_GRADS,),
    (TensorRole.STAGING,),  # not in the paper
)
"""Source: utils/numa_allocation_patch.py of the authors' repository CXL-Aware-LLM-Finetuning."""


def in_order(job: Job) -> list[MemoryClass]:
    """Return the classes that a job leaves open, in the order of `LEVELS`."""
    classes = job.free_classes()
    return [classes[role] for level in LEVELS for role in level if role in classes]
