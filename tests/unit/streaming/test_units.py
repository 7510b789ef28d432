import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError
from lightning_cxl.streaming.units import find_units


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)


class Pair(nn.Module):
    """Two stacks, the second one larger."""

    def __init__(self):
        super().__init__()
        self.small = nn.ModuleList(Block(2) for _ in range(5))
        self.large = nn.Sequential(*(Block(8) for _ in range(3)))
        self.head = nn.Linear(8, 2)


class Declared(nn.Module):
    """As Hugging Face models do it."""

    _no_split_modules = ("Embeddings", "Layer")

    def __init__(self, num_layers=2):
        super().__init__()
        self.embed = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.other = nn.ModuleList(Block(64) for _ in range(4))


class Embeddings(nn.Module):
    pass


class Layer(Block):
    pass


def names(model, units="auto"):
    return [name for name, _ in find_units(model, units)]


def test_declared_blocks_win_and_embeddings_are_no_units():
    assert names(Declared()) == ["layers.0", "layers.1"]
    assert names(nn.ModuleDict({"model": Declared(1)})) == ["model.layers.0"]


def test_declaring_none_falls_back_to_the_largest_stack():
    model = Pair()
    model._no_split_modules = None
    assert names(model) == ["large.0", "large.1", "large.2"]
    model._no_split_modules = ["Elsewhere"]
    assert names(model) == ["large.0", "large.1", "large.2"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),  # nothing to recompute in them
        nn.Sequential(Block(), nn.Linear(4, 4)),
        nn.ModuleList([Block()]),
    ],
)
def test_no_units_is_no_error(model):
    assert names(model) == []


def test_globs_and_class_names_in_the_order_of_the_model():
    assert names(Pair(), "large.*") == ["large.0", "large.1", "large.2"]
    assert names(Pair(), "Block") == [f"small.{i}" for i in range(5)] + [f"large.{i}" for i in range(3)]
    assert names(Pair(), ["head", "small.[12]"]) == ["small.1", "small.2", "head"]


def test_outermost_wins_and_the_root_is_matched_by_class_only():
    assert names(Pair(), ["Block", "large"]) == [f"small.{i}" for i in range(5)] + ["large"]
    assert names(Pair(), "*") == ["small", "large", "head"]
    assert names(Pair(), "Pair") == [""]


def test_what_matches_nothing_is_an_error_that_names_what_exists():
    with pytest.raises(ConfigError, match=r"`Blok` matches no module.* of Pair\. Did you mean `Block`") as error:
        find_units(Pair(), ["large.*", "Blok"])
    assert "`large.0` to `large.2`" in str(error.value) and "Linear" in str(error.value)


def compiled(model, *containers):
    """Wrap every block but the first one of each container."""
    for container in containers:
        for index in range(1, len(container)):
            container[index] = torch.compile(container[index], backend="eager")
    return model


def test_compiled_blocks_are_found_as_what_they_wrap():
    model = Declared(3)
    compiled(model, model.layers)
    assert names(model) == names(model, "Layer") == names(model, "layers.*") == ["layers.0", "layers.1", "layers.2"]
    assert dict(find_units(model))["layers.1"] is model.layers[1]
    pair = Pair()
    assert names(compiled(pair, pair.small, pair.large)) == ["large.0", "large.1", "large.2"]


def test_blocks_of_a_compiled_model_have_their_own_names():
    whole = nn.ModuleDict({"model": torch.compile(Declared(), backend="eager")})
    assert names(whole) == names(whole, "model.layers.*") == ["model._orig_mod.layers.0", "model._orig_mod.layers.1"]
