import json
import os
import resource
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lightning_cxl
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning, TierFullError
from lightning_cxl.memory import hook as scope
from lightning_cxl.memory.placement import Placer, TensorRole
from lightning_cxl.weights import models as saving
from lightning_cxl.weights.files import FileTensor, NamedTensor
from lightning_cxl.weights.models import empty_weights, load_weights, refuse_unready, save_weights
from tests.fakes import failing
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


def loaded(model, path, **options):
    load_weights(model, path, **options)
    return model


BUILDS = pytest.mark.parametrize("build", [built_empty, lambda make, **options: make(**options)])


class Rotary(nn.Module):
    def __init__(self, persistent=False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 5.0), persistent=persistent)
        self.alias = self.weight
        both = nn.Parameter(torch.ones(2))
        both.role = "scale"
        self.one, self.two = both, both


def test_parameters_have_no_memory_and_buffers_are_real():
    def make():
        return nn.ModuleList([TinyConvNet(), Rotary(), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2)])

    def facts(each):
        return {n: (p.shape, p.dtype, p.stride(), p.requires_grad) for n, p in each.named_parameters()}

    model, reference = built_empty(make), make()
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert facts(model) == facts(reference)
    rotary, tied = model[1], built_empty(TinyTransformer, tied=True)
    assert tied.head.weight is tied.embed.weight
    assert rotary.alias is rotary.weight and rotary.one is rotary.two and rotary.one.role == "scale"


def test_it_ends_with_the_region_also_after_an_error_and_what_is_thrown_away_is_not_placed():
    host = Host()
    with host.mode(role=None):
        with pytest.raises(KeyError), empty_weights():
            TinyTransformer()
            assert host.tier(torch.ones(100)) is None
            raise KeyError
        assert not any(tier["held_bytes"] for tier in host.memory.stats()["tiers"].values())
        with empty_weights(), empty_weights():
            pass
        assert host.tier(torch.ones(100)) is not None, "placing goes on afterwards"
    assert not nn.Linear(2, 2).weight.is_meta


def test_tensors_on_meta_are_refused_by_name():
    refuse_unready(TinyTransformer())
    with pytest.raises(ConfigError, match="`weight` belongs to a lazy module"):
        refuse_unready(nn.LazyLinear(3))
    with empty_weights():
        model = TinyTransformer()
    with pytest.raises(ConfigError, match=r"of TinyTransformer are on the meta device.*`embed\.weight`.*load_weights"):
        refuse_unready(model)
    with torch.device("meta"):
        norm = nn.BatchNorm1d(3)
    norm.weight, norm.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"3 of 5 tensors.*`running_mean`"):
        refuse_unready(norm)


@pytest.mark.parametrize("make", [TinyTransformer, TinyConvNet])
@BUILDS
def test_a_model_gets_the_values_of_the_files(path, make, build):
    state = saved(make(), path)
    model = build(make)
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters() if not p.is_meta}
    report = load_weights(model, path)
    assert_loaded(model, state)
    assert report.num_tensors == len(state) and report.missing_keys == report.unexpected_keys == []
    assert report.nbytes == sum(value.nbytes for value in state.values())
    for name, (parameter, address) in before.items():
        assert model.get_parameter(name) is parameter and parameter.data_ptr() == address
    for name, parameter in make().named_parameters():
        assert model.get_parameter(name).stride() == parameter.stride(), "channels-last stays"


@BUILDS
def test_tied_weights_stay_tied_whichever_names_the_file_has(path, build):
    for kept, dropped in (("embed.weight", "head.weight"), ("head.weight", "embed.weight")):
        state = saved(TinyTransformer(tied=True), path, drop=[dropped])
        model = loaded(build(TinyTransformer, tied=True), path)
        assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, state[kept])
    saved(TinyTransformer(tied=True), path)
    model = loaded(build(TinyTransformer, tied=True), path)
    assert model.head.weight is model.embed.weight
    saved(TinyTransformer(tied=False), path)
    with pytest.raises(CheckpointError, match=r"`embed\.weight` and `head\.weight` are tied .* differ .* untied"):
        load_weights(build(TinyTransformer, tied=True), path)


