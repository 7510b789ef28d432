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


SMALL = [f"small.{index}" for index in range(5)]
LARGE = [f"large.{index}" for index in range(3)]


def test_declared_blocks_win_without_embeddings_and_without_any_the_largest_stack():
    assert names(Declared()) == ["layers.0", "layers.1"]
    assert names(nn.ModuleDict({"model": Declared(1)})) == ["model.layers.0"]
    for declared in (None, ["Elsewhere"]):
        model = Pair()
        model._no_split_modules = declared
        assert names(model) == LARGE


@pytest.mark.parametrize(
    ("units", "found"),
    [
        ("large.*", LARGE),
        ("Block", SMALL + LARGE),
        (["head", "small.[12]"], ["small.1", "small.2", "head"]),  # in the order of the model
        (["Block", "large"], [*SMALL, "large"]),  # the outermost wins
        ("*", ["small", "large", "head"]),
        ("Pair", [""]),  # the root is matched by its class only
    ],
)
def test_globs_and_class_names(units, found):
    assert names(Pair(), units) == found


def test_what_matches_nothing_is_an_error_that_names_what_exists():
    with pytest.raises(ConfigError, match=r"`Blok` matches no module.* of Pair\. Did you mean `Block`") as error:
        find_units(Pair(), ["large.*", "Blok"])
    assert "`large.0` to `large.2`" in str(error.value) and "Linear" in str(error.value)


def test_compiled_blocks_are_found_as_what_they_wrap():
    model, pair = Declared(3), Pair()
    for container in (model.layers, pair.small, pair.large):
        for index in range(1, len(container)):  # all but the first
            container[index] = torch.compile(container[index], backend="eager")
    assert names(model) == names(model, "Layer") == names(model, "layers.*") == ["layers.0", "layers.1", "layers.2"]
    assert dict(find_units(model))["layers.1"] is model.layers[1]
    assert names(pair) == LARGE
