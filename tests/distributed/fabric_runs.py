"""A loop with Fabric on several ranks, each of which has its rows of the batches that one process would get."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_cxl import CXLFabricStrategy
from tests.distributed.lightning_runs import rows
from tests.distributed.training import place, whole
from tests.distributed.volume import Traffic
from tests.models import TinyTransformer


def train(
    steps: int,
    *,
    micro_batches: int = 1,
    clip: float | None = None,
    optimizer: str = "AdamW",
    skip_sync: bool = False,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    resume: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Train on all ranks, perhaps from a checkpoint, and perhaps save one at the end."""
    _, world = place()
    torch.manual_seed(5)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=CXLFabricStrategy(**(options or {})))
    fabric.launch()
    model = fabric.setup_module(TinyTransformer(dropout=0.0, tied=True, scalars=True).to(dtype))
    options = {"eps": 1e-5} if "Adam" in optimizer else {"momentum": 0.9}
    stepper = fabric.setup_optimizers(getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, **options))
    state = {"model": model, "stepper": stepper, "step": 0}
    try:
        if resume is not None:
            assert fabric.load(resume, state) == {}
        losses, norms, moved = [], [], Traffic()
        for step in range(state["step"], steps):
            for part in range(micro_batches):
                tokens = rows(step * micro_batches + part)
                skips = skip_sync and part < micro_batches - 1
                with fabric.no_backward_sync(model, enabled=skips):
                    logits = model(tokens[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                    with moved:
                        fabric.backward(loss / micro_batches)
                losses.append(float(fabric.all_reduce(loss.detach().clone(), reduce_op="mean")))
            if clip is not None:
                norms.append(float(fabric.clip_gradients(model, stepper, max_norm=clip)))
            stepper.step()
            stepper.zero_grad()
        if save is not None:
            fabric.save(save, {**state, "step": steps})
        weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
        return {"losses": losses, "norms": norms, "weights": weights, "reduced": moved.reduce_scatter}
    finally:
        fabric.strategy.teardown()


def set_up_together() -> str:
    """Return the error of a set-up of model and optimizer in one call."""
    _, world = place()
    fabric = Fabric(accelerator="cpu", devices=world, strategy="cxl_offload")
    fabric.launch()
    model = TinyTransformer(dropout=0.0)
    try:
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def agree() -> Any:
    """Return what the collectives of Fabric give."""
    rank, world = place()
    fabric = Fabric(accelerator="cpu", devices=world, strategy="cxl_offload")
    fabric.launch()
    fabric.barrier()
    number = torch.tensor(float(rank))
    return (
        fabric.global_rank, fabric.world_size, fabric.broadcast(f"from {rank}", src=1),
        fabric.all_reduce(number.clone(), reduce_op="sum").item(), fabric.all_gather(number).tolist(),
    )  # fmt: skip
