"""One rank of the runs that `test_shared_host.py` and others look at: FSDP2 as it is, and with shared weights.

    python -m tests.integration.shared_host_run FOLDER RANK RANKS CASE [CASE ...]

Writes `FOLDER/CASE.RANK.pt`: losses and weights, or what a case is about.
"""

import datetime
import gc
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl.errors import LightningCXLError, UnsupportedError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import Budget, BudgetResource, NumaResource
from lightning_cxl.sharding import same_machine, share_choice, shared_memory
from lightning_cxl.sharding.measured_gather import measure_gather
from lightning_cxl.sharding.share_choice import GatherSeconds
from lightning_cxl.sharding.shared_memory import share_weights
from lightning_cxl.transfer.engine import HostEngine
from tests.models import TINY_LLAMA
from tests.shared_places import OnOneTier

STEPS = 3
DELAY_S = 0.2


def model_of(**options):
    torch.manual_seed(3)
    # 63 rows and 47 columns: shards of 2 and 4 ranks are padded
    return LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "vocab_size": 63, "intermediate_size": 47, **options}))


def shard(model, mesh, precision=None, **options):
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def share(model, places=None, **options):
    return share_weights(model, places or OnOneTier(), HostEngine(), **options)


def batches(rank, count):
    made = torch.Generator().manual_seed(17 + rank)
    return [torch.randint(0, 63, (2, 8), generator=made) for _ in range(count)]


def train(model, rank, *, micro_batches=1, clip=None, validate=None, late_writer=None, late_reader=None):
    """Train, and return losses and full weights.

    Args:
        validate: a forward without backward `"before"` or `"after"` the update; None for none.
        late_writer: the rank that takes its time before it writes.
        late_reader: the rank that takes its time in a validation, before it reads the last block.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    data = batches(rank, STEPS * micro_batches)

    def validation(when):
        if validate == when:
            late = model.model.layers[0].register_forward_hook(lambda *_: time.sleep(DELAY_S * (rank == late_reader)))
            with torch.no_grad():
                losses.append(model(input_ids=data[0], labels=data[0]).loss.item())
            late.remove()

    for step in range(STEPS):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            tokens = data[step * micro_batches + micro]
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / micro_batches).backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).full_tensor().item())
        validation("before")
        time.sleep(DELAY_S * (rank == late_writer))
        optimizer.step()
        optimizer.zero_grad()
        validation("after")
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


def whole_numbers(model):
    """Frozen parameters that are no floats: in bf16 the others are cast, and all are gathered as bytes."""
    for block in model.model.layers:
        block.mlp.codes = nn.Parameter(torch.arange(9, dtype=torch.int32), requires_grad=False)
        block.mlp.register_forward_hook(lambda module, _, output: output + module.codes.to(output.dtype).sum() / 99)
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
    "whole_numbers": {"change": whole_numbers, "shard": {"precision": torch.bfloat16}},
    "scalars": {"change": scalars},
    "kept": {"shard": {"reshard_after_forward": False}},
    "validated": {"train": {"validate": "after"}},
    "all_at_once": {
        "shard": {"precision": torch.bfloat16},
        "model": {"tie_word_embeddings": True},
        "train": {"clip": 0.5, "micro_batches": 2, "validate": "after"},
    },
}
"""Cases that are trained with and without shared weights, by name."""
LATE = {
    "late_writer": {"train": {"late_writer": 0}},
    "late_writer_is_the_last": {"train": {"late_writer": 1}},
    "late_reader": {"train": {"validate": "before", "late_reader": 1}},
    "late_reader_is_the_first": {"train": {"validate": "before", "late_reader": 0}},
}
"""Those in which one rank is late, where it would read or write what it must not."""
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
        results.append((*train(model, rank, **case.get("train", {})), gathers()))
        if shared is not None:
            shared.close()
    return results


def elsewhere(rank, ranks):
    """The last rank runs on another machine: refused on all, and FSDP2 gathers as before."""
    place = shared_memory.own_place()
    if rank == ranks - 1:
        shared_memory.own_place = share_choice.own_place = lambda: place._replace(boot_id="another", host="far")
    model = sharded_model(ranks)
    raised = error_of(lambda: share(model))
    choices = error_of(lambda: choose(True)), choose("auto")
    shared_memory.own_place = share_choice.own_place = same_machine.own_place
    return raised, choices, train(model, rank)[0]


def choose(asked, measure=None):
    return tuple(share_choice.choose_sharing(asked, dist.group.WORLD, measure))


def chosen(rank, ranks):
    """What is chosen on one machine: as asked, with one measurement or another, and where memory cannot be mapped."""

    def hidden():
        raise UnsupportedError("cannot open the memory of another process")

    def measured(shared):
        return lambda: GatherSeconds(10**9, shared, 0.5)

    return [
        choose(False),
        choose(True),
        choose("auto", measured(0.25)),
        choose("auto", measured(1.0)),
        choose("auto", hidden),
    ]


def full(rank, ranks):
    """The last rank has no room: refused on all, and FSDP2 gathers as before."""
    model = sharded_model(ranks)
    free = {"free_bytes": lambda: 4096} if rank == ranks - 1 else {}
    raised = error_of(lambda: share(model, OnOneTier(**free)))
    return raised, train(model, rank)[0]


def counted_once(rank, ranks):
    """What a machine holds of shared weights: budget of this rank, bytes of its shards, and what the kernel says."""
    model = sharded_model(ranks, hidden_size=256, intermediate_size=512)
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    gc.collect()  # segments of the cases before
    dist.barrier()
    before = shared_bytes()
    budget = Budget("dram", 2**30)
    shared = share(model, OnOneTier(BudgetResource(NumaResource("dram", 0, Topology.detect()), budget)))
    model(input_ids=batches(rank, 1)[0])
    dist.barrier()  # all have read all
    found = shards, budget.held_bytes, shared_bytes() - before
    dist.barrier()
    shared.close()
    return found


def shared_bytes():
    """Return this process's part of memory that processes share, each page divided by their number."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no Pss_Shmem")