def test_dtypes_are_the_models_or_the_one_asked_for(path):
    state = saved(TinyConvNet(), path)
    model = loaded(built_empty(lambda: TinyConvNet().bfloat16()), path)
    assert torch.equal(model.head.weight, state["head.weight"].bfloat16())
    model = loaded(built_empty(TinyConvNet), path, dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    norm = model.blocks[0][1]
    assert norm.running_mean.dtype == torch.float32 and norm.num_batches_tracked.dtype == torch.int64
    existing = loaded(TinyConvNet(), path, dtype=torch.bfloat16)
    assert existing.head.weight.dtype == torch.float32, "what has memory keeps its dtype"


def test_missing_and_unexpected_are_one_error_or_reported(path):
    state = saved(TinyTransformer(), path, drop=["norm.weight", "embed.weight"], extra=["norm.wieght", "other.thing"])
    model = built_empty(TinyTransformer)
    with pytest.raises(CheckpointError, match=r"2 weights are missing from the files: `embed\.weight`") as caught:
        load_weights(model, path)
    for text in ("`norm.weight`", "`norm.wieght`", "`other.thing`", "strict=False", "Nothing has been loaded"):
        assert text in str(caught.value)
    assert all(p.is_meta for p in model.parameters())
    report = load_weights(model, path, strict=False)
    assert sorted(report.missing_keys) == ["embed.weight", "norm.weight"]
    assert sorted(report.unexpected_keys) == ["norm.wieght", "other.thing"]
    assert model.norm.weight.is_meta
    assert_loaded(model, state)


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_and_kinds_are_always_an_error(path, strict):
    state = {name: value.contiguous() for name, value in TinyConvNet().state_dict().items()}
    state["head.weight"] = torch.ones(5, 9)
    state["blocks.0.1.num_batches_tracked"] = torch.tensor(3.0)
    save_file(state, path)
    model = TinyConvNet()
    before = model.stem.weight.clone()
    with pytest.raises(CheckpointError, match="2 tensors do not fit TinyConvNet") as caught:
        load_weights(model, path, strict=strict)
    assert "`head.weight`: (5, 9) float32 in the file, (5, 8) float32 in the model" in str(caught.value)
    assert "num_batches_tracked`: () float32 in the file, () int64 in the model" in str(caught.value)
    assert torch.equal(model.stem.weight, before)


def test_computed_buffers_lost_on_meta_are_refused_and_in_an_old_file_not_unexpected(path):
    saved(Rotary(), path)
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(CheckpointError, match=r"1 buffers of Rotary.*frequencies.*empty_weights"):
        load_weights(model, path)
    assert model.weight.is_meta
    assert torch.equal(loaded(built_empty(Rotary), path).frequencies, Rotary().frequencies)
    state = saved(Rotary(persistent=True), path)
    assert load_weights(Rotary(), path).unexpected_keys == [] and "frequencies" in state


def test_after_an_error_in_the_middle_nothing_is_half_loaded_or_it_is_said_what_is(path, monkeypatch):
    saved(TinyTransformer(), path)
    failing(monkeypatch, FileTensor, "read_into", 5, CheckpointError("the disk is gone"))
    model = built_empty(TinyTransformer)
    before = dict(model.named_parameters())
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="the disk is gone") as caught:
        load_weights(model, path)
    assert all(p.is_meta and p is before[name] for name, p in model.named_parameters())
    assert not getattr(caught.value, "__notes__", [])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    failing(monkeypatch, FileTensor, "read_into", 5, CheckpointError("the disk is gone"))
    with pytest.raises(CheckpointError, match="the disk is gone") as caught:
        load_weights(TinyTransformer(), path)
    assert "5 weights of the model have been overwritten" in caught.value.__notes__[0]


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
    hook = host.mode(role=TensorRole.COMPUTE_WEIGHTS) if with_hook else nullcontext()
    with scope.activate(host.memory, host.placer), hook:
        model = loaded(built_empty(make_decorated), path)
    expected = {"near": "dram", "far": "cxl", "marked": "cxl"}
    for name, parameter in model.named_parameters():
        assert host.tier(parameter) == expected[name.split(".")[0]], name
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(host.memory.stats()["peak_roles"]["compute_weights"].values()) == weights, "and nothing else was placed"


