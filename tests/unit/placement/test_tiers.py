import copy
import pickle
from pathlib import Path

import pytest
from torch import nn

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError, MissingTierWarning, TierNotFoundError, UnsupportedError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import (
    Placement,
    Placer,
    TensorRole,
    TierSpec,
    class_spec,
    constructing_spec,
    instance_spec,
    resolve,
    tier,
)
from tests.fakes import fake_topology


@tier(weights="cxl", activations="cxl")
class Block(nn.Module):
    """Remembers which spec was active while it was built."""

    def __init__(self, width: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.seen = constructing_spec()
        self.mlp = nn.Sequential(nn.Linear(width, width, bias=bias), nn.ReLU())


@tier(weights="dram")
class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = constructing_spec()
        self.block = Block()
        self.after = constructing_spec()


BLOCK = TierSpec(weights="cxl", activations="cxl")


def test_the_spec_of_the_innermost_class_is_active_during_construction_and_outer_ones_fill_in():
    class Wider(Block):
        def __init__(self):
            super().__init__(8)
            self.seen_after_super = constructing_spec()

    assert Wider().seen == Wider().seen_after_super == BLOCK
    module = Outer()
    assert module.before == module.after == TierSpec(weights="dram")
    assert module.block.seen == BLOCK

    @tier(gradients="dram")
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

    assert Around().block.seen == TierSpec(weights="cxl", gradients="dram", activations="cxl")
    assert constructing_spec() is None
    for arguments, message in (
        ((), "places nothing"),
        ((3,), r"all=3\) is not a tier name"),
        ((Block,), r'call the decorator: @tier\("cxl"\)'),
    ):
        with pytest.raises(ConfigError, match=message):
            tier(*arguments)


def test_subclass_adds_to_its_base_also_where_that_is_decorated_later():
    class Base(nn.Module):
        pass

    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.seen = constructing_spec()

    assert tier("dram")(Base) is Base
    assert Derived().seen == TierSpec("dram", "dram", "dram", "dram")

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


TOPOLOGY = fake_topology(("1GiB",), ("1GiB",))
WEIGHTS, ACTIVATIONS, MOMENTUM = TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS, TensorRole.MOMENTUM
GRADIENTS = TensorRole.COMPUTE_GRADS


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 1)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(1, 2)


def resolved(model, rules=None, topology=TOPOLOGY):
    return resolve(model.named_modules(), rules or {}, topology)


def asked(tiers, module):
    """Return the tiers of a module's weights, gradients, optimizer state and activations."""
    return tuple(tiers.lookup(module, role)[0] for role in (WEIGHTS, GRADIENTS, MOMENTUM, ACTIVATIONS))


def test_the_nearest_decorator_and_the_last_rule_win_for_each_field():
    tiers = resolved(Model())
    for name in ("layers.1", "layers.1.mlp.0"):
        assert tiers.lookup(name, WEIGHTS) == ("cxl", "decorator on class Block")
    assert tiers.lookup("layers.1.mlp.0", MOMENTUM) == tiers.lookup("lm_head", WEIGHTS) == (None, "")

    @tier(weights="dram", optimizer_state="dram")
    class Inner(nn.Linear):
        pass

    model = Model()
    model.layers[0].mlp[0] = Inner(1, 1)
    assert asked(resolved(model), "layers.0.mlp.0") == ("dram", None, "dram", "cxl")
    tiers = resolved(Model(), {"*": "dram", "layers.0": {"activations": "cxl"}, "layers.*": {"gradients": "cxl"}})
    assert asked(tiers, "layers.0.mlp") == ("dram", "cxl", "dram", "cxl")
    assert asked(tiers, "embed") == ("dram", "dram", "dram", "dram")
    tiers = resolved(Model(), {"layers.0": {"activations": "cxl"}, "*": "dram"})
    assert asked(tiers, "layers.0.mlp") == ("dram", "dram", "dram", "dram")


def test_rule_beats_class_and_the_nearest_instance_beats_rule():
    model = Model()
    tier(weights="cxl")(model.layers[0])
    tiers = resolved(model, {"layers.*": {"weights": "dram"}})
    assert tiers.lookup("layers.1", WEIGHTS) == ("dram", "rule 'layers.*'")
    assert tiers.lookup("layers.0.mlp.0", WEIGHTS) == ("cxl", "tier(...) on 'layers.0'")
    assert tiers.lookup("layers.1", ACTIVATIONS)[0] == "cxl"
    tier("dram")(model)
    tiers = resolved(model, {"layers.*": {"weights": "cxl"}})
    assert tiers.lookup("layers.0", WEIGHTS)[0] == "cxl" and tiers.lookup("embed", WEIGHTS)[0] == "dram"
    assert tiers.lookup("lm_head", MOMENTUM) == ("dram", "tier(...) on the whole Model")


