"""Planned bytes against what the report of a real run says, role by role."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_cxl.config import OffloadConfig, SsdOptions
from lightning_cxl.gradients.offload import MAX_STAGED
from lightning_cxl.inventory.dry_run import measure
from lightning_cxl.inventory.plan import AskedTiers, list_tensors
from lightning_cxl.inventory.tensors import Mesh, Workload
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import TensorRole, resolve
from lightning_cxl.planning.decide import settle_gradients
from lightning_cxl.planning.job import Move, model_job
from tests.cases import every_value
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import make_trainer, offload
from tests.models import TinyTransformer, token_data

VOCAB, BATCH = 512, 2
WITH_SSD = Topology.fake(("1GiB",), ("1GiB",)).with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}


def llama(num_layers=3):
    return tiny_llama(num_layers, vocab_size=VOCAB, hidden_size=128, intermediate_size=384)


def measured_roles(precision, length, options, *, num_layers=3, accumulate=1):
    """Peak bytes by role of two steps of a real run on the CPU."""
    strategy = offload(**options)
    trainer = make_trainer(strategy, max_steps=2, precision=precision, accumulate_grad_batches=accumulate)
    trainer.fit(LlamaTask(llama(num_layers)), token_data(batch=BATCH, length=length, vocab=VOCAB))
    return {role: sum(tiers.values()) for role, tiers in strategy.report()["peak_roles"].items()}


def planned(precision="bf16-true", length=128, options=None, *, num_layers=3, tier_of=None, room=math.inf, **load):
    """Return the job of a Llama, by default on a device apart."""
    model = llama(num_layers).to("meta", PRECISIONS[precision])
    config = OffloadConfig(**options or {})
    load = Workload(
        batch=BATCH, sequence=length, mixed=precision == "bf16-mixed",
        updates_in_backward=config.on_overflow == "ignore", **load,
    )  # fmt: skip
    ids = torch.zeros(BATCH, length, dtype=torch.long, device="meta")
    seen = measure(model, config, load, lambda: model(input_ids=ids, labels=ids, use_cache=True).loss)
    asked = None
    if tier_of is not None:
        asked = SimpleNamespace(names={}, lookup=lambda owner, role, **_: (tier_of(owner, role), ""))
    found = list_tensors(model, None, config, load, asked=asked, measured=seen)
    return model_job("llama", settle_gradients(found, room))


def job_of(model, load, compute_loss):
    measured = measure(model, OffloadConfig(), load, compute_loss)
    return model_job("of a test", list_tensors(model, None, OffloadConfig(), load, measured=measured))


def roles_of(job):
    return {role.value: nbytes for role, nbytes in job.bytes_of().items()}


LENGTHS = (64, 128, 320)  # in bfloat16, inputs of 64 tokens are too small to be stored
KINDS = [
    ("32-true", {}),
    ("bf16-true", {}),
    ("bf16-true", {"state": "bf16", "stream_weights": True}),
    ("bf16-true", {"state": "8bit"}),
    ("bf16-true", {"master": "fp32", "stream_weights": True}),
    ("bf16-mixed", {"stream_weights": True, "overlap_step": True}),
    ("32-true", {"activation_offload": False}),
]


@pytest.mark.parametrize(("kind", "length"), every_value(KINDS, LENGTHS))
def test_every_role_is_within_3_percent_of_a_real_run(kind, length):
    precision, options = kind
    plan = planned(precision, length, options, computes_on_host=True)
    assert not plan.notes
    roles, real = roles_of(plan), measured_roles(precision, length, options)
    assert roles.keys() == real.keys()
    for role, nbytes in real.items():
        assert roles[role] == pytest.approx(nbytes, rel=0.03), role


@pytest.mark.parametrize("options", [{}, {"accumulate": "bf16"}], ids=["fp32 sums", "bf16 sums"])
def test_sums_of_several_micro_batches(options):
    roles = roles_of(planned(options=options, num_micro_batches=3, computes_on_host=True))
    real = measured_roles("bf16-true", 128, options, accumulate=3)
    assert roles == pytest.approx(real, rel=0.03)
    # while a sum becomes float32, the gradient that it starts with is there, too
    widened = 0 if options else VOCAB * 128 * 2
    assert roles["compute_grads"] == roles["compute_weights"] * (1 if options else 2) + widened


def test_updates_behind_the_backward_plan_gradients_of_four_units_where_all_have_no_room():
    options = {"stream_weights": True, "overlap_step": True, "on_overflow": "ignore"}

    def of(room):
        return planned(options=options, num_layers=12, room=room, computes_on_host=True)

    everything = of(math.inf)
    nbytes = sum(roles_of(everything).values())
    plan = of(nbytes - 1)
    assert of(nbytes) == everything
    assert plan.overlap == "backward" and everything.overlap == "both"
    block = sum(parameter.nbytes for parameter in llama(1).bfloat16().model.layers[0].parameters())
    assert roles_of(everything)["compute_grads"] - roles_of(plan)["compute_grads"] == 8 * block


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


def test_staging_is_for_a_few_units_or_other_parameters_at_a_time():
    plan = planned(num_layers=8, num_micro_batches=2)
    model = llama(8).bfloat16().model
    units = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    sizes = sorted([*units, model.embed_tokens.weight.nbytes, model.embed_tokens.weight.nbytes], reverse=True)
    assert roles_of(plan)["staging"] == sum(sizes[:MAX_STAGED])
    assert plan.device_parts["gradients on their way to the host"] == sum(sizes[:2])


def test_without_streaming_everything_is_on_the_device_and_copied_masters_are_on_the_host():
    roles = roles_of(planned(options={"stream_weights": False}))
    total = sum(p.nbytes for p in llama().bfloat16().parameters())
    assert "compute_weights" not in roles
    assert roles["master_weights"] == 2 * total
    assert roles["master_grads"] == total


def test_decorated_modules_are_classes_of_their_own_and_no_byte_is_lost():
    def tier_of(owner, role):
        on_card = owner == "model.layers.0" if isinstance(owner, str) else owner.dim() == 1
        return "cxl0" if on_card else None

    where = {"options": {"stream_weights": True}, "computes_on_host": True}
    plain, ruled = planned(**where), planned(**where, tier_of=tier_of)
    assert ruled.bytes_of() == plain.bytes_of()
    fixed = {each.role: each for each in ruled.classes if each.tier == "cxl0"}
    assert fixed[TensorRole.ACTIVATIONS].nbytes == 128 * 2 * 128 * 2
    norms = sum(p.nbytes for p in llama().bfloat16().parameters() if p.dim() == 1)
    assert fixed[TensorRole.COMPUTE_GRADS].nbytes == norms

    def moved(job):
        totals: dict = {}
        for each in job.classes:
            for phase, kind, nbytes in each.moves:
                key = each.role, phase, kind
                totals[key] = totals.get(key, 0) + nbytes
        return totals

    assert moved(ruled) == pytest.approx(moved(plain))


def test_tied_weights_count_once_and_frozen_ones_have_no_state():
    model = TinyTransformer(tied=True, width=64).to("meta")
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    tokens = torch.zeros(2, 12, dtype=torch.long, device="meta")
    load = Workload(batch=2, sequence=12, computes_on_host=True)
    bytes_of = job_of(model, load, lambda: model(tokens).sum()).bytes_of()
    distinct = sum(p.nbytes for p in model.parameters())
    frozen = sum(p.nbytes for p in model.blocks[0].parameters())
    assert bytes_of[TensorRole.COMPUTE_WEIGHTS] == distinct
    assert bytes_of[TensorRole.MOMENTUM] == bytes_of[TensorRole.COMPUTE_GRADS] == distinct - frozen


def test_a_model_that_looks_at_values_is_estimated_with_a_note():
    class Looks(TinyTransformer):
        def forward(self, tokens):
            return super().forward(tokens) * (2 if tokens.sum() > 0 else 1)

    model = Looks(width=64).to("meta")
    tokens = torch.zeros(2, 100, dtype=torch.long, device="meta")
    load = Workload(batch=2, sequence=100, computes_on_host=True)
    plan = job_of(model, load, lambda: model(tokens).sum())
    assert "cannot be run without values" in plan.notes[0]
    assert plan.bytes_of()[TensorRole.ACTIVATIONS] == 3 * 2 * 100 * 64 * 4
    assert plan.device_bytes is None


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_every_gradient_is_copied_once(num_micro_batches, master):
    model = llama().to("meta", torch.bfloat16)
    load = Workload(batch=BATCH, sequence=128, num_micro_batches=num_micro_batches)
    job = model_job("llama", list_tensors(model, None, OffloadConfig(master=master), load))
    grads = (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS, TensorRole.STAGING)
    assert {TensorRole.MASTER_GRADS, *([TensorRole.COMPUTE_GRADS] * (master == "split"))} <= {*job.bytes_of()}
    copied = sum(m.nbytes for each in job.classes if each.role in grads for m in each.moves if m.kind == "d2h")
    assert copied == num_micro_batches * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("count", [1, 4])
def test_inputs_on_the_tier_ssd_are_written_and_read_once_in_every_micro_batch_of_every_device(count):
    model = llama().to("meta")
    names = resolve(model.named_modules(), {"model.layers.[01]": {"activations": "ssd"}}, WITH_SSD)
    load = Workload(batch=BATCH, sequence=128, mesh=Mesh(num_devices=count), num_micro_batches=3)
    inventory = list_tensors(model, None, OffloadConfig(), load, asked=AskedTiers(model, names))
    job = model_job("llama", inventory)
    nbytes = sum(each.nbytes for each in inventory.tensors if each.tier == "ssd")
    assert nbytes == 2 * BATCH * 128 * model.config.hidden_size * 4
    assert job.ssd_bytes() == count * nbytes
    assert job.moved_bytes("ssd_write") == job.moved_bytes("ssd_read") == 3 * count * nbytes
    assert job.num_records == 0


def test_moves_of_weights_and_moments():
    """Weights are read for forward and recompute, in every micro-batch; the update reads and writes all."""
    model = llama().to("meta", torch.bfloat16)
    load = Workload(batch=BATCH, sequence=128, num_micro_batches=3)
    job = model_job("llama", list_tensors(model, None, OffloadConfig(stream_weights=True), load))
    classes = {each.role: each for each in job.classes}
    weights, momentum = classes[TensorRole.COMPUTE_WEIGHTS], classes[TensorRole.MOMENTUM]
    assert weights.moves == (
        Move("forward", "h2d", 3 * weights.nbytes),
        Move("backward", "h2d", 3 * weights.nbytes),
        Move("update", "cpu", 2 * weights.nbytes),
    )
    assert momentum.moves == (Move("update", "cpu", 2 * momentum.nbytes),)


@pytest.mark.parametrize("replicates", [True, False])
def test_shards_that_machines_have_reduced_are_on_the_device_until_the_backward_ends(replicates):
    mesh = Mesh(num_devices=4, num_machines=2, replicates=replicates)
    kept = planned(num_layers=8, mesh=mesh).device_parts.get("gradients that machines have reduced", 0)
    every_shard = sum(p.nbytes for p in llama(8).bfloat16().parameters()) / 4
    assert kept == pytest.approx(every_shard if replicates else 0, rel=0.01)
