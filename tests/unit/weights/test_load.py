import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lightning_cxl
from lightning_cxl.errors import CheckpointError, TierFullError
from lightning_cxl.memory import hook as scope
from lightning_cxl.memory.hook import HostAllocationMode
from lightning_cxl.memory.placement import Placer, TensorRole
from lightning_cxl.weights.files import FileTensor
from lightning_cxl.weights.load import empty_weights, load_weights
from tests.models import TinyConvNet, TinyTransformer
from tests.unit.memory.host import Host


def saved(model, path, drop=(), extra=()):
    """Write what safetensors can hold of a state dict, and return it."""
    state = {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name not in drop
    }
    save_file({**state, **{name: torch.ones(2) for name in extra}}, path)
    return state


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def built_empty(make, *args, **kwargs):
    with empty_weights():
        return make(*args, **kwargs)


def assert_loaded(model, state):
    for name, value in state.items():
        loaded = model.state_dict()[name]
        assert loaded.dtype == value.dtype and torch.equal(loaded, value), name


@pytest.mark.parametrize("make", [TinyTransformer, TinyConvNet])
@pytest.mark.parametrize("build", [built_empty, lambda make: make()], ids=["empty", "existing"])
def test_a_model_gets_the_values_of_the_files(path, make, build):
    state = saved(make(), path)
    model = build(make)
    identities = {name: id(p) for name, p in model.named_parameters() if not p.is_meta}
    addresses = {name: p.data_ptr() for name, p in model.named_parameters() if not p.is_meta}
    report = load_weights(model, path)
    assert_loaded(model, state)
    assert report.num_tensors == len(state) and report.missing_keys == report.unexpected_keys == []
    assert report.nbytes == sum(value.nbytes for value in state.values())
    for name in identities:
        parameter = model.get_parameter(name)
        assert id(parameter) == identities[name] and parameter.data_ptr() == addresses[name]
    strides = {name: p.stride() for name, p in make().named_parameters()}
    assert {name: p.stride() for name, p in model.named_parameters()} == strides, "channels-last stays"


def test_frozen_parameters_stay_frozen_and_attributes_survive(path):
    def make():
        model = TinyTransformer()
        model.head.weight.requires_grad_(False)
        model.head.weight.role = "head"
        return model

    saved(make(), path)
    model = built_empty(make)
    model.embed.weight.requires_grad_(False)
    load_weights(model, path)
    assert not model.head.weight.requires_grad and model.head.weight.role == "head"
    assert not model.embed.weight.requires_grad and model.norm.weight.requires_grad
    assert type(model.head.weight) is nn.Parameter and model.head.weight.is_leaf


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("build", [built_empty, lambda make, **kw: make(**kw)], ids=["empty", "existing"])
def test_tied_weights_stay_tied_whichever_name_the_file_has(path, kept, build):
    dropped = {"embed.weight": "head.weight", "head.weight": "embed.weight"}[kept]
    state = saved(TinyTransformer(tied=True), path, drop=[dropped])
    model = build(TinyTransformer, tied=True)
    load_weights(model, path)
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, state[kept])


@pytest.mark.parametrize("build", [built_empty, lambda make, **kw: make(**kw)], ids=["empty", "existing"])
def test_tied_weights_under_both_names_must_be_equal(path, build):
    saved(TinyTransformer(tied=True), path)
    model = build(TinyTransformer, tied=True)
    load_weights(model, path)
    assert model.head.weight is model.embed.weight
    saved(TinyTransformer(tied=False), path)
    with pytest.raises(CheckpointError, match=r"`embed\.weight` and `head\.weight` are tied .* differ .* untied"):
        load_weights(build(TinyTransformer, tied=True), path)


def test_modules_used_twice_are_loaded_once(path):
    def make():
        block = nn.Linear(3, 3)
        return nn.ModuleDict({"a": block, "b": block, "c": nn.Sequential(block)})

    state = saved(make(), path, drop=["a.weight", "b.bias", "c.0.bias"])
    model = built_empty(make)
    assert load_weights(model, path).missing_keys == []
    assert model["a"].weight is model["c"][0].weight and torch.equal(model["b"].weight, state["b.weight"])


def test_dtypes_are_the_models_or_the_one_asked_for(path):
    state = saved(TinyConvNet(), path)
    model = built_empty(lambda: TinyConvNet().bfloat16())
    load_weights(model, path)
    assert torch.equal(model.head.weight, state["head.weight"].bfloat16())
    model = built_empty(TinyConvNet)
    load_weights(model, path, dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    norm = model.blocks[0][1]
    assert norm.running_mean.dtype == torch.float32 and norm.num_batches_tracked.dtype == torch.int64
    existing = TinyConvNet()
    load_weights(existing, path, dtype=torch.bfloat16)
    assert existing.head.weight.dtype == torch.float32, "what has memory keeps its dtype"


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_missing_and_unexpected_are_one_error_before_anything_is_loaded(path):
    saved(TinyTransformer(), path, drop=["norm.weight", "embed.weight"], extra=["norm.wieght", "other.thing"])
    model = built_empty(TinyTransformer)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, path)
    text = str(caught.value)
    assert "2 weights are missing from the files: `embed.weight`" in text
    assert "`norm.weight`" in text and "`norm.wieght`" in text
    assert "2 tensors of the files are not in the model" in text and "`other.thing`" in text
    assert "strict=False" in text and "Nothing has been loaded" in text
    assert all(p.is_meta for p in model.parameters())


