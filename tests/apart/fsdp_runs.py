"""Training with FSDP2 in several processes, as plain torch does it: what ours is compared with."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models import TINY_LLAMA

STEPS = 3


def llama(**options: object) -> nn.Module:
    """The same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **options})).train()


def batch(step: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, TINY_LLAMA["vocab_size"], (2, 8), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def shard(model: nn.Module, device: str, **options: object) -> nn.Module:
    """Every block is a unit, and the root has the rest."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def steps(model: nn.Module, optimizer, device: str, *, number: int = STEPS, accumulate: int = 1) -> list[float]:
    """Return the loss of every step; with `accumulate`, gradients are reduced at the end of so many."""
    losses = []
    with sdpa_kernel(SDPBackend.MATH):  # what the device apart computes with
        for step in range(number):
            last = (step + 1) % accumulate == 0
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            loss = model(**batch(step, device)).loss
            loss.backward()
            losses.append(loss.detach())
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return [loss.item() for loss in losses]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """On every device the same loop over parameters; a large epsilon, for the sign of a tiny gradient is no result."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def plain(device: str, offload: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights after training with FSDP2 alone."""
    options = {} if offload is None else {"offload_policy": CPUOffloadPolicy(pin_memory=offload == "pinned")}
    model = shard(llama(), device, **options)
    losses = steps(model, adamw(model), device)
    return losses, whole(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, gathered, on the host."""
    return {name: parameter.detach().full_tensor().cpu() for name, parameter in model.named_parameters()}
