"""Training with FSDP2 in several processes, as plain torch does it: what ours is compared with."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models import TINY_LLAMA


class Case(NamedTuple):
    """What differs from a run in float32 in which every parameter is trained in every step."""

    config: Mapping[str, object] = MappingProxyType({})
    policy: Mapping[str, object] = MappingProxyType({})
    frozen: str = " "
    """Parameters with this in their names are not trained."""
    accumulate: int = 1
    scale: bool = False
    """Whether there is a parameter of one element, of which only one rank has something."""
    ahead: bool = False
    """Whether the user says which units are fetched ahead."""
    weights: torch.dtype = torch.float32
    replicated: bool = False
    """Whether every process has all of each parameter, and gradients are averaged."""


_MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
_LOW = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}

CASES = {
    "plain": Case(),
    "accumulation without communication": Case(accumulate=2),
    "computes in bfloat16": Case(policy=_MIXED),
    "bfloat16, reduced in float32": Case(policy=_LOW, weights=torch.bfloat16),
    "tied": Case(config={"tie_word_embeddings": True}),
    "frozen": Case(frozen="_proj"),
    "uneven": Case(config={"vocab_size": 63, "intermediate_size": 47}, scale=True),
    "fetched ahead": Case(config={"num_hidden_layers": 4}, ahead=True),
    "kept after forward": Case(policy={"reshard_after_forward": False}),
    "replicated": Case(replicated=True),
    "by columns": Case(policy={"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}),
}
STEPS = 4


def llama(case: Case) -> nn.Module:
    """The same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **case.config})).to(case.weights).train()
    if case.scale:
        model.scale = nn.Parameter(torch.full((1,), 1.5))
        model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * model.scale)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.frozen not in name)
    return model


def batch(case: Case, step: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    words = case.config.get("vocab_size", TINY_LLAMA["vocab_size"])
    tokens = torch.randint(0, words, (2, 8), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def shard(case: Case, device: str, **options: object) -> FSDPModule:
    """Return the model of a case: every block is a unit, and the root has the rest."""
    model = llama(case)
    number = dist.get_world_size()
    if case.replicated:
        mesh = init_device_mesh(device, (number, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (number,))
    blocks = list(model.model.layers)
    for block in blocks:
        fully_shard(block, mesh=mesh, **case.policy, **options)
    fully_shard(model, mesh=mesh, **case.policy, **options)
    if case.ahead:
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
            block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
    return model


def steps(case: Case, model: FSDPModule, optimizer, device: str, number: int = STEPS) -> list[float]:
    """Return the loss of every step, and gather nothing else: `optimizer` updates after so many as the case says."""
    losses = []
    with sdpa_kernel(SDPBackend.MATH):  # what the device apart computes with
        for step in range(number):
            last = (step + 1) % case.accumulate == 0
            model.set_requires_gradient_sync(last)
            loss = model(**batch(case, step, device)).loss
            loss.backward()
            losses.append(loss.detach())
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return [loss.item() for loss in losses]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """On every device the same loop over parameters; a large epsilon, for the sign of a tiny gradient is no result."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=False)


def plain(name: str, device: str, offload: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights after training with FSDP2 alone."""
    case = CASES[name]
    options = {} if offload is None else {"offload_policy": CPUOffloadPolicy(pin_memory=offload == "pinned")}
    model = shard(case, device, **options)
    losses = steps(case, model, adamw([each for each in model.parameters() if each.requires_grad]), device)
    return losses, whole(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, gathered, on the host."""
    return {name: parameter.detach().full_tensor().cpu() for name, parameter in model.named_parameters()}
