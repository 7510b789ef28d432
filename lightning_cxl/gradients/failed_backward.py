"""`wait_for_failed_backward`: a backward that has raised in one thread may still run in another."""

import threading
from contextlib import suppress

import torch


def wait_for_failed_backward(device: torch.device, seconds: float = 10.0) -> None:
    """Return when no operation of a backward that has failed runs on `device`, or after `seconds`.

    ``loss.backward()`` raises as soon as one thread of autograd has failed. The thread of each device first ends the
    operation that it is in, which may be the recompute of a unit, and calls its hooks. It has one queue, so another
    backward on that device ends after it. Not to be called within a backward.

    Args:
        device: that computes.
        seconds: the wait is bounded because that operation may be a collective which waits for this very process.
    """
    if device.type == "cpu":
        return  # the thread that called `backward` has computed all of it

    def follow() -> None:
        with suppress(RuntimeError):  # a device that has failed runs nothing more
            start = torch.empty(0, device=device, requires_grad=True)  # no bytes: memory may be full
            torch.autograd.grad(start.clone(), start, torch.empty_like(start))

    follower = threading.Thread(target=follow, name="lightning_cxl_follow", daemon=True)
    follower.start()
    follower.join(seconds)
