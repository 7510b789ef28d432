"""What our engine moves in one optimizer step of the bytes it keeps: `engine_moves`.

Per micro-batch the device reads the weights of units twice, for the forward and for the recompute, and activations go
out and come back. A gradient comes once per micro-batch. With one micro-batch it lands where it stays and the host
reads it once to measure it; with several, each is read where it landed and added to sums that are read and written.
Of several devices each copies its part, unless they share weights; the rest is done once for the machine.
The update reads gradients, and reads and writes weights, masters and moments; weights beside float32 masters are only
written. Where the CPU computes, the same bytes are read and written by it instead of copied.
"""

from dataclasses import dataclass

from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Move

_GRADS = (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What of a job decides about its moves."""

    num_micro_batches: int = 1
    num_arrivals: int | None = None
    """How often gradients come to the host; None: with every micro-batch."""
    weight_bytes: int
    """Compute weights on the host, all of them."""
    trained_bytes: int
    """Of those, what is updated."""
    weights_are_read: bool = True
    """The update reads compute weights: they are masters, or the upper halves of them."""
    grad_bytes: int
    """Gradients of all parameters as they are kept."""
    arriving_bytes: int
    """Gradients of all parameters as one backward delivers them."""
    staged_bytes: int = 0
    """Of those, what lands in staging memory first."""
    written_back_bytes: int = 0
    """Weights on the device that are overwritten from their masters after the update."""
    weight_parts: int = 1
    """Devices of the machine that copy a part of the weights each."""
    root_bytes: int = 0
    """Of several ranks, weights outside of units: they stay on the device until the backward ends."""
    gradient_parts: int = 1
    """Devices of the machine that a part of the gradients comes from each."""


def engine_moves(role: TensorRole, nbytes: int, traffic: Traffic) -> tuple[Move, ...]:
    """Return the moves of all bytes of a role.

    Args:
        role: of the class.
        nbytes: that are kept of it.
        traffic: of the job.
    """
    n, arrivals = traffic.num_micro_batches, traffic.num_arrivals or traffic.num_micro_batches
    if role is TensorRole.COMPUTE_WEIGHTS:
        update = traffic.trained_bytes * (2 if traffic.weights_are_read else 1)
        read = n * traffic.weight_bytes / traffic.weight_parts
        again = n * (traffic.weight_bytes - traffic.root_bytes) / traffic.weight_parts
        return Move("forward", "h2d", read), Move("backward", "h2d", again), Move("update", "cpu", float(update))
    if role in _GRADS:
        direct = arrivals * traffic.arriving_bytes - traffic.staged_bytes
        once = arrivals == 1
        touched = traffic.arriving_bytes if once else arrivals * (traffic.arriving_bytes + 2 * traffic.grad_bytes)
        kept = touched + (traffic.staged_bytes if once else 0)  # copied out of staging memory
        found = (Move("backward", "d2h", direct / traffic.gradient_parts), Move("backward", "cpu", float(kept)))
        return tuple(m for m in (*found, Move("update", "cpu", float(traffic.grad_bytes))) if m.nbytes)
    if role is TensorRole.STAGING:
        return Move("backward", "d2h", traffic.staged_bytes / traffic.gradient_parts), Move(
            "backward", "cpu", float(traffic.staged_bytes)
        )
    if role is TensorRole.ACTIVATIONS:
        return Move("forward", "d2h", float(n * nbytes)), Move("backward", "h2d", float(n * nbytes))
    moved = (Move("update", "cpu", 2.0 * nbytes),)
    if role is TensorRole.MASTER_WEIGHTS and traffic.written_back_bytes:
        return (*moved, Move("update", "h2d", float(traffic.written_back_bytes)))
    return moved


def ssd_moves(role: TensorRole, nbytes: int, updated_bytes: int, num_micro_batches: int) -> tuple[Move, ...]:
    """Return what a step moves of a role on the tier `ssd`, beside what the CPUs read and write of it in memory.

    Args:
        role: of the class: weights are read for every forward and every backward, too; inputs of units are written in
            every forward, and read in every backward.
        nbytes: that lie there.
        updated_bytes: of those, what the update reads and writes.
        num_micro_batches: of the step.
    """
    if role is TensorRole.ACTIVATIONS:
        moved = float(num_micro_batches * nbytes)
        return Move("forward", "ssd_write", moved), Move("backward", "ssd_read", moved)
    updates = Move("update", "ssd_read", float(updated_bytes)), Move("update", "ssd_write", float(updated_bytes))
    if role is not TensorRole.COMPUTE_WEIGHTS:
        return updates
    read = float(num_micro_batches * nbytes)
    moves = (Move("forward", "ssd_read", read), Move("backward", "ssd_read", read), *updates)
    return tuple(move for move in moves if move.nbytes)
