"""Several processes, each with a device apart: updates of shards run behind the training and change no bit of it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_cxl.optim.cpu_adam import AdamStep
from tests import training_device
from tests.distributed import training
from tests.distributed.training import Job, Training, device, loss_of, place, whole

JOBS = {
    "a block that computes twice": Job(model="transformer", tied=False, twice=True),
    "float32": Job(model="transformer", tied=False),
    "split masters": Job(model="transformer", bf16=True),
    "float32 masters": Job(model="transformer", bf16=True, options={"master": "fp32"}),
    "accumulated": Job(micro_batches=3),
    "clipped": Job(model="transformer", clip=0.1),
    "lora": Job(lora=True),
    "scalars": Job(model="transformer", scalars=True),
    "replicas": Job(model="transformer", replicas=2),
}


class Overlapped(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    behind: list[str]
    """What the loop was at when a thread began an update: forward, backward, or what follows a step."""


@contextlib.contextmanager
def slow_updates() -> Iterator[list[str]]:
    """Let updates that run behind take long; yield what the loop is at, then what it was at when each began."""
    plain, seen = AdamStep.apply, [""]

    def apply(self: AdamStep, updates: Any, *args: Any) -> None:
        if updates and threading.current_thread() is not threading.main_thread():
            seen.append(seen[0])
            time.sleep(0.02)
        plain(self, updates, *args)

    with mock.patch.object(AdamStep, "apply", apply):
        yield seen


def prepare(job: Job, overlaps: bool, *, whole_step: str | None = "a callback") -> Training:
    return Training(replace(job, options={**job.options, "overlap_step": overlaps}), needs_whole_step=whole_step)


def train(job: Job, overlaps: bool, closures: bool = False) -> Overlapped:
    """Train with late copies; with closures, updates may begin in the backward."""
    training_device.make_late("copies")
    losses: list[float] = []
    with slow_updates() as seen, prepare(job, overlaps, whole_step=None if closures else "a callback") as ours:
        model, optimizer, loop = ours.model, ours.optimizer, ours.loop
        for step in training.batches(job, *place()):

            def forward_and_backward(tokens: torch.Tensor, is_last: bool = True) -> torch.Tensor:
                seen[0] = "forward"
                loss = loss_of(model, tokens.to(device())) / job.micro_batches
                seen[0] = "backward"
                with loop.backward(is_last=is_last):
                    loss.backward()
                losses.append(float(loss.detach()))
                return loss

            seen[0] = "forward"
            with torch.no_grad():  # as a validation does: FSDP2 takes note of it, and no backward comes
                loss_of(model, step[0].to(device()))
            for tokens in step[:-1]:
                forward_and_backward(tokens, is_last=False)
            if closures:
                optimizer.step(partial(forward_and_backward, step[-1]))
            else:
                forward_and_backward(step[-1])
                if job.clip is not None:
                    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], job.clip)
                seen[0] = "step"
                optimizer.step()
            seen[0] = "after"
            optimizer.zero_grad()
        weights = ours.whole()
    return Overlapped(losses, weights, seen[1:])


CASES = [(name, closures) for closures in (True, False) for name, job in JOBS.items() if not (closures and job.clip)]


@pytest.mark.parametrize(("name", "closures"), CASES)
def test_updates_behind_change_no_bit(ranks, name, closures):
    job = JOBS[name]
    group = ranks.of(4 if job.replicas > 1 else 2, "apart")
    alone = group.run(train, job, overlaps=False, closures=closures)
    for ours, plain in zip(group.run(train, job, overlaps=True, closures=closures), alone, strict=True):
        assert ours.losses == plain.losses
        assert all(torch.equal(ours.weights[name], each) for name, each in plain.weights.items())
        assert not plain.behind
        assert ("backward" in ours.behind) is closures
        assert closures or "forward" in ours.behind


def read_and_write(overlaps: bool) -> list[Any]:
    """Return what someone finds who reads weights and state right after a step, and what comes of what he writes."""
    job, found = Job(model="transformer", steps=8), []
    ours = prepare(job, overlaps)
    model, optimizer = ours.model, ours.optimizer
    weight = model.get_parameter("blocks.2.mlp.0.weight")

    def clamp() -> torch.Tensor:
        with torch.no_grad():
            weight.clamp_(-0.05, 0.05)
        return weight

    def write_data() -> torch.Tensor:
        weight.data.mul_(0.9)
        return weight

    readers: list[Callable[[], torch.Tensor]] = [
        lambda: weight,
        lambda: weight.to_local().cpu(),
        lambda: model.state_dict()["blocks.2.mlp.0.weight"],
        lambda: torch.tensor(weight.to_local().untyped_storage().tolist()),
        lambda: optimizer.state_dict()["state"][3]["exp_avg"],
        lambda: optimizer.param_groups[0]["params"][-1],
        clamp,
        write_data,
    ]
    with slow_updates(), ours:
        for tokens, read in zip(training.batches(job, *place()), readers, strict=True):
            with ours.loop.backward():
                loss_of(model, tokens[0].to(device())).backward()
            optimizer.step()
            found.append(whole(read()))
            optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(tokens[0].to(device())).cpu())
    return found


def test_whoever_reads_or_writes_after_a_step_waits_for_its_updates(ranks):
    group = ranks.of(2, "apart")
    for ours, plain in zip(group.run(read_and_write, True), group.run(read_and_write, False), strict=True):
        assert list(map(torch.equal, ours, plain)) == [True] * 9


def fail_in_an_update() -> str:
    """Return the error of an update, which comes where its unit computes next."""
    job = Job(model="transformer", steps=2)
    ours = prepare(job, True)
    first, second = training.batches(job, *place())

    def apply(self: AdamStep, updates: Any, *args: Any) -> None:
        if updates and threading.current_thread() is not threading.main_thread():
            raise OSError("no memory for the update")

    with mock.patch.object(AdamStep, "apply", apply):
        with ours.loop.backward():
            loss_of(ours.model, first[0].to(device())).backward()
        ours.optimizer.step()
        with pytest.raises(OSError, match="no memory") as caught:
            loss_of(ours.model, second[0].to(device()))
    ours.loop.close(after_error=True)
    return str(caught.value)


def test_an_error_of_an_update_is_raised_where_its_unit_computes_next(ranks):
    assert ranks.of(2, "apart").run(fail_in_an_update) == ["no memory for the update"] * 2