def test_an_explicit_tier_wins_inside_and_outside_of_a_run(path):
    state, host = saved(nn.Linear(8, 8), path), Host()
    with scope.activate(host.memory, host.placer), lightning_cxl.host_allocation(tier="dram"):
        model = loaded(built_empty(nn.Linear, 8, 8), path)
    assert host.tier(model.weight) == "dram"
    assert_loaded(model, state)
    with lightning_cxl.host_allocation(tier="cxl"):
        model = loaded(built_empty(nn.Linear, 8, 8), path)
    assert set(lightning_cxl.residency(model.weight)) == {"cxl"}
    model = loaded(built_empty(nn.Linear, 8, 8), path)
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


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def written(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("make", [TinyTransformer, TinyConvNet])
def test_one_file_with_every_parameter_and_persistent_buffer(tmp_path, make):
    model, folder, mine = make(), tmp_path / "new" / "folder", tmp_path / "mine.safetensors"
    assert save_weights(model, folder) == [folder / "model.safetensors"]
    assert files(folder) == ["model.safetensors"]
    assert save_weights(model, mine, max_shard_bytes=1) == [mine]
    for state in (written(folder), load_file(mine)):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    save_weights(model, folder, dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    for name, value in written(folder).items():
        expected = model.state_dict()[name]
        assert value.dtype == (torch.bfloat16 if name in parameters else expected.dtype)
        assert torch.equal(value, expected.to(value.dtype)) and expected.dtype != torch.bfloat16


def test_shards_with_an_index_in_the_format_of_hugging_face(tmp_path):
    model = TinyTransformer()
    paths = save_weights(model, tmp_path, max_shard_bytes="20KB")
    largest = max(value.nbytes for value in model.state_dict().values())
    for path in paths:
        state = load_file(path)
        nbytes = sum(value.nbytes for value in state.values())
        assert nbytes <= 20_000 or (len(state) == 1 and nbytes == largest)
    names = [f"model-{i:05}-of-{len(paths):05}.safetensors" for i in range(1, 1 + len(paths))]
    assert [path.name for path in paths] == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values())
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
    assert index["weight_map"] == {name: path.name for path in paths for name in load_file(path)}
    assert written(tmp_path).keys() == model.state_dict().keys()


def test_a_later_save_replaces_an_earlier_one_whatever_its_shards(tmp_path):
    (tmp_path / "config.json").touch()
    save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    for _ in range(2):
        model = TinyTransformer()
        save_weights(model, tmp_path, max_shard_bytes=50_000)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert files(tmp_path) == sorted({*index["weight_map"].values(), "config.json", "model.safetensors.index.json"})
        assert torch.equal(written(tmp_path)["embed.weight"], model.embed.weight)
        save_weights(TinyTransformer(), tmp_path)
        assert files(tmp_path) == ["config.json", "model.safetensors"]


def test_tied_weights_are_written_once_under_the_name_that_is_not_declared_tied(tmp_path):
    save_weights(TinyTransformer(tied=True), tmp_path / "a")
    assert "embed.weight" in written(tmp_path / "a") and "head.weight" not in written(tmp_path / "a")
    model = TinyTransformer(tied=True)
    model._tied_weights_keys = {"embed.weight": "head.weight"}
    model._keys_to_ignore_on_save = {"norm.bias"}
    save_weights(model, tmp_path / "b")
    state = written(tmp_path / "b")
    assert "head.weight" in state and "embed.weight" not in state and "norm.bias" not in state


class OwnState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1.0}


def test_views_of_one_storage_are_written_as_what_they_are_and_other_state_is_named(tmp_path):
    both, model = torch.randn(2, 5), nn.Module()
    model.a, model.b = nn.Parameter(both[0]), nn.Parameter(both[1])
    save_weights(model, tmp_path)
    state = written(tmp_path)
    assert torch.equal(state["a"], both[0]) and torch.equal(state["b"], both[1])
    assert (tmp_path / "model.safetensors").stat().st_size < 300
    with pytest.warns(LightningCXLWarning, match="OwnState: 1 entries .* such as `_extra_state`") as told:
        save_weights(OwnState(2, 2), tmp_path)
    assert told[0].filename == __file__
    assert written(tmp_path).keys() == {"weight", "bias"}
    assert save_weights(nn.Identity(), tmp_path) == [tmp_path / "model.safetensors"] and written(tmp_path) == {}


def test_what_cannot_be_written_is_named(tmp_path):
    def with_buffer(value):
        module = nn.Module()
        module.register_buffer("s", value)
        return module

    with empty_weights():
        on_meta = TinyTransformer()
    for model, message in (
        (on_meta, r"on the meta device .* `embed\.weight`: load them"),
        (with_buffer(torch.eye(3).to_sparse()), "`s` is sparse or quantized"),
        (with_buffer(torch.ones(2, dtype=torch.complex128)), "complex128"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_weights(model, tmp_path)
    twins = [NamedTensor("a", torch.full((2,), float(number)), torch.float32) for number in range(2)]
    with pytest.raises(CheckpointError, match="one name"):
        saving.save_tensors(twins, tmp_path, 8)
    assert files(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file: give a folder"):
        save_weights(TinyTransformer(), tmp_path / "file")


@pytest.fixture
def earlier(tmp_path):
    """Return what checks that the folder is as an earlier save left it."""
    save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    content = lambda: {path.name: path.read_bytes() for path in tmp_path.iterdir()}  # noqa: E731
    before = content()
    return lambda: content() == before


def test_when_the_file_system_refuses_the_earlier_save_is_as_it_was(tmp_path, earlier):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"could not save .* KiB of weights to `{tmp_path}`: File too large"):
            save_weights(TinyTransformer(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert earlier()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt("No space left")])
def test_an_error_at_the_third_shard_leaves_nothing(tmp_path, earlier, monkeypatch, error):
    failing(monkeypatch, saving, "write_tensors", 3, error)
    with pytest.raises((CheckpointError, KeyboardInterrupt), match="No space left"):
        save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    assert earlier()


def test_a_crash_between_the_renames_leaves_no_mixture_that_loads(tmp_path, earlier, monkeypatch):
    failing(monkeypatch, os, "replace", 2, OSError(5, "Input/output error"))
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    assert not {"model.safetensors.index.json", "model.safetensors"}.intersection(files(tmp_path))
    assert not [name for name in files(tmp_path) if name.startswith(".")]