def test_rules_and_decorators_that_cannot_be():
    model = Model()
    tier(weights="hbm")(model.embed)
    for error, given, rules, message in (
        (ConfigError, Model(), {"layer.*": "cxl"}, r"'layer\.\*' matches no module\. Closest: 'layers"),
        (ConfigError, Model(), {"embed": {"weight": "cxl"}}, "has no field 'weight'; use weights, gradients, optim"),
        (TierNotFoundError, Model(), {"embed": {"gradients": "hbm"}}, "'embed' asks for gradients on tier 'hbm'"),
        (TierNotFoundError, model, {}, r"tier\(\.\.\.\) on 'embed' asks for weights on tier 'hbm'"),
    ):
        with pytest.raises(error, match=message):
            resolved(given, rules)
    with pytest.raises(TierNotFoundError, match="the decorator on class Block asks for weights on tier 'cxl'"):
        resolved(Model(), topology=Topology(fake_topology().tiers[:1]))


WITH_SSD = TOPOLOGY.with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))


def test_rules_and_decorators_put_state_on_the_tier_ssd_and_no_gradients_yet():
    model = Model()
    tier(optimizer_state="ssd")(model.embed)
    rules = {"layers.*": {"optimizer_state": "ssd"}, "layers.0": {"weights": "ssd", "activations": "ssd"}}
    tiers = resolved(model, rules, WITH_SSD)
    assert asked(tiers, "embed") == (None, None, "ssd", None)
    assert asked(tiers, "layers.0") == ("ssd", None, "ssd", "ssd")
    assert asked(tiers, "layers.1.mlp.0") == ("cxl", None, "ssd", "cxl")
    tier(gradients="ssd")(model.embed)
    for given, rules in ((Model(), {"embed": {"gradients": "ssd"}}), (model, {})):
        with pytest.raises(UnsupportedError, match=r"'embed' asks for gradients on tier 'ssd'.*optimizer_state"):
            resolved(given, rules, WITH_SSD)


CXL_HOMES = {TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS}
STATE = (TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_WEIGHTS)


def placer(topology=TOPOLOGY, dram=8 << 30, **options) -> Placer:
    return Placer(topology, lambda: {"dram": dram, "cxl": 8 << 30}, **options)


@pytest.mark.parametrize("role", list(TensorRole))
def test_every_role_has_a_home_and_weights_are_near_the_cpu_that_computes(role):
    placement = placer().place(role, 1024)
    assert placement.tiers == (("cxl", "dram") if role in CXL_HOMES else ("dram", "cxl"))
    assert not placement.pinned and role.value in placement.reason
    of_cpu = placer(cpu_computes=True).place(role, 1024)
    assert of_cpu.tiers == (("cxl", "dram") if role is TensorRole.ACTIVATIONS else ("dram", "cxl"))


def test_explicit_tier_goes_first():
    placement = placer().place(TensorRole.MOMENTUM, 1024, tier="cxl", source="rule 'layers.*'")
    assert placement.describe() == "cxl, else dram (rule 'layers.*')"
    placement = placer().place(TensorRole.MOMENTUM, 1024, spec=TierSpec(optimizer_state="cxl"))
    assert placement.describe() == "cxl, else dram (tier(optimizer_state=cxl))"


def test_a_decision_is_placed_with_its_reason_and_leaves_the_rest_to_rules_and_homes():
    splits = {TensorRole.MOMENTUM: {"cxl": 0.75, "dram": 0.25}, TensorRole.COMPUTE_GRADS: {"cxl": 1.0}}
    decided = placer(splits=splits, reasons={TensorRole.MOMENTUM: "because"})
    split = Placement(("cxl", "dram"), False, "because", (0.75, 0.25))
    assert decided.place(TensorRole.MOMENTUM, 100) == split
    # a tier alone has the others to spill to
    assert decided.place(TensorRole.COMPUTE_GRADS, 100) == Placement(("cxl", "dram"))
    asked = decided.place(TensorRole.COMPUTE_GRADS, 100, tier="dram", source="rule 'x'")
    assert asked.tiers == ("dram", "cxl") and "rule 'x'" in asked.reason
    assert decided.place(TensorRole.ACTIVATIONS, 100).tiers == ("cxl", "dram")


def test_a_missing_tier_is_there_when_it_is_asked_for():
    topology = fake_topology(dram=("4GiB",), cxl=())
    with pytest.warns(MissingTierWarning) as caught:
        assert placer(topology).place(TensorRole.MOMENTUM, 1, tier="cxl").tiers == ("cxl", "dram")
        assert placer(topology).place(TensorRole.MOMENTUM, 1, tier="cxl").tiers == ("cxl", "dram")
    assert len(caught) == 1


@pytest.mark.parametrize("role", list(TensorRole))
def test_state_that_asks_for_the_tier_ssd_gets_nothing_else_whatever_was_decided_and_others_are_refused(role):
    decided = placer(WITH_SSD, splits={role: {"dram": 1.0}})
    if role in STATE:
        placement = decided.place(role, 1 << 50, tier="ssd", source="rule 'net.*'")
        assert placement == Placement(("ssd",), reason="rule 'net.*'")
        return
    with pytest.raises(UnsupportedError, match=f"tier.all=ssd. asks for {role.value} on tier 'ssd'.*Only optimizer"):
        decided.place(role, 1, tier="ssd", source="tier(all=ssd)")
