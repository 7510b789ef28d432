from pathlib import Path

import pytest
from torch import nn

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError, TierNotFoundError, UnsupportedError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import TensorRole, resolve, tier

TOPOLOGY = Topology.fake(("1GiB",), ("1GiB",))
WEIGHTS, ACTIVATIONS, MOMENTUM = TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS, TensorRole.MOMENTUM
GRADIENTS = TensorRole.COMPUTE_GRADS


@tier(weights="cxl", activations="cxl")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 1), nn.ReLU())


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


def test_class_decorator_reaches_what_the_module_contains():
    tiers = resolved(Model())
    assert tiers.lookup("layers.1", WEIGHTS) == ("cxl", "decorator on class Block")
    assert tiers.lookup("layers.1.mlp.0", WEIGHTS) == ("cxl", "decorator on class Block")
    assert tiers.lookup("layers.1.mlp.0", MOMENTUM) == (None, "")
    assert tiers.lookup("lm_head", WEIGHTS) == (None, "")


def test_nearest_decorated_class_wins_for_each_field():
    @tier(weights="dram", optimizer_state="dram")
    class Inner(nn.Linear):
        pass

    model = Model()
    model.layers[0].mlp[0] = Inner(1, 1)
    tiers = resolved(model)
    assert asked(tiers, "layers.0.mlp.0") == ("dram", None, "dram", "cxl")


def test_rule_beats_class_and_instance_beats_rule():
    model = Model()
    tier(weights="cxl")(model.layers[0])
    tiers = resolved(model, {"layers.*": {"weights": "dram"}})
    assert tiers.lookup("layers.1", WEIGHTS) == ("dram", "rule 'layers.*'")
    assert tiers.lookup("layers.0.mlp.0", WEIGHTS) == ("cxl", "tier(...) on 'layers.0'")
    assert tiers.lookup("layers.1", ACTIVATIONS)[0] == "cxl"


def test_nearest_instance_wins():
    model = Model()
    tier("dram")(model)
    tier(weights="cxl")(model.lm_head)
    tiers = resolved(model)
    assert tiers.lookup("lm_head", WEIGHTS)[0] == "cxl"
    assert tiers.lookup("lm_head", MOMENTUM) == ("dram", "tier(...) on the whole Model")
    assert tiers.lookup("embed", WEIGHTS)[0] == "dram"


def test_last_matching_rule_wins_for_each_field():
    tiers = resolved(Model(), {"*": "dram", "layers.0": {"activations": "cxl"}, "layers.*": {"gradients": "cxl"}})
    assert asked(tiers, "layers.0.mlp") == ("dram", "cxl", "dram", "cxl")
    assert asked(tiers, "embed") == ("dram", "dram", "dram", "dram")
    tiers = resolved(Model(), {"layers.0": {"activations": "cxl"}, "*": "dram"})
    assert asked(tiers, "layers.0.mlp") == ("dram", "dram", "dram", "dram")


def test_module_added_later_answers_as_its_parent():
    tiers = resolved(Model(), {"lm_head": "cxl"})
    assert tiers.lookup("lm_head.adapter.down", WEIGHTS) == ("cxl", "rule 'lm_head'")
    assert tiers.lookup("elsewhere", WEIGHTS) == (None, "")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layer.*": "cxl"}, r"'layer\.\*' matches no module\. Closest: 'layers"),
        ({"qqq": "cxl"}, r"'qqq' matches no module\. The model has: 'embed', 'layers', 'lm_head'"),
        ({"embed": {"weight": "cxl"}}, "unknown field 'weight'; use weights, gradients, optimizer_state, activations"),
    ],
)
def test_bad_rules(rules, message):
    with pytest.raises(ConfigError, match=message):
        resolved(Model(), rules)


def test_rule_with_an_unknown_tier():
    with pytest.raises(TierNotFoundError, match=r"tier_rules: 'embed' asks for gradients on tier 'hbm'.*'dram', 'cxl'"):
        resolved(Model(), {"embed": {"gradients": "hbm"}})


def test_decorators_with_an_unknown_tier():
    model = Model()
    tier(weights="hbm")(model.embed)
    with pytest.raises(TierNotFoundError, match=r"tier\(\.\.\.\) on 'embed' asks for weights on tier 'hbm'"):
        resolved(model)
    cxl_less = Topology(Topology.fake().tiers[:1])
    with pytest.raises(TierNotFoundError, match="the decorator on class Block asks for weights on tier 'cxl'"):
        resolved(Model(), topology=cxl_less)


WITH_SSD = TOPOLOGY.with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))


def test_rules_and_decorators_put_state_on_the_tier_ssd():
    model = Model()
    tier(optimizer_state="ssd")(model.embed)
    rules = {"layers.*": {"optimizer_state": "ssd"}, "layers.0": {"weights": "ssd", "activations": "ssd"}}
    tiers = resolved(model, rules, WITH_SSD)
    assert asked(tiers, "embed") == (None, None, "ssd", None)
    assert asked(tiers, "layers.0") == ("ssd", None, "ssd", "ssd")
    assert asked(tiers, "layers.1.mlp.0") == ("cxl", None, "ssd", "cxl")


def test_gradients_cannot_lie_on_the_tier_ssd_yet():
    with pytest.raises(
        UnsupportedError, match=r"tier_rules: 'embed' asks for gradients on tier 'ssd'.*optimizer_state"
    ):
        resolved(Model(), {"embed": {"gradients": "ssd"}}, WITH_SSD)
    marked = Model()
    tier(gradients="ssd")(marked.embed)
    with pytest.raises(UnsupportedError, match=r"tier\(...\) on 'embed' asks for gradients on tier 'ssd'"):
        resolved(marked, {}, WITH_SSD)