def misuse(rank, ranks):
    """What is refused while weights are shared, and after."""
    model = sharded_model(ranks)
    shared = share(model)
    tokens = batches(rank, 1)[0]
    model(input_ids=tokens)
    others = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(others, assign=True)
    replaced = error_of(lambda: model(input_ids=tokens))
    shared.close()
    shared.close()
    return replaced


def locked(rank, ranks):
    """Which memory is page-locked for a device, in order."""
    calls = []
    lock = SimpleNamespace(
        register=lambda address, nbytes: calls.append(("lock", address, nbytes)),
        unregister=lambda address: calls.append(("unlock", address)),
    )
    share(sharded_model(ranks), page_lock=lock).close()
    return calls


def moved(rank, ranks):
    """Page-locking moves pages of the last rank to another node: refused on all, and nothing stays page-locked."""
    locks = Counter()
    lock = SimpleNamespace(
        register=lambda address, nbytes: locks.update([address]), unregister=lambda address: locks.subtract([address])
    )
    model = sharded_model(ranks)
    node = 1 if rank == ranks - 1 else 0
    raised = error_of(lambda: share(model, page_lock=lock, where=lambda address, nbytes: {node: nbytes}))
    return raised, locks.total(), train(model, rank)[0]


def unwatched(rank, ranks):
    """The kernel does not let the last rank watch others: refused on all, and nothing stays page-locked or open."""
    locks = Counter()
    lock = SimpleNamespace(
        register=lambda address, nbytes: locks.update([address]), unregister=lambda address: locks.subtract([address])
    )
    model, watch = sharded_model(ranks), os.pidfd_open
    files = len(os.listdir("/proc/self/fd"))

    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    os.pidfd_open = refuse if rank == ranks - 1 else watch
    raised = error_of(lambda: share(model, page_lock=lock))
    os.pidfd_open = watch
    gc.collect()
    return raised, locks.total() + len(os.listdir("/proc/self/fd")) - files, train(model, rank)[0]


def measured(rank, ranks):
    """What a measurement says, and how long it takes."""
    begin = time.monotonic()
    found = measure_gather(OnOneTier().file, dist.group.WORLD, HostEngine())
    return found, time.monotonic() - begin


def killed(rank, ranks):
    """Rank 1 is killed between two gathers; returns what rank 0 gets, and after how many seconds."""
    model = sharded_model(ranks)
    shared = share(model)
    tokens = batches(rank, 1)[0]
    model(input_ids=tokens)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    raised = error_of(lambda: model(input_ids=tokens))
    seconds = time.monotonic() - begin
    shared.close()
    return raised, seconds


def error_of(call):
    """Return the class and message of the error that a call raises, None where it raises none."""
    try:
        call()
    except (LightningCXLError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def sharded_model(ranks, **options):
    model = model_of(**options)
    shard(model, init_device_mesh("cpu", (ranks,)))
    return model


_CASES = (elsewhere, chosen, full, measured, counted_once, misuse, locked, moved, unwatched, killed)
OTHERS = {each.__name__: each for each in _CASES}
"""By name; `killed` must be the last."""


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
    trained = {**PARITY, **LATE, **OF_FOUR}
    for name in cases:
        result = OTHERS[name](rank, ranks) if name in OTHERS else parity(rank, ranks, trained[name])
        torch.save(result, folder / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main()
