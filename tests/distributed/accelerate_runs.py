"""A loop with Accelerate on several ranks, each of which has its rows of the batches that one process would get."""

import os
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from lightning_cxl.accelerate import CXLAccelerator
from tests.distributed.lightning_runs import BATCH, LENGTH, VOCAB
from tests.distributed.training import place, whole
from tests.distributed.volume import Traffic
from tests.models import TinyTransformer


def accelerator_of(**keywords: Any) -> CXLAccelerator:
    """Return an accelerator in this process, as launched."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    GradientState._reset_state()
    rank, world = place()
    if world > 1:  # a run of Lightning before takes some away
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    return CXLAccelerator(cpu=True, **keywords)


def train(
    steps: int,
    *,
    micro_batches: int = 1,
    clip: float | None = None,
    skip_sync: bool = False,
    optimizer: str = "AdamW",
    options: dict[str, Any] | None = None,
    resume: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Train on all ranks, perhaps from a checkpoint, and perhaps save one at the end."""
    torch.manual_seed(5)
    accelerator = accelerator_of(gradient_accumulation_steps=micro_batches, offload=options)
    world = accelerator.num_processes
    model = TinyTransformer(dropout=0.0, tied=True, scalars=True)
    settings = {"eps": 1e-5} if "Adam" in optimizer else {"momentum": 0.9}
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decays, "weight_decay": 0.1}]
    stepper = getattr(torch.optim, optimizer)(groups, lr=1e-3, **settings)
    tokens = torch.randint(0, VOCAB, (BATCH * 12, LENGTH), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(tokens, batch_size=BATCH // world)
    try:
        model, stepper, data = accelerator.prepare(model, stepper, data)
        begin = 0
        if resume is not None:
            accelerator.load_state(resume)
            begin = int(resume[-1])
        losses, norms, seen, moved = [], [], 0, Traffic()
        for number, batch in enumerate(data):
            if not begin * micro_batches <= number < steps * micro_batches:
                continue
            skips = skip_sync and (number + 1) % micro_batches
            with accelerator.no_sync(model) if skips else nullcontext(), accelerator.accumulate(model):
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
                with moved:
                    accelerator.backward(loss)
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                seen += len(accelerator.gather_for_metrics(batch))
                if clip is not None and accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                stepper.step()
                stepper.zero_grad()
        assert seen == BATCH * len(losses)
        if save is not None:
            accelerator.save_state(save)
        gathered = accelerator.get_state_dict(model)
        weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
        if accelerator.is_main_process:
            assert all(torch.equal(gathered[name], value) for name, value in weights.items())
        return {"losses": losses, "norms": norms, "weights": weights, "reduced": moved.reduce_scatter}
    finally:
        accelerator.free_memory()


def own_tests_of_syncs() -> None:
    """Run Accelerate's own tests, whose model has parameters without dimensions alone."""
    from accelerate.test_utils.scripts import test_sync

    accelerator, given = accelerator_of(), test_sync.Accelerator
    test_sync.Accelerator = accelerator_of
    try:
        test_sync.test_distributed_sync(accelerator)
        test_sync.test_gradient_accumulation(sync_each_batch=True)  # what `accumulate` does here
        test_sync.test_gradient_accumulation_with_opt_and_scheduler(sync_each_batch=True)
    finally:
        test_sync.Accelerator = given
