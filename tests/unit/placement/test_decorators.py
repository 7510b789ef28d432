import copy
import pickle

import pytest
from torch import nn

from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.placement import TierSpec, class_spec, constructing_spec, instance_spec, tier


@tier(weights="cxl", activations="cxl")
class Block(nn.Module):
    """Remembers which spec was active while it was built."""

    def __init__(self, width: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.seen = constructing_spec()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        return self.linear(x)


class Wider(Block):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.seen_after_super = constructing_spec()


@tier(weights="dram")
class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = constructing_spec()
        self.block = Block()
        self.after = constructing_spec()


BLOCK = TierSpec(weights="cxl", activations="cxl")


def test_spec_is_active_only_during_construction():
    assert constructing_spec() is None
    assert Block().seen == BLOCK
    assert constructing_spec() is None


def test_subclass_including_what_follows_super_init():
    module = Wider()
    assert module.seen == module.seen_after_super == BLOCK
    assert constructing_spec() is None


def test_innermost_class_wins_and_outer_ones_fill_in():
    module = Outer()
    assert module.before == module.after == TierSpec(weights="dram")
    assert module.block.seen == BLOCK

    @tier(gradients="dram")
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

    assert Around().block.seen == TierSpec(weights="cxl", gradients="dram", activations="cxl")


def test_class_decorated_after_its_subclass_was_defined():
    class Base(nn.Module):
        def __init__(self):
            super().__init__()

    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.seen = constructing_spec()

    assert tier("dram")(Base) is Base
    assert Derived().seen == TierSpec("dram", "dram", "dram", "dram")


def test_subclass_adds_to_its_base():
    @tier(weights="dram", gradients="dram")
    class Sub(Block):
        pass

    expected = TierSpec(weights="dram", gradients="dram", activations="cxl")
    assert class_spec(Sub) == Sub().seen == expected
    assert class_spec(Block) == BLOCK


def test_lightning_hyperparameters_of_decorated_modules_are_complete():
    lightning = pytest.importorskip("lightning")

    @tier("cxl")
    class Base(lightning.LightningModule):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters()

    class Sub(Base):
        def __init__(self, width, lr=0.2):
            super().__init__(lr=lr)

    assert dict(Base(lr=0.3).hparams) == {"lr": 0.3}
    assert dict(Sub(7).hparams) == {"width": 7, "lr": 0.2}


def test_instance_mark_survives_copies_and_does_not_leak_to_the_class():
    module = tier("dram")(nn.Linear(2, 2))
    assert instance_spec(copy.deepcopy(module)) == instance_spec(module)
    assert instance_spec(pickle.loads(pickle.dumps(module))) == instance_spec(module)
    assert instance_spec(nn.Linear(2, 2)) is None
    assert class_spec(nn.Linear) is None
    assert set(module.state_dict()) == {"weight", "bias"}


def test_lightning_cli_reads_the_arguments_of_decorated_classes_and_subclasses():
    class Sub(Block):
        def __init__(self, depth: int, **kwargs) -> None:
            super().__init__(**kwargs)

    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(Sub, "model")
    arguments = parser.parse_args(["--model.depth=3", "--model.width=2"])
    assert arguments.model.as_dict() == {"depth": 3, "width": 2, "bias": True}
    assert Sub(**arguments.model.as_dict()).seen == BLOCK


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, "places nothing"),
        ((3,), {}, r"all=3\) is not a tier name"),
        (("",), {}, "is not a tier name"),
        ((), {"weights": 1}, r"weights=1\) is not a tier name"),
        ((Block,), {}, r'call the decorator: @tier\("cxl"\)'),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        tier(*arguments, **options)
