"""What a rank does in tests of weights on SSD, on a device apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cxl.errors import LightningCXLError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.session import Session, whole_state
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import cut
from lightning_cxl.sharding.host_shard import HostShard
from lightning_cxl.sharding.processes import gather_on_machine
from lightning_cxl.streaming.units import find_units
from tests import apart, training_device
from tests.distributed import training
from tests.distributed.training import Job, batches, device, loss_of, place
from tests.storage_cases import damage

Weights = dict[str, torch.Tensor]


class Training:
    """A job that is trained step by step."""

    def __init__(self, job: Job) -> None:
        self.rank, self.world = place()
        self.job, self.model, self.session = job, training.make_model(job), Session(**job.options)
        if job.bf16:
            self.model = self.model.to(torch.bfloat16)
        machine = partial(gather_on_machine, machine=0)
        self.session.bind(self.rank, self.world, self.rank, self.world, device(), machine)
        mesh = training.mesh_of(job, self.world)
        cut(self.model, find_units(self.model), mesh, self.session.host_on(device()).engine)
        self.loop = UserLoop(self.session, device(), Loop(accumulates=job.micro_batches > 1, reads_gradients=True))
        self.optimizers = self.loop.prepare(self.model, [training.make_optimizer(job, self.model)])

    def steps(self, begin: int, end: int) -> list[float]:
        """Train from one step to another; return the losses."""
        losses = []
        for step in list(batches(self.job, self.rank, self.world))[begin:end]:
            for tokens in step:
                loss = loss_of(self.model, tokens.to(device())) / len(step)
                with self.loop.backward():
                    loss.backward()
                losses.append(float(loss.detach()))
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
        return losses

    def evaluate(self) -> float:
        """Return a loss without gradients."""
        with torch.no_grad():
            return float(loss_of(self.model, next(batches(self.job, self.rank, self.world))[0].to(device())))

    def whole(self) -> Weights:
        """Return all weights, on every rank."""
        return {name: training.whole(parameter) for name, parameter in self.model.named_parameters()}

    def shards(self) -> list[HostShard]:
        """Return the shards that lie on SSD."""
        shards = [parameter.detach().to_local() for parameter in self.model.parameters()]
        return [each for each in shards if each._bytes.drives is not None]


@contextmanager
def trained(job: Job) -> Iterator[Training]:
    """Return a region in which a job is trained."""
    made = Training(job)
    try:
        yield made
    finally:
        made.loop.close()


def save_and_resume(job: Job, resumed: Job, path: Path) -> tuple[list[float], Weights]:
    """Save after two steps and go on in another training; return its losses and weights."""
    with trained(job) as first:
        first.steps(0, 2)
        first.loop.save_folder(path, first.model, first.optimizers)
        first.steps(2, 3)
    with trained(resumed) as second:
        second.loop.load_folder(path, second.model, dict(enumerate(second.optimizers)), strict=True)
        return second.steps(2, 4), second.whole()


def evaluated_and_written(job: Job) -> dict[str, Any]:
    """Evaluate, write weights and look at them between steps; return what was seen, also after the end."""
    with trained(job) as training_:
        model, found = training_.model, {}
        found["before"] = training_.evaluate()
        found["losses"] = training_.steps(0, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        found["evaluated"] = training_.evaluate()
        found["losses"] += training_.steps(1, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(0.01)
        found["losses"] += training_.steps(2, 3)
        nn.init.normal_(next(find_units(model)[0][1].parameters()))
        torch.manual_seed(3)
        found["losses"] += training_.steps(3, 4)
        found["whole"] = whole_state(model)
        num_steps = training_.session.runs[0].guard.num_steps
        training_.session.runs[0].close()
        found["closed"] = training_.evaluate()
    return {**found, "num_steps": num_steps, "after": whole_state(model)}


def save_what_is_damaged(job: Job, folder: Path, path: Path) -> str:
    """Return the error with which a save ends on this rank, after the drive of rank 1 was damaged."""
    with trained(job) as training_:
        training_.steps(0, 1)
        if training_.rank == 1:
            damage(folder / "rank-1")
        try:
            training_.loop.save_folder(path, training_.model, training_.optimizers)
        except LightningCXLError as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def moved(job: Job) -> dict[str, Any]:
    """Return what steps read and write, and how many bytes lie on SSD."""
    with trained(job) as training_:
        shards = training_.shards()
        training_.steps(0, 4)
        return {**training_.session.report(device())["ssd"], "nbytes": sum(each.host.nbytes for each in shards)}


def hidden_copies(job: Job, delays: dict[str, float]) -> float:
    """Return which part of the time of copies to the device it computed meanwhile, in one forward and backward."""
    with trained(job) as training_:
        training_.steps(0, 1)
        assert training_.shards()
        tokens = next(batches(job, training_.rank, training_.world))[0].to(device())
        apart.set_delay(**delays)
        with apart.timeline() as entries, training_.loop.backward():
            loss_of(training_.model, tokens).backward()
        apart.set_delay()
        training_.optimizers[0].zero_grad()
    compute = [entry for entry in entries if entry.kind == "kernel" and entry.stream == 0]
    copies = [entry for entry in entries if entry.kind == "h2d"]
    meanwhile = sum(apart.overlap(copy, kernel) for copy in copies for kernel in compute)
    return meanwhile / sum(copy.end - copy.start for copy in copies)


def late(job: Job, delays: dict[str, float]) -> training.Trained:
    """Train while copies or kernels are late."""
    assert training_device.current.type == "apart"
    apart.set_delay(**delays)
    try:
        return training.by_us(job)
    finally:
        apart.set_delay()
