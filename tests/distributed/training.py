"""One job that ranks train together: by FSDP2 alone, with us, or by one process; on the CPU with gloo."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import lightning_cxl
from lightning_cxl.errors import LightningCXLError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.session import Session, cut_for
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import cut, root_of
from lightning_cxl.sharding.processes import gather_on_machine
from lightning_cxl.streaming.quantised import kept_whole
from lightning_cxl.streaming.units import find_units
from tests import training_device
from tests.integration.quantised import quantise
from tests.models import TINY_LLAMA, TinyTransformer

LIMIT = 1e-6


def device() -> torch.device:
    return training_device.current


@dataclass(frozen=True)
class Job:
    """What is trained, the same for all contenders."""

    model: str = "llama"
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the llama, where they are not those of `TINY_LLAMA`."""
    tied: bool = True
    twice: bool = False
    """The transformer runs its first block again at the end, and each of its runs once more in the backward."""
    scalars: bool = False
    """The transformer has parameters without dimensions."""
    lora: bool = False
    quantised: str = ""
    """How the frozen linear layers of the llama are quantised: a key of `tests.integration.quantised.KINDS`."""
    folder: str = ""
    """Of the llama's files, which are quantised to 4 bit while they load in float32."""
    frozen: tuple[str, ...] = ()
    steps: int = 4
    micro_batches: int = 1
    no_sync: bool = False
    """Only the last micro-batch of a step reduces gradients."""
    clip: float | None = None
    optimizer: str = "AdamW"
    bf16: bool = False
    replicas: int = 1
    """Parts of the mesh that have the same shards."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `OffloadConfig`."""
    seeds: bool = False
    """Every rank makes its model with a seed of its own."""


@dataclass(frozen=True)
class Trained:
    """What came out, on one rank."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Whole."""
    norms: list[float]
    report: dict[str, Any] | None = None
    """Of the session, with us."""


def make_model(job: Job) -> nn.Module:
    """Return the model of a job with the weights it begins with."""
    torch.manual_seed(place()[0] if job.seeds else 0)
    model: nn.Module
    if job.folder:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        given = {"dtype": torch.float32, "quantization_config": how}
        model = lightning_cxl.from_pretrained(AutoModelForCausalLM, job.folder, **given).train()
    elif job.model == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **job.sizes}, tie_word_embeddings=job.tied))
    else:
        model = TinyTransformer(dropout=0.0, tied=job.tied, scalars=job.scalars, twice=job.twice)
        if job.twice:
            first = model.blocks[0].forward
            model.blocks[0].forward = lambda x, scale: checkpoint(partial(first, scale=scale), x, use_reentrant=True)
    if job.quantised:
        quantise(model, job.quantised)
    if job.lora:
        import peft

        targets = ["q_proj", "v_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    for name, parameter in model.named_parameters():
        if any(part in name for part in job.frozen):
            parameter.requires_grad_(False)
    return model


def batches(job: Job, rank: int, world: int) -> Iterator[list[torch.Tensor]]:
    """Yield the micro-batches of each step: this rank's rows of those that one process would get."""
    generator = torch.Generator().manual_seed(1)
    vocab = 37 if job.model != "llama" else TINY_LLAMA["vocab_size"]
    for _ in range(job.steps):
        whole = [torch.randint(0, vocab, (4, 16), generator=generator) for _ in range(job.micro_batches)]
        yield [each.chunk(world)[rank] for each in whole]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(getattr(model, "module", model), TinyTransformer):  # Fabric wraps it
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def mesh_of(job: Job, world: int) -> DeviceMesh:
    if job.replicas == 1:
        return init_device_mesh(device().type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device().type, (job.replicas, world // job.replicas), mesh_dim_names=("replicate", "shard"))


def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    options = {
        # eps: gradients that are nothing but rounding, as of the biases of keys, must not be divided by their size
        "AdamW": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5, "foreach": False},
        "SGD": {"lr": 0.1, "momentum": 0.9, "foreach": False},
        "Muon": {"lr": 1e-3},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: torch.optim.Optimizer = getattr(torch.optim, job.optimizer)(trained, **options[job.optimizer])
    return made


def by_fsdp(job: Job) -> Trained:
    """Train by FSDP2 alone; for bfloat16 with float32 shards, as our split master weights are."""
    model = make_model(job).to(device())
    policy = MixedPrecisionPolicy()
    if job.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = model.to(torch.bfloat16).float()
    mesh, root, whole = mesh_of(job, place()[1]), root_of(model), set(kept_whole(model).values())
    for _, unit in find_units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=whole)
    fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=whole)
    return _train(job, model, make_optimizer(job, model))


def cut_model(model: nn.Module, job: Job | None = None, *, units: bool = True) -> Session:
    """Cut a model over all ranks, as a session does, or without `units` as a whole; return the session."""
    session = Session()
    mesh = mesh_of(job or Job(), place()[1])
    cut(model, find_units(model) if units else [], mesh, session.host_on(device()).engine)
    return session


def error_of(act: Callable[[], Any]) -> str:
    """Return the type and the text of an error of ours; nothing where there is none."""
    try:
        act()
    except LightningCXLError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Training:
    """A job that is trained with us, in a loop of the user's own."""

    def __init__(self, job: Job, **habits: Any) -> None:
        self.job, self.model, self.session = job, make_model(job), Session(**job.options)
        self.rank, self.world = place()
        if job.bf16:
            self.model = self.model.to(torch.bfloat16)
        if self.world > 1:
            if "ssd" in job.options.get("tiers", {}):
                machine = partial(gather_on_machine, machine=0)
                self.session.bind(self.rank, self.world, self.rank, self.world, device(), machine)
            cut_for(self.session, self.model, mesh_of(job, self.world), device())
        self.loop = UserLoop(self.session, device(), Loop(accumulates=job.micro_batches > 1, **habits))
        try:
            (self.optimizer,) = self.loop.prepare(self.model, [make_optimizer(job, self.model)])
        except BaseException:
            self.loop.close()
            raise

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.close()

    def steps(self, begin: int, end: int) -> list[float]:
        """Train from one step to another; return the losses of this rank."""
        losses = []
        for step in list(batches(self.job, self.rank, self.world))[begin:end]:
            for tokens in step:
                loss = loss_of(self.model, tokens.to(device())) / len(step)
                with self.loop.backward():
                    loss.backward()
                losses.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def first(self) -> torch.Tensor:
        """Return this rank's tokens of the first micro-batch."""
        return next(batches(self.job, self.rank, self.world))[0].to(device())

    def whole(self) -> dict[str, torch.Tensor]:
        return whole_weights(self.model)


def by_us(job: Job) -> Trained:
    with Training(job) as ours:
        return _train(job, ours.model, ours.optimizer, ours.loop)


def by_one(job: Job) -> Trained:
    """Train by one process, with all rows of each micro-batch, without us."""
    model = make_model(job)
    if job.bf16:
        model = model.to(torch.bfloat16)
    return _train(job, model, make_optimizer(job, model))


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loop: UserLoop | None = None) -> Trained:
    losses, norms = [], []
    for step in batches(job, *place()):
        for index, tokens in enumerate(step):
            tokens = tokens.to(device())
            for cut_module in (each for each in model.modules() if job.no_sync and isinstance(each, FSDPModule)):
                cut_module.set_requires_gradient_sync(index == job.micro_batches - 1)
            loss = loss_of(model, tokens) / job.micro_batches
            with contextlib.nullcontext() if loop is None else loop.backward():
                loss.backward()
            losses.append(mean(loss.detach().float()))
        if job.clip is not None:
            holders = [p for group in optimizer.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(holders, job.clip)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, whole_weights(model), norms, None if loop is None else loop.session.report(device()))