def test_what_fits_is_loaded_when_not_strict_and_the_rest_reported(path):
    state = saved(TinyTransformer(), path, drop=["norm.weight"], extra=["other"])
    model = built_empty(TinyTransformer)
    report = load_weights(model, path, strict=False)
    assert report.missing_keys == ["norm.weight"] and report.unexpected_keys == ["other"]
    assert model.norm.weight.is_meta
    assert_loaded(model, {name: value for name, value in state.items() if name != "norm.weight"})


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_and_kinds_are_always_an_error(path, strict):
    state = TinyConvNet().state_dict()
    state = {name: value.contiguous() for name, value in state.items()}
    state["head.weight"] = torch.ones(5, 9)
    state["blocks.0.1.num_batches_tracked"] = torch.tensor(3.0)
    save_file(state, path)
    model = TinyConvNet()
    before = model.stem.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, path, strict=strict)
    assert "2 tensors do not fit TinyConvNet" in str(caught.value)
    assert "`head.weight`: (5, 9) float32 in the file, (5, 8) float32 in the model" in str(caught.value)
    assert "num_batches_tracked`: () float32 in the file, () int64 in the model" in str(caught.value)
    assert torch.equal(model.stem.weight, before)


def test_computed_buffers_lost_on_meta_are_refused(path):
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("inv_freq", torch.ones(3), persistent=False)

    saved(Rotary(), path)
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(CheckpointError, match=r"1 buffers of Rotary.*inv_freq.*empty_weights"):
        load_weights(model, path)
    assert model.weight.is_meta
    model = built_empty(Rotary)
    load_weights(model, path)
    assert torch.equal(model.inv_freq, torch.ones(3))


def test_a_computed_buffer_that_an_old_file_holds_is_not_unexpected(path):
    class Rotary(nn.Module):
        def __init__(self, persistent) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(3), persistent=persistent)

    saved(Rotary(True), path)
    assert load_weights(Rotary(False), path) == ([], [], 0, 0)


# -- in the middle -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fails_at_the_fifth(monkeypatch):
    read, calls = FileTensor.read_into, []

    def read_into(self, *args):
        calls.append(args)
        if len(calls) == 5:
            raise CheckpointError("the disk is gone")
        read(self, *args)

    monkeypatch.setattr(FileTensor, "read_into", read_into)


def test_after_an_error_in_the_middle_nothing_is_half_loaded(path, fails_at_the_fifth):
    saved(TinyTransformer(), path)
    model = built_empty(TinyTransformer)
    before = dict(model.named_parameters())
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="the disk is gone") as caught:
        load_weights(model, path)
    assert all(p.is_meta and p is before[name] for name, p in model.named_parameters())
    assert not getattr(caught.value, "__notes__", [])
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_after_an_error_in_the_middle_it_is_said_what_has_been_overwritten(path, fails_at_the_fifth):
    saved(TinyTransformer(), path)
    with pytest.raises(CheckpointError, match="the disk is gone") as caught:
        load_weights(TinyTransformer(), path)
    assert "5 weights of the model have been overwritten" in caught.value.__notes__[0]


# -- where it goes -----------------------------------------------------------------------------------------------------


def tiers(host, model):
    return {name: host.tier(p) for name, p in model.named_parameters()}


@lightning_cxl.tier("dram")
class Near(nn.Linear):
    pass


def make_decorated():
    model = nn.ModuleDict({"near": Near(4, 4), "far": nn.Linear(4, 4), "marked": Near(4, 4)})
    lightning_cxl.tier(weights="cxl")(model["marked"])
    return model


@pytest.mark.parametrize("with_hook", [False, True])
def test_inside_a_run_weights_go_where_decorators_and_policy_say(path, with_hook):
    saved(make_decorated(), path)
    host = Host()
    placer = Placer(host.topology, host.memory.free_bytes)
    with scope.activate(host.memory, placer):
        if with_hook:
            with HostAllocationMode(host.memory, placer, role=TensorRole.COMPUTE_WEIGHTS):
                model = built_empty(make_decorated)
                load_weights(model, path)
        else:
            model = built_empty(make_decorated)
            load_weights(model, path)
    expected = {"near": "dram", "far": "cxl", "marked": "cxl"}
    assert tiers(host, model) == {name: expected[name.split(".")[0]] for name in dict(model.named_parameters())}
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(host.memory.stats()["peak_roles"]["compute_weights"].values()) == weights, "and nothing else was placed"


def test_an_explicit_tier_wins_inside_and_outside_of_a_run(path):
    state = saved(nn.Linear(8, 8), path)
    host = Host()
    placer = Placer(host.topology, host.memory.free_bytes)
    with scope.activate(host.memory, placer), lightning_cxl.host_allocation(tier="dram"):
        model = built_empty(nn.Linear, 8, 8)
        load_weights(model, path)
    assert host.tier(model.weight) == "dram"
    assert_loaded(model, state)
    with lightning_cxl.host_allocation(tier="cxl"):
        model = built_empty(nn.Linear, 8, 8)
        load_weights(model, path)
    assert set(lightning_cxl.residency(model.weight)) == {"cxl"}
    model = built_empty(nn.Linear, 8, 8)
    load_weights(model, path)
    assert host.tier(model.weight) is None and model.weight.untyped_storage().resizable(), "ordinary memory"


def test_a_full_tier_leaves_the_model_as_it_was(path):
    def make():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))

    saved(make(), path)
    host = Host(budgets={"dram": 2**17, "cxl": 0})
    placer = Placer(host.topology, host.memory.free_bytes, cpu_computes=True)
    model = built_empty(make)
    with scope.activate(host.memory, placer), pytest.raises(TierFullError, match="compute_weights"):
        load_weights(model, path)
    assert all(p.is_meta for p in model.parameters())
    assert sum(host.memory.stats()["roles"]["compute_weights"].values()) == 0
