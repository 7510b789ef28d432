"""One rank of the runs that `test_shared_host.py` looks at: FSDP2 as it is, and with shared weights.

    python -m tests.integration.shared_host_run FOLDER RANK RANKS CASE [CASE ...]

Writes `FOLDER/CASE.RANK.pt`: losses and weights, or what a case is about.
"""

import datetime
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl.errors import LightningCXLError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import NumaResource
from lightning_cxl.sharding.shared_memory import share_weights
from tests.models import TINY_LLAMA

STEPS = 4


def model_of(**options):
    torch.manual_seed(3)
    # 63 rows and 47 columns: shards of 2 and 4 ranks are padded
    return LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "vocab_size": 63, "intermediate_size": 47, **options}))


def shard(model, mesh, precision=None, **options):
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def share(model, **options):
    return share_weights(model, NumaResource("dram", 0, Topology.detect()), **options)


def batches(rank, count):
    made = torch.Generator().manual_seed(17 + rank)
    return [torch.randint(0, 63, (2, 8), generator=made) for _ in range(count)]


def train(model, shared, rank, *, micro_batches=1, clip=None, delay=0.0, validate=False, steps=STEPS):
    """Train, and return losses and full weights."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    data = batches(rank, steps * micro_batches)
    for step in range(steps):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            tokens = data[step * micro_batches + micro]
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / micro_batches).backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor().item())
        if shared is None:
            optimizer.step()
        else:
            with shared.writing():
                time.sleep(delay)
                optimizer.step()
        optimizer.zero_grad()
        if validate:
            with torch.no_grad():
                losses.append(model(input_ids=data[0], labels=data[0]).loss.item())
    return losses, {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def frozen(model):
    """All but the second block and the norm: a unit without gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or name == "model.norm.weight")
    return model


def mixed_dtypes(model):
    """Frozen parameters of another dtype, which are gathered with the others as bytes."""
    for block in model.model.layers:
        block.mlp.up_proj.to(torch.bfloat16).requires_grad_(False)
        block.mlp.up_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
        block.mlp.up_proj.register_forward_hook(lambda _, inputs, output: output.float())
    return model


def scalars(model):
    """Parameters with fewer rows than ranks: some ranks have nothing of them."""
    for block in model.model.layers:
        block.self_attn.q_proj.bias = nn.Parameter(torch.full((32,), 0.1))
        block.mlp.down_proj.bias = nn.Parameter(torch.zeros(32))
        block.mlp.gain = nn.Parameter(torch.ones(1))
        block.mlp.register_forward_hook(lambda module, _, output: output * module.gain)
    return model


PARITY = {
    "plain": {},
    "accumulated": {"train": {"micro_batches": 3}},
    "clipped": {"train": {"clip": 0.5}},
    "bf16": {"shard": {"precision": torch.bfloat16}},
    "tied": {"model": {"tie_word_embeddings": True}},
    "frozen": {"change": frozen},
    "mixed": {"change": mixed_dtypes},
    "mixed_bf16": {"change": mixed_dtypes, "shard": {"precision": torch.bfloat16}},
    "scalars": {"change": scalars},
    "kept": {"shard": {"reshard_after_forward": False}},
    "validated": {"train": {"validate": True}},
    "all_at_once": {
        "shard": {"precision": torch.bfloat16},
        "model": {"tie_word_embeddings": True},
        "train": {"clip": 0.5, "micro_batches": 2, "validate": True},
    },
}
"""Cases that are trained with and without shared weights, by name."""
OF_FOUR = {
    "hsdp": {"mesh": (2, 2)},
    "resharded": {"shard": {"reshard_after_forward": 2}},
}
"""Those that need four ranks."""


def parity(rank, ranks, case):
    """Return losses and weights without and with shared weights."""
    results = []
    for sharing in (False, True):
        shape = case.get("mesh", (ranks,))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = case.get("change", lambda model: model)(model_of(**case.get("model", {})))
        shard(model, mesh, **case.get("shard", {}))
        shared = share(model) if sharing else None
        gathers = dist_calls()
        results.append((*train(model, shared, rank, **case.get("train", {})), gathers()))
        if shared is not None:
            shared.close()
    return results


def dist_calls():
    """Count the gathers that torch.distributed does from now on; returns what stops counting and says how many."""
    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}
    calls = []

    def counted(name):
        def call(*args, **kwargs):
            calls.append(name)
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counted(name))

    def stop():
        for name in names:
            setattr(dist, name, before[name])
        return len(calls)

    return stop


def main():
    folder, rank, ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    for name in cases:
        torch.save(parity(rank, ranks, {**PARITY, **OF_FOUR}[name]), folder / f"{name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