def mean(value: torch.Tensor) -> float:
    if dist.is_initialized():
        value = value.cpu()
        dist.all_reduce(value)
    return float(value) / place()[1]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def difference(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of the same weights of two models."""
    assert weights.keys() == others.keys()
    return max((a.double() - others[name].double()).abs().max().item() for name, a in weights.items() if a.numel())


def assert_near(one: Trained, other: Trained, losses: float = LIMIT, weights: float = LIMIT) -> None:
    assert one.losses == pytest.approx(other.losses, rel=0, abs=losses)
    assert difference(one.weights, other.weights) <= weights


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def assert_same(found: list[Trained], wanted: list[Trained]) -> None:
    """Compare what ranks have trained, bit for bit."""
    for mine, other in zip(found, wanted, strict=True):
        assert mine.losses == other.losses and mine.norms == other.norms
        assert_same_weights(mine.weights, other.weights)


def assert_close(one: dict[str, Any], other: dict[str, Any], limit: float = LIMIT) -> None:
    """Compare losses and weights of two runs of a front end."""
    assert one["losses"] == pytest.approx(other["losses"], rel=limit)
    assert difference(one["weights"], other["weights"]) <= limit


def assert_identical(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare losses and weights of two runs of a front end, bit for bit."""
    assert one["losses"] == other["losses"]
    assert_same_weights(one["weights"], other["weights"])


def trained_as_by_fsdp(ranks: Any, job: Job, world: int = 2, kind: str = "cpu") -> list[Trained]:
    """Train with us on some ranks, as FSDP2 alone does there and, on the CPU, one process; return what came out."""
    pair = ranks.of(world, kind)
    ours, alone = pair.run(by_us, job), pair.run(by_fsdp, job)
    for mine, theirs in zip(ours, alone, strict=True):
        if job.bf16:
            assert mine.losses == theirs.losses
            continue
        assert_near(mine, theirs)
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)
    if kind == "cpu" and job.bf16:  # FSDP2 alone has float32 shards
        for name, weights in ours[0].weights.items():
            reference = alone[0].weights[name]
            excess = ((weights.float() - reference).abs() - reference.abs() * 2**-8).max().item()  # of one rounding
            assert excess <= 1e-9, (name, excess)
    elif kind == "cpu":
        assert_near(ours[0], by_one(job), weights=5 * LIMIT)
    return ours
