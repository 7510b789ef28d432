"""Several processes under Accelerate: as one process, with states that any number of processes goes on from."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import save_file
from torch import nn

from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.integrations.accelerate import load_whole
from tests.distributed.lightning_runs import BATCH, LENGTH, VOCAB
from tests.distributed.ranks import of_rank_0
from tests.distributed.test_lightning import assert_close, assert_identical
from tests.distributed.training import place, whole
from tests.distributed.volume import Traffic
from tests.integration.accelerate_loop import forget_accelerators
from tests.integration.llama import tiny_llama
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


def save_and_load(folder: str, *, own: bool) -> dict[str, Any]:
    """Save two models with hooks and load them; with `own` the hooks take the first model for themselves."""
    torch.manual_seed(5)
    accelerator = accelerator_of()
    models = [TinyTransformer(dropout=0.0), TinyTransformer(dropout=0.0)]
    saved: list[Any] = []
    loaded: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], folder: str) -> None:
        saved.extend([list(models), list(weights)])
        if own:
            weights.pop(0)

    def on_load(models: list[Any], folder: str) -> None:
        loaded.extend(models)
        if own:
            models.pop(0)

    try:
        models = [accelerator.prepare(model) for model in models]
        accelerator.register_save_state_pre_hook(on_save)
        accelerator.register_load_state_pre_hook(on_load)
        before = [_whole(model) for model in models]
        accelerator.save_state(folder)
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.zero_()
        accelerator.load_state(folder)
        return {
            "losses": [], "norms": [],
            "all given": saved[0] == models and loaded == models, "weights given": saved[1],
            "back": [all(map(torch.equal, _whole(model), old)) for model, old in zip(models, before, strict=True)],
            "files": sorted(path for path in os.listdir(folder) if "model" in path),
        }  # fmt: skip
    finally:
        accelerator.free_memory()


def load_what_was_compiled(folder: str) -> bool:
    """Return whether weights that one process has saved of a compiled model come back."""
    torch.manual_seed(5)
    rank, _ = place()
    model = TinyTransformer(dropout=0.0)
    expected = [each.detach().clone() for each in model.parameters()]
    if rank == 0:
        named = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
        save_file(named, Path(folder) / "model.safetensors")
    accelerator = accelerator_of()
    try:
        model = accelerator.prepare(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_whole(Path(folder), 0, model)
        return all(map(torch.equal, _whole(model), expected))
    finally:
        accelerator.free_memory()


def generate() -> tuple[int, bool]:
    """Return how many tokens a rank gets where each wants another number, and whether a plain model gives them."""
    torch.manual_seed(5)
    accelerator = accelerator_of()
    model = tiny_llama()
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    try:
        model = accelerator.prepare(model)
        rank = accelerator.process_index
        tokens = torch.arange(1, 5 + rank)[None]
        given = {"max_new_tokens": 2 + 4 * rank, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(tokens, **given)
        return found.shape[1], torch.equal(found, plain.generate(tokens, **given))
    finally:
        accelerator.free_memory()


def _whole(model: Any) -> list[torch.Tensor]:
    return [whole(parameter).clone() for parameter in model.parameters()]


def budget_of_each() -> dict[str, Any]:
    """Return a rank's part of a budget of 1 GiB where no launcher says how many ranks a machine has."""
    forget_accelerators()
    rank, world = place()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    kept = os.environ.pop("LOCAL_WORLD_SIZE", None)
    accelerator = CXLAccelerator(cpu=True, offload={"tiers": {"dram": "1GiB"}})
    try:
        accelerator.prepare(TinyTransformer(dropout=0.0))
        return {"losses": [], "norms": [], "bytes": accelerator.report()["tiers"]["dram"]["budget_bytes"]}
    finally:
        accelerator.free_memory()
        del os.environ["MASTER_ADDR"]
        if kept is not None:
            os.environ["LOCAL_WORLD_SIZE"] = kept


def run(ranks, world, *args, **keywords):
    """Return what rank 0 has of a run of `world` ranks."""
    return of_rank_0(ranks, world, train, *args, **keywords)


def test_several_processes_train_as_one(ranks):
    given = {"micro_batches": 2, "clip": 0.5}
    two, one = run(ranks, 2, 4, **given), run(ranks, 1, 4, **given)
    assert_close(two, one)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)


def test_every_micro_batch_reduces_unless_it_is_told_not_to(ranks):
    once, each = (run(ranks, 2, 2, micro_batches=3, skip_sync=skips) for skips in (True, False))
    assert_close(once, each)
    assert each["reduced"] == 3 * once["reduced"] > 0


@pytest.mark.parametrize("before, after, optimizer", [(2, 2, "AdamW"), (2, 1, "SGD"), (1, 2, "AdamW")])
def test_another_number_of_processes_goes_on(ranks, tmp_path, before, after, optimizer):
    path = str(tmp_path / "step_3")
    whole = run(ranks, before, 6, optimizer=optimizer)
    run(ranks, before, 3, save=path, optimizer=optimizer)
    rest = run(ranks, after, 6, resume=path, optimizer=optimizer)
    compare = assert_identical if before == after else assert_close
    compare(rest, {**whole, "losses": whole["losses"][3:]})


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_a_state_is_what_was_saved_last_whatever_lay_in_its_folder(ranks, tmp_path, before, after):
    path = str(tmp_path / "step_3")
    run(ranks, before, 1, save=path)
    saved = run(ranks, after, 3, save=path)
    for world in (1, 2):
        assert_identical(run(ranks, world, 3, resume=path), {**saved, "losses": []})


@pytest.mark.parametrize("own", [False, True])
def test_hooks_get_all_models(ranks, tmp_path, own):
    found = of_rank_0(ranks, 2, save_and_load, str(tmp_path), own=own)
    assert found["all given"]
    assert found["weights given"] == [{}, {}]
    assert found["back"] == [not own, True], "whose weights a hook has taken it loads itself"
    assert found["files"] == ["sharded_model_0", "sharded_model_1"]


def test_processes_of_one_machine_share_its_budget(ranks):
    found = of_rank_0(ranks, 2, budget_of_each)
    assert found["bytes"] == 1 << 29


def test_what_one_process_has_saved_of_a_compiled_model_is_loaded(ranks, tmp_path):
    assert ranks.of(2).run(load_what_was_compiled, str(tmp_path)) == [True, True]


def test_ranks_generate_as_many_tokens_as_each_wants(ranks):
    assert ranks.of(2).run(generate) == [(6, True), (11, True)]


def own_tests_of_syncs():
    from accelerate.test_utils.scripts import test_sync

    accelerator, given = accelerator_of(), test_sync.Accelerator
    test_sync.Accelerator = accelerator_of
    try:
        test_sync.test_distributed_sync(accelerator)
        test_sync.test_gradient_accumulation(sync_each_batch=True)  # what `accumulate` does here
        test_sync.test_gradient_accumulation_with_opt_and_scheduler(sync_each_batch=True)
    finally:
        test_sync.Accelerator = given


def test_own_tests_of_syncs(ranks):
    """Their model has parameters without dimensions alone."""
    ranks.of(2).run(own_tests_of_syncs)
