"""Ranks that share weights: what FSDP2 calls in a run and after, what an error leaves, and what forked children do."""

import gc
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_cxl.errors import LightningCXLError, TierFullError
from lightning_cxl.inventory.workload import Loop
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.run import residence, sharing
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding import exchange_memory, shared_memory
from lightning_cxl.sharding.fsdp import cut
from lightning_cxl.sharding.share_choice import ShareChoice
from lightning_cxl.sharding.shared_memory import SharedWeights
from lightning_cxl.sharding.torch_private import fsdp_units
from lightning_cxl.streaming.units import find_units
from tests.distributed.training import Job, batches, device, loss_of, make_model, make_optimizer, mean, mesh_of, place

JOB = Job(steps=4, options={"share_weights": True})


class _Counting(exchange_memory._Pages):
    """Counts the bytes that it has been asked for."""

    nbytes = 0

    def allocate(self, nbytes: int, *, alignment: int = 4096) -> Buffer:
        _Counting.nbytes += nbytes
        return super().allocate(nbytes, alignment=alignment)


def _begin(model: nn.Module, options: Mapping[str, Any] = JOB.options) -> tuple[UserLoop, torch.optim.Optimizer]:
    session = Session(**options)
    cut(model, find_units(model), mesh_of(JOB, place()[1]), session.host_on(device()).engine)
    loop = UserLoop(session, device(), Loop(reads_gradients=False))
    try:
        (optimizer,) = loop.prepare(model, [make_optimizer(JOB, model)])
    except BaseException:
        loop.close()
        raise
    return loop, optimizer


def _step(loop: UserLoop, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss = loss_of(model, tokens.to(device()))
    with loop.backward():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean(loss.detach().float(), place()[1])


def _evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, next(batches(JOB, *place()))[0].to(device())).item()


def mapped() -> int:
    """Return how many segments of shared weights this process has mapped."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "/memfd:lightning_cxl" in line})  # by inode


def collectives() -> dict[str, Any]:
    """Return the classes that gather and reduce in a run, the bytes that the pool asks for, and what is there after."""
    with mock.patch.object(exchange_memory, "_Pages", _Counting):
        _Counting.nbytes = 0
        model = make_model(JOB)
        loop, optimizer = _begin(model)
        units = fsdp_units(model)
        inside = {(type(unit.gather).__name__, type(unit.reduce).__name__) for unit in units}
        asked = []
        for (tokens,) in batches(JOB, *place()):
            _step(loop, model, optimizer, tokens)
            asked.append(_Counting.nbytes)
    shared = _evaluate(model)
    loop.close()
    after = all(unit.exchanges_by_default for unit in units)
    same = _evaluate(model) == shared
    return {"inside": inside, "asked": asked, "after": after, "same": same, "mapped": mapped()}


def failing() -> dict[str, Any]:
    """Return what is left of shared weights when the rest of a model finds no room."""
    model = make_model(JOB)
    before = mapped()
    full = {"side_effect": TierFullError("no room for the rest")}
    with (
        mock.patch.object(residence, "place_weights", **full),
        mock.patch.object(residence.Residence, "_move_rest", **full),
    ):
        raised = error_of(lambda: _begin(model))
    by_default = all(unit.exchanges_by_default for unit in fsdp_units(model))
    return {"raised": raised, "by_default": by_default, "mapped": mapped() - before, "loss": _evaluate(model)}


def in_segments_of(nbytes: int) -> dict[str, Any]:
    """Return losses, and how many segments there are, where none may be larger."""
    model = make_model(JOB)
    before = mapped()
    with mock.patch.object(shared_memory, "_SEGMENT_BYTES", nbytes):
        loop, optimizer = _begin(model)
    try:
        losses = [_step(loop, model, optimizer, tokens) for (tokens,) in batches(JOB, *place())]
        return {"losses": losses, "mapped": mapped() - before}
    finally:
        loop.close()


def without_room() -> dict[str, Any]:
    """Return what is left of shared weights when they were the faster way, and the last rank has no room for them."""
    model = make_model(JOB)
    before, is_last = mapped(), place()[0] == place()[1] - 1
    full = {"side_effect": TierFullError("no room on the last rank")}
    with (
        mock.patch.object(sharing, "choose_sharing", lambda *_: ShareChoice(True, "shared memory is faster")),
        mock.patch.object(sharing._Places, "back", **full) if is_last else nullcontext(),
    ):
        loop, _ = _begin(model, {"share_weights": "auto"})
    notes = loop.session.report(device())["notes"]
    try:
        return {"notes": notes, "mapped": mapped() - before, "loss": _evaluate(model)}
    finally:
        loop.close()


def with_children(forks: bool) -> tuple[list[float], list[str]]:
    """Return losses, and what children have to say that are forked between gathers."""
    model = make_model(JOB)
    loop, optimizer = _begin(model)
    losses, said = [], []
    try:
        for (tokens,) in batches(JOB, *place()):
            if forks:
                said.append(in_child(lambda tokens=tokens: _misbehave(model, tokens)))
            losses.append(_step(loop, model, optimizer, tokens))
            if forks:
                said.append(in_child(lambda tokens=tokens: _misbehave(model, tokens)))
            losses.append(_evaluate(model))
    finally:
        loop.close()
    return losses, said


def _misbehave(model: nn.Module, tokens: torch.Tensor) -> str:
    """Gather and close in a forked child, and let go of all; return what is refused, and which memory is there."""
    raised = error_of(lambda: model(input_ids=tokens))
    found = [each for each in gc.get_objects() if type(each) is SharedWeights]  # those of earlier tests may be there
    assert found
    for each in found:
        each.close()
    return f"{mapped()} segments; {raised}"


def in_child(work: Callable[[], str]) -> str:
    """Return what a forked child says, and fail where it ends in another way."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(write, work().encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, text
    return text


def error_of(call: Callable[[], object]) -> str:
    """Return the class and message of the error of ours that a call raises."""
    try:
        call()
    except LightningCXLError as error:
        return f"{type(error).__name__}: {error}"
    return ""
