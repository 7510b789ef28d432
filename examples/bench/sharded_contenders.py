"""What trains one small Llama on several ranks of a machine, for `several_ranks.py`: FSDP2, this package, DeepSpeed.

All begin with the same values, and recompute blocks in the backward. A contender is a context that gives a step: tokens
of this rank in, the loss out.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import cut
from lightning_cxl.streaming.units import find_units

SHAPES = {
    "20M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "vocab_size": 2048},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
}
TOKENS = 64
KEPT = {"fsdp2": 16, "fsdp2, offload": 16, "ours": 14, "zero-3": 20}
"""Bytes per parameter between steps and gradients."""
ADAM = {"lr": 1e-3, "weight_decay": 0.1}
ON_CPU = {"DS_ACCELERATOR": "cpu"}
Step = Callable[[torch.Tensor], float]


def make_model(size: str) -> nn.Module:
    torch.manual_seed(3)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS, **SHAPES[size]}
    return LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)  # all begin with the same values


def recompute(model: nn.Module) -> None:
    """Let blocks keep their inputs alone, inside of what FSDP2 wraps."""
    for _, block in find_units(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@contextlib.contextmanager
def by_fsdp2(size: str, ranks: int, offload: OffloadPolicy) -> Iterator[Step]:
    model = make_model(size).float()
    recompute(model)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "offload_policy": offload}
    mesh = init_device_mesh("cpu", (ranks,))
    for _, block in find_units(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    yield step


@contextlib.contextmanager
def by_us(size: str, ranks: int) -> Iterator[Step]:
    model = make_model(size)
    session = Session(num_threads=1)
    cut(model, find_units(model), init_device_mesh("cpu", (ranks,)), session.host_on(torch.device("cpu")).engine)
    loop = UserLoop(session, torch.device("cpu"), Loop(reads_gradients=False))
    (optimizer,) = loop.prepare(model, [torch.optim.AdamW(model.parameters(), **ADAM)])

    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        with loop.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    yield step
    loop.close()


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def compile_deepspeed() -> None:
    """Let DeepSpeed compile what it uses here, once, in a process of its own: nobody then waits for it in a step."""
    builders = ("CPUAdamBuilder", "ShareMemCommBuilder")
    asked = "; ".join(f"get_accelerator().create_op_builder('{name}').load()" for name in builders)
    code = f"import deepspeed; from deepspeed.accelerator import get_accelerator; {asked}"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **ON_CPU}, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def by_deepspeed(size: str) -> Iterator[Step]:
    os.environ |= ON_CPU  # read at the first import
    import deepspeed

    warnings.simplefilter("ignore", FutureWarning)  # of torch's names for collectives: hundreds of lines in a step
    model = make_model(size)
    recompute(model)
    matrix = max(each.numel() for each in model.parameters())
    block = sum(each.numel() for each in find_units(model)[0][1].parameters())
    on_host = {"device": "cpu", "pin_memory": False}
    zero = {
        "stage": 3, "offload_optimizer": on_host, "offload_param": on_host, "sub_group_size": block,
        "reduce_bucket_size": matrix, "stage3_prefetch_bucket_size": matrix, "stage3_max_live_parameters": block,
        "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": ADAM}, "bf16": {"enabled": True},
        "zero_optimization": zero,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    yield step
    engine.destroy()


CONTENDERS: dict[str, Callable[[str, int], Any]] = {
    "fsdp2": lambda size, ranks: by_fsdp2(size, ranks, OffloadPolicy()),
    "fsdp2, offload": lambda size, ranks: by_fsdp2(size, ranks, CPUOffloadPolicy(pin_memory=False)),
    "ours": by_us,
    "zero-3": lambda size, _: by_deepspeed(size),
}
