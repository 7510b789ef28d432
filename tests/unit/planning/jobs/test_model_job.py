import math

import pytest
import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.dry_run import measure
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.decide import settle_gradients
from lightning_cxl.planning.job import model_job
from tests.cases import every_value
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import make_trainer, offload
from tests.models import TinyTransformer, token_data

VOCAB, BATCH = 512, 2
PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}


def llama():
    return tiny_llama(3, vocab_size=VOCAB, hidden_size=128, intermediate_size=384)


def measured_roles(precision, length, options, accumulate):
    strategy = offload(**options)
    trainer = make_trainer(strategy, max_steps=2, precision=precision, accumulate_grad_batches=accumulate)
    trainer.fit(LlamaTask(llama()), token_data(batch=BATCH, length=length, vocab=VOCAB))
    return {role: sum(tiers.values()) for role, tiers in strategy.report()["peak_roles"].items()}


def planned(precision="bf16-true", length=128, options=None, **load):
    model = llama().to("meta", PRECISIONS[precision])
    config = OffloadConfig(**options or {})
    load = Workload(
        batch=BATCH, sequence=length, mixed=precision == "bf16-mixed",
        updates_in_backward=config.on_overflow == "ignore", **load,
    )  # fmt: skip
    ids = torch.zeros(BATCH, length, dtype=torch.long, device="meta")
    seen = measure(model, config, load, lambda: model(input_ids=ids, labels=ids, use_cache=True).loss)
    return model_job("llama", settle_gradients(list_tensors(model, None, config, load, measured=seen), math.inf))


def roles_of(job):
    return {role.value: nbytes for role, nbytes in job.bytes_of().items()}


LENGTHS = (64, 128, 320)  # in bfloat16, inputs of 64 tokens are too small to be stored
KINDS = [
    ("32-true", {}, 1),
    ("bf16-true", {}, 3),
    ("bf16-true", {"accumulate": "bf16"}, 3),
    ("bf16-true", {"state": "bf16", "stream_weights": True}, 1),
    ("bf16-true", {"state": "8bit"}, 1),
    ("bf16-true", {"master": "fp32", "stream_weights": True}, 1),
    ("bf16-mixed", {"stream_weights": True, "overlap_step": True}, 1),
    ("32-true", {"activation_offload": False}, 1),
]


@pytest.mark.parametrize(("kind", "length"), every_value(KINDS, LENGTHS))
def test_every_role_is_within_3_percent_of_a_real_run(kind, length):
    precision, options, accumulate = kind
    plan = planned(precision, length, options, computes_on_host=True, num_micro_batches=accumulate)
    assert not plan.notes
    roles, real = roles_of(plan), measured_roles(precision, length, options, accumulate)
    assert roles.keys() == real.keys()
    for role, nbytes in real.items():
        assert roles[role] == pytest.approx(nbytes, rel=0.03), role


def test_a_device_apart_keeps_what_does_not_stream_and_its_masters_are_on_the_host():
    plan = planned()
    roles = roles_of(plan)
    model = llama().bfloat16()
    in_units = sum(p.nbytes for p in model.model.layers.parameters())
    rest = sum(p.nbytes for p in model.parameters()) - in_units
    assert roles["compute_weights"] == roles["compute_grads"] == in_units
    assert roles["master_grads"] == rest
    assert roles["master_weights"] == in_units + 2 * rest  # lower halves of all, upper halves of what is not here
    assert "staging" not in roles  # the only gradient of a step lands where it stays
    parts = plan.device_parts
    assert parts["weights that stay on the device"] == pytest.approx(rest, rel=0.01)  # and rotary frequencies
    assert parts["3 slots for weights that stream"] == in_units
    assert plan.device_bytes == sum(parts.values())
    assert plan.overlap == "forward"


def test_tied_weights_count_once_and_frozen_ones_have_no_state():
    model = TinyTransformer(tied=True, width=64).to("meta")
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    tokens = torch.zeros(2, 12, dtype=torch.long, device="meta")
    load = Workload(batch=2, sequence=12, computes_on_host=True)
    measured = measure(model, OffloadConfig(), load, lambda: model(tokens).sum())
    bytes_of = model_job("tied", list_tensors(model, None, OffloadConfig(), load, measured=measured)).bytes_of()
    distinct = sum(p.nbytes for p in model.parameters())
    frozen = sum(p.nbytes for p in model.blocks[0].parameters())
    assert bytes_of[TensorRole.COMPUTE_WEIGHTS] == distinct
    assert bytes_of[TensorRole.MOMENTUM] == bytes_of[TensorRole.COMPUTE_GRADS] == distinct - frozen
