"""Ranks of different speed, on which users write weights between gathers: averages, and a state that is loaded."""

import random
import time

import torch
from torch import nn

from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import cut
from lightning_cxl.streaming.units import find_units
from tests.distributed.training import Job, batches, device, loss_of, make_model, make_optimizer, mean, mesh_of, place

_LATE_S = 0.004
_COPY_S = 0.01  # of a device apart


def written_by_users(job: Job, late: int) -> list[float]:
    """Return losses; the rank `late` takes its time in blocks and at writes, and so do copies to its device."""
    model, (rank, world) = make_model(job), place()
    session = Session(**job.options)
    cut(model, find_units(model), mesh_of(job, world), session.host_on(device()).engine)
    loop = UserLoop(session, device(), Loop(reads_gradients=False))
    waits = random.Random(rank)
    if device().type != "cpu":
        from tests.apart import controls

        controls.set_delay(h2d=_COPY_S if rank == late else 0.0)

    def pause(*_: object) -> None:
        time.sleep(_LATE_S * waits.random() * (rank == late))

    try:
        (optimizer,) = loop.prepare(model, [make_optimizer(job, model)])
        for _, unit in find_units(model):
            unit.register_forward_pre_hook(pause)
            unit.register_forward_hook(pause)
        losses = []
        for (tokens,) in batches(job, rank, world):
            tokens = tokens.to(device())
            with torch.no_grad():
                losses += [loss_of(model, tokens)]
                _scale(model, 0.75, pause)  # at once: copies of the forward may be on their way
                losses += [loss_of(model, tokens)]
                _scale(model, 1.5, pause)
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
            losses += [loss := loss_of(model, tokens)]
            with loop.backward():
                loss.backward()
            pause()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss_of(model, tokens)]
            model.load_state_dict(kept)
        return [mean(loss.detach().float(), world) for loss in losses]
    finally:
        if device().type != "cpu":
            controls.reset()
        loop.close()


def _scale(model: nn.Module, factor: float, pause: object) -> None:
    for parameter in model.parameters():
        pause()  # type: ignore[operator]
        parameter.mul_(factor)
