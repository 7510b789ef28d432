import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_cxl import CXLFabricStrategy
from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.sharding.host_shard import HostShard
from tests import training_device
from tests.distributed.lightning_runs import BATCH, LENGTH, VOCAB, rows
from tests.distributed.ranks import gone_on, of_rank_0
from tests.distributed.test_volume import Traffic
from tests.distributed.training import assert_close, assert_identical, loss_of, place, whole_weights
from tests.models import TinyTransformer
from tests.processes import forget_libraries


def make_model(dtype: torch.dtype = torch.float32, scalars: bool = True) -> nn.Module:
    torch.manual_seed(5)
    return TinyTransformer(dropout=0.0, tied=True, scalars=scalars).to(dtype)


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decays, "weight_decay": 0.1}]
    settings = {"eps": 1e-5} if "Adam" in kind else {"momentum": 0.9}
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=1e-3, **settings)
    return made


def by_fabric(
    steps, *, micro_batches=1, clip=None, skip_sync=False, optimizer="AdamW", dtype=torch.float32, options=None,
    resume=None, save=None, cut=None,
) -> dict[str, Any]:  # fmt: skip
    """Train on all ranks, perhaps from a checkpoint, and perhaps save one at the end."""
    strategy = CXLFabricStrategy(**(options or {}))
    fabric = Fabric(accelerator=training_device.accelerator(), devices=place()[1], strategy=strategy)
    fabric.launch()
    model = make_model(dtype, scalars=cut is None)
    if cut:
        for each in (*model.blocks, model):
            fully_shard(each, mesh=init_device_mesh(fabric.device.type, (place()[1],)))
        with torch.no_grad():  # FSDP2 sets up what it gathers
            loss_of(model, rows(0).to(fabric.device))
    model = fabric.setup_module(model)
    stepper = fabric.setup_optimizers(make_optimizer(model, optimizer))
    state = {"model": model, "stepper": stepper, "step": 0}
    try:
        if resume is not None:
            assert fabric.load(resume, state) == {}
        losses, norms, moved = [], [], Traffic()
        for step in range(state["step"], steps):
            for part in range(micro_batches):
                skips = skip_sync and part < micro_batches - 1
                with fabric.no_backward_sync(model, enabled=skips):
                    loss = loss_of(model, rows(step * micro_batches + part).to(fabric.device))
                    with moved:
                        fabric.backward(loss / micro_batches)
                losses.append(float(fabric.all_reduce(loss.detach().clone(), reduce_op="mean")))
            if clip is not None:
                norms.append(float(fabric.clip_gradients(model, stepper, max_norm=clip)))
            stepper.step()
            stepper.zero_grad()
        if save is not None:
            fabric.save(save, {**state, "step": steps})
        if fabric.device.type != "cpu":
            assert {type(each._local_tensor) for each in model.parameters() if each.ndim} == {HostShard}
        return {"losses": losses, "norms": norms, "weights": whole_weights(model), "reduced": moved.reduce_scatter}
    finally:
        fabric.strategy.teardown()


def accelerator_of(**keywords: Any) -> CXLAccelerator:
    """Return an accelerator in this process, as launched."""
    forget_libraries()
    rank, world = place()
    if world > 1:  # a run of Lightning before takes some away
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    return CXLAccelerator(cpu=True, **keywords)


def by_accelerate(
    steps, *, micro_batches=1, clip=None, skip_sync=False, optimizer="AdamW", resume=None, save=None
) -> dict[str, Any]:
    """Train on all ranks, perhaps from a state, and perhaps save one at the end; the folder ends with its step."""
    accelerator = accelerator_of(gradient_accumulation_steps=micro_batches)
    model = make_model()
    stepper = make_optimizer(model, optimizer)
    tokens = torch.randint(0, VOCAB, (BATCH * 12, LENGTH), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(tokens, batch_size=BATCH // accelerator.num_processes)
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
                loss = loss_of(model, batch)
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
        gathered, weights = accelerator.get_state_dict(model), whole_weights(model)
        if accelerator.is_main_process:
            assert all(torch.equal(gathered[name], value) for name, value in weights.items())
        return {"losses": losses, "norms": norms, "weights": weights, "reduced": moved.reduce_scatter}
    finally:
        accelerator.free_memory()


@pytest.mark.every_case
@pytest.mark.parametrize("train", [by_fabric, by_accelerate])
def test_several_processes_train_as_one_and_every_micro_batch_reduces_unless_it_is_told_not_to(ranks, train):
    given = {"micro_batches": 3, "clip": 0.5}
    one, each = (of_rank_0(ranks, world, train, 3, **given) for world in (1, 2))
    once = of_rank_0(ranks, 2, train, 3, skip_sync=True, **given)
    for two in (each, once):
        assert_close(two, one)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert each["reduced"] == 3 * once["reduced"] > 0


HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "train, before, after, given",
    [
        pytest.param(by_fabric, 2, 2, {**HALF, "options": {"master": "fp32"}}, marks=pytest.mark.every_case),
        (by_fabric, 2, 1, {}),
        (by_fabric, 1, 2, HALF),
        pytest.param(by_accelerate, 2, 2, {}, marks=pytest.mark.every_case),
        (by_accelerate, 2, 1, {"optimizer": "SGD"}),
        (by_accelerate, 1, 2, {}),
    ],
)
def test_another_number_of_processes_goes_on(ranks, tmp_path, train, before, after, given):
    rest, expected = gone_on(ranks, train, before, after, str(tmp_path / "step_3"), **given)
    limit = 2**-7 if "dtype" in given else 1e-6  # one rounding: they differ with the order of sums
    (assert_identical if before == after else partial(assert_close, limit=limit))(rest, expected)


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_a_state_is_what_was_saved_last_whatever_lay_in_its_folder(ranks, tmp_path, before, after):
    path = str(tmp_path / "step_3")
    of_rank_0(ranks, before, by_accelerate, 1, save=path)
    saved = of_rank_0(ranks, after, by_accelerate, 3, save=path)
    for world in (1, 2):
        assert_identical(of_rank_0(ranks, world, by_accelerate, 3, resume=path), {**saved, "losses": []})


@pytest.mark.parametrize(("rule", "cut"), [("dram", None), ("ssd", None), ("dram", True)])
def test_shards_stay_on_the_host_where_a_model_is_placed_twice_or_cut_by_its_user(ranks, tmp_path, rule, cut):
    options = {"tiers": {"ssd": {"path": str(tmp_path)}}, "tier_rules": {"*": {"weights": rule}}}
    on_device = ranks.of(2, "apart").run(by_fabric, 3, options=options, cut=cut)[0]
    assert_close(on_device, of_rank_0(ranks, 2, by_fabric, 3, cut=cut and False), limit=2e-6)


def own_tests_of_syncs():
    from accelerate.test_utils.scripts import test_sync

    accelerator = accelerator_of()
    with mock.patch.object(test_sync, "Accelerator", accelerator_of):
        test_sync.test_distributed_sync(accelerator)
        test_sync.test_gradient_accumulation(sync_each_batch=True)  # what `accumulate` does here
        test_sync.test_gradient_accumulation_with_opt_and_scheduler(sync_each_batch=True)


def test_own_tests_of_syncs(ranks):
    """Their model has parameters without dimensions alone."""
    ranks.of(2).run(own_tests_of_syncs)
