import pytest
import torch

from lightning_cxl import residency
from lightning_cxl.planning.policies import POLICIES
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

VOCAB, WIDTH, DEPTH = 64, 128, 5  # a million parameters
STEPS = 2
# what `CXLOffloadStrategy` is given
CASES = {
    "default policy": {},
    "all on the cards": {"tier_rules": {"*": "cxl"}},
    **{name: {"policy": name} for name in POLICIES},
}


class Located(Task):
    """Looks where everything is while it is alive: before backward, and before an optimizer step with state."""

    def __init__(self, model, recorder):
        super().__init__(model, scheduler=False)
        self.recorder = recorder
        self.looks = {}

    def _look(self, when):
        self.looks[when] = (self.recorder.check(self.trainer.strategy.host.topology), self.trainer.strategy.report())

    def on_before_backward(self, loss):
        if self.global_step == STEPS - 1:
            self._look("backward")

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == STEPS - 1:
            self._look("step")
            self._look_at_tensors(optimizer)

    def _look_at_tensors(self, optimizer):
        self.roles = {}
        for name, tensor, role in self._tensors(optimizer):
            assert self.recorder.role_at(tensor.data_ptr()).value == role, name
            tiers = self.roles.setdefault(role, {})
            for tier, nbytes in residency(tensor).items():
                tiers[tier] = tiers.get(tier, 0) + nbytes

    def _tensors(self, optimizer):
        """Yield (name, tensor, role) of all that there is at this moment."""
        for name, p in self.named_parameters():
            yield name, p, "compute_weights"
            if p.grad is not None:
                yield f"gradient of {name}", p.grad, "compute_grads"
            for key, value in optimizer.state[p].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield f"{key} of {name}", value, {"exp_avg": "momentum", "exp_avg_sq": "variance"}[key]


@pytest.mark.parametrize("name", CASES)
def test_everything_is_where_its_placement_says(name, recorder):
    model = TinyTransformer(VOCAB, WIDTH, DEPTH)
    model.unused.requires_grad_(False)  # its state would have memory, but show up only after its first gradient
    module = Located(model, recorder)
    data = token_data(STEPS, batch=2, length=64, vocab=VOCAB)
    make_trainer(offload(**CASES[name]), max_steps=STEPS).fit(module, data)
    assert len(module.losses) == STEPS and all(0 < loss < 10 for loss in module.losses)

    for when, (located, report) in module.looks.items():
        reported = {role: {t: n for t, n in tiers.items() if n} for role, tiers in report["roles"].items()}
        assert located == {role: tiers for role, tiers in reported.items() if tiers}, when
    assert module.looks["backward"][0]["activations"], "inputs of units were alive then"
    located, report = module.looks["step"]
    assert set(module.roles) == {"compute_weights", "compute_grads", "momentum", "variance"}
    for role, tiers in module.roles.items():
        assert tiers == located[role], "no buffer that is not a tensor's, and no tensor elsewhere"
        planned = report["planned_roles"][role]
        assert sum(tiers.values()) == sum(planned.values())
        # shares are kept in stripes, and this model is not many stripes large
        assert tiers == planned or (len(planned) > 1 and set(tiers) <= set(planned))
    if name == "all on the cards":
        assert all(set(tiers) == {"cxl"} for look, _ in module.looks.values() for tiers in look.values())
