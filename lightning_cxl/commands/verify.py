"""``python -m lightning_cxl verify``: trains a small copy of a model with and without offload, and compares bits.

The reference knows nothing of this package but the model: a loop of torch, with all weights on the device, whose
gradients are added up and whose optimizer steps on the CPU. Both note a checksum of every loss, gradient and
weight, in the order in which they come, and in a second run, if one differs, of every module's output: the first that
differs is the operation that is wrong.
"""

import argparse
import copy
import gc
import importlib.util
import inspect
import json
import random
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_cxl.commands import parsers
from lightning_cxl.devices import devices_apart
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.memory.hook import residency
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.parameter_state import plain
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.streaming.units import find_units
from lightning_cxl.text import format_bytes
from lightning_cxl.torch_private import tree_map
from lightning_cxl.weights.hf import model_on_meta, with_adapters

_STEPS, _RESUMED_AT = 4, 2
_SEED = 0
_OUTPUT = ": output of "
# relative, of losses with `CPUAdam`, which rounds square roots otherwise than torch; in 16 bits weights may then round
# to their other neighbours
_CLOSE, _CLOSE_IN_16_BITS = 1e-4, 1e-2
_LEAST = 1e-2  # of the largest loss: what smaller losses differ by is relative to this, as terms may cancel in them
_ADAM_ELEMENTS, _ADAM_ROUNDS = 1 << 24, 5

Noted = list[tuple[str, int]]  # what was computed, in words, and the checksum of its bits, in order


Verdict = Literal["ok", "WRONG", "skipped", "measured"]


class Check(NamedTuple):
    name: str
    verdict: Verdict
    detail: str


@dataclass
class Trained:
    noted: Noted = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state: Any = None  # weights and optimizer state after `_RESUMED_AT` steps
    pages: Check | None = None  # where they are at the end, and what the steps took
    metrics: dict[str, float] = field(default_factory=dict)
    notes_outputs: bool = False


class Script(NamedTuple):
    """What to train: what a file of the user defines, or the same for a model of transformers."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Any] | None = None


def script_of_transformers(options: argparse.Namespace) -> Script:
    """Return a script of the model with few blocks and little vocabulary, and random tokens to learn."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model_on_meta(options.model).config)
    text = config.get_text_config()
    for name, most in (("num_hidden_layers", options.blocks), ("vocab_size", 512)):
        setattr(text, name, min(getattr(text, name), most))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)

    def model() -> nn.Module:
        dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32
        made: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if options.lora is not None:
            made = with_adapters(made, {"r": options.lora, "target_modules": "all-linear"})
            for name, parameter in made.named_parameters():
                if "lora_B" in name:  # zeros, which hide what is wrong with the other adapters
                    nn.init.normal_(parameter, std=0.02)
        return made

    def batch(number: int) -> dict[str, Any]:
        tokens = torch.randint(text.vocab_size, (options.batch, options.seq))
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    return Script(model, batch)


def script_of_file(path: Path) -> Script:
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"--script: {path} is no Python file. {parsers.SCRIPT}")
    sys.path.insert(0, str(path.absolute().parent))  # as for `python FILE`, and so is what argparse of the file sees
    sys.argv = [str(path)]
    spec: Any = importlib.util.spec_from_file_location("lightning_cxl_script", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = {name: each for name, each in vars(module).items() if callable(each) and not name.startswith("_")}
    for name in [name for name, each in own.items() if isinstance(each, nn.Module)]:
        if name in ("model", "batch"):
            raise ConfigError(f"{path}: `{name}` is an nn.Module, and must be a function. {parsers.SCRIPT}")
        del own[name]
    if missing := " and ".join(f"{name}()" for name in ("model", "batch") if name not in own):
        there = ", ".join(own) or "no function"
        raise ConfigError(f"{path} does not define {missing}; it defines {there}. {parsers.SCRIPT}")
    return Script(own["model"], own["batch"], own.get("loss"))


def seed(number: int) -> None:
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(number)


class Job:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.mixed = options.precision == "bf16-mixed"
        self.dtype = {"bf16-true": torch.bfloat16, None: None}.get(options.precision, torch.float32)
        self.script = script_of_transformers(options) if options.script is None else script_of_file(options.script)
        model = self.make_model()
        self.units = [name for name, _ in find_units(model, options.units)]
        if not self.units:
            raise ConfigError(
                f"{type(model).__name__} has no list of blocks of one class to offload. Name its blocks by --units, as "
                f"module names or classes: {', '.join(sorted({type(each).__name__ for each in model.modules()}))}"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"no parameter of {type(model).__name__} has requires_grad: leave it on for one at least")
        dtypes = {p.dtype for p in model.parameters()}
        self.precision = options.precision or ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        self.close = _CLOSE_IN_16_BITS if self.mixed or min(each.itemsize for each in dtypes) < 4 else _CLOSE

    def make_model(self) -> Any:
        seed(_SEED)
        model: Any = self.script.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model() must return an nn.Module, got {model!r:.60}. {parsers.SCRIPT}")
        return model.train() if self.options.script is None else model.to(dtype=self.dtype)

    def numbers(self, step: int) -> range:
        count = self.options.accumulate_grad_batches
        return range(step * count, (step + 1) * count)

    def loss_of(self, model: Any, number: int, trained: Trained) -> Any:
        def placed(x: Any) -> Any:
            if isinstance(x, Mapping):  # that is no pytree, such as a BatchEncoding of transformers
                return type(x)(tree_map(placed, dict(x)))  # type: ignore[call-arg]
            if is_dataclass(x) and not isinstance(x, type):
                moved = copy.copy(x)  # not `replace`, which needs an __init__ with every field
                for each in fields(x):
                    object.__setattr__(moved, each.name, tree_map(placed, getattr(x, each.name)))
                return moved
            return x.to(self.device, self.dtype if x.is_floating_point() else None) if isinstance(x, Tensor) else x

        seed(number)  # of the batch, and of dropout
        batch = tree_map(placed, self.script.batch(number))
        notes = noting_outputs(model, f"micro-batch {number}{_OUTPUT}", trained.noted)
        with (
            notes if trained.notes_outputs else nullcontext(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed),
        ):
            if self.script.loss is not None:
                loss = self.script.loss(model, batch)
            elif hasattr(model, "training_step"):
                given = [batch]
                with suppress(TypeError):  # Lightning allows a training_step without `batch_idx`
                    given = [*inspect.signature(model.training_step).bind(batch, number).args]
                loss = model.training_step(*given)
            elif isinstance(batch, Mapping):
                loss = model(**batch)
            else:
                loss = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
            loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss must be one number that has a gradient, got {what}. {parsers.SCRIPT}")
        trained.losses.append(float(loss.detach()))
        trained.noted.append((f"micro-batch {number}: loss", checksum(loss)))
        return loss / self.options.accumulate_grad_batches


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)


@contextmanager
def noting_outputs(model: nn.Module, what: str, noted: Noted) -> Iterator[None]:
    """Note the output of every module that is one tensor, while the region lasts: not what a recompute repeats."""

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            noted.append((f"{what}`{name}`", checksum(output)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        yield


def widened(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))


def note_tensors(what: str, tensors: Mapping[str, Tensor], noted: Noted) -> None:
    noted += [(f"{what}`{name}`", checksum(tensor)) for name, tensor in reversed([*tensors.items()])]


def note_model(step: int, model: nn.Module, noted: Noted) -> None:
    note_tensors(f"step {step}: weight ", {name: p for name, p in model.named_parameters() if p.requires_grad}, noted)
    note_tensors(f"step {step}: buffer ", dict(model.named_buffers()), noted)


def by_torch(job: Job, trained: Trained, *, resumes: bool = False) -> Trained:
    """Train by torch: the model on the device; sums of gradients, clipping and AdamW in float32 on the CPU."""
    model = job.make_model().to(job.device)
    masters = {name: nn.Parameter(widened(p).clone()) for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
    for step in range(_STEPS):
        if resumes and step == _RESUMED_AT:  # in a new model
            saved, model = model.state_dict(), job.make_model().to(job.device)
            model.load_state_dict(saved)
        own = dict(model.named_parameters())
        for number in job.numbers(step):
            job.loss_of(model, number, trained).backward()
            for name, master in masters.items():
                if (grad := own[name].grad) is not None:
                    whole = widened(grad)
                    master.grad = whole if master.grad is None else master.grad + whole
                    own[name].grad = None
        found = {"the loss": torch.tensor(trained.losses, dtype=torch.float64)}
        found |= {f"the gradient of `{name}`": p.grad for name, p in reversed(masters.items()) if p.grad is not None}
        if what := next((what for what, each in found.items() if not each.isfinite().all()), None):
            raise ConfigError(f"{what} in step {step} is not finite without offload, too: scale the loss down")
        finish_step(job, step, masters, optimizer, trained)
        with torch.no_grad():
            for name, master in masters.items():
                own[name].copy_(master)
        note_model(step, model, trained.noted)
    return trained


def finish_step(
    job: Job, step: int, masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, trained: Trained
) -> None:
    # that of one backward may be kept in bfloat16, which is as exact
    grads = {name: widened(p.grad) for name, p in masters.items() if p.grad is not None}
    note_tensors(f"step {step}: gradient of ", grads, trained.noted)
    if job.options.clip:
        clip_grad_norm_(masters.values(), job.options.clip)
    optimizer.step()
    optimizer.zero_grad()


def by_us(job: Job, options: dict[str, Any], trained: Trained, *, state: Any = None) -> Trained:
    """Train with offload; with `state`, from `_RESUMED_AT` on."""
    session, model = Session(**options, units=job.options.units), job.make_model()
    accumulates = job.options.accumulate_grad_batches > 1
    with UserLoop(session, job.device, Loop(accumulates=accumulates, needs_whole_step="clipping")) as loop:
        given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        (optimizer,) = loop.prepare(model, [given])
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        for step in range(0 if state is None else _RESUMED_AT, _STEPS):
            if step == _RESUMED_AT:
                trained.state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            for number in job.numbers(step):
                with loop.backward(is_last=number == job.numbers(step)[-1]):
                    job.loss_of(model, number, trained).backward()
            holders = [p for group in optimizer.param_groups for p in plain(group["params"])]
            finish_step(job, step, dict(zip(names, holders, strict=True)), optimizer, trained)
            note_model(step, model, trained.noted)
        trained.metrics, trained.pages = session.metrics(), check_pages(session, model, optimizer)
    return trained


def first_difference(ours: Noted, theirs: Noted) -> str | None:
    for (name, value), (expected, reference) in zip(ours, theirs, strict=False):
        if name != expected:
            return f"{expected} was not computed; {name} was"
        if value != reference:
            return name
    return None if len(ours) == len(theirs) else f"{abs(len(ours) - len(theirs))} values at the end are missing"


def compared(name: str, train: Callable[[Trained], object], theirs: Noted) -> tuple[Check, Trained]:
    """Train, and compare gradients and weights; outputs, whose copies wait for the device, only if those differ."""
    trained = Trained()
    try:
        train(trained)
        different = first_difference(trained.noted, [each for each in theirs if _OUTPUT not in each[0]])
        if different is not None:
            train(watched := Trained(notes_outputs=True))
            different = first_difference(watched.noted, theirs) or f"{different}; not if outputs are noted"
    except Exception as error:  # of anything that is wrong
        return Check(name, "WRONG", repr(error).splitlines()[0]), trained
    if different is None:
        return Check(name, "ok", f"{len(trained.noted)} losses, gradients and weights have the same bits"), trained
    return Check(name, "WRONG", f"the first that differs: {different}"), trained


def since(step: int, noted: Noted, job: Job) -> Noted:
    first = f"micro-batch {job.numbers(step)[0]}:"
    return noted[next(i for i, (name, _) in enumerate(noted) if name.startswith(first)) :]


def check_pages(session: Session, model: Any, optimizer: Any) -> Check:
    """Ask the kernel where the optimizer's state is, and the weights of blocks, and compare with the plan."""
    assert session.run is not None
    planned = session.report(next(model.parameters()).device)["planned_roles"]
    session.run.wait_for_updates()
    state = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    tensors = {
        TensorRole.COMPUTE_WEIGHTS.value: [p.detach() for p in model.parameters() if p.device.type == "cpu"],
        TensorRole.MOMENTUM.value: [each for each in state if isinstance(each, Tensor) and each.dim() > 0],
    }
    num_bytes, wrong = 0, []
    for role, own in tensors.items():
        for tier, nbytes in (pair for each in own for pair in residency(each).items()):
            num_bytes += nbytes
            if tier not in planned.get(role, {tier: 0}):
                wrong.append(f"{format_bytes(nbytes)} of {role} on `{tier}`")
    name = "pages are where the plan has them"
    if wrong or not num_bytes:
        return Check(name, "WRONG", ", ".join(wrong[:3]) or "nothing was found to ask about")
    return Check(name, "ok", f"{format_bytes(num_bytes)}, asked from the kernel")


def measure_adam() -> Check:
    """Time `CPUAdam` beside torch's fused AdamW, in turn."""

    def stepper(kind: Callable[..., Any], **options: Any) -> Callable[[], float]:
        parameter = nn.Parameter(torch.zeros(_ADAM_ELEMENTS, dtype=torch.float32, device="cpu"))
        parameter.grad = torch.ones_like(parameter)
        optimizer = kind([parameter], lr=1e-3, **options)

        def step() -> float:
            begin = time.perf_counter()
            optimizer.step()
            return time.perf_counter() - begin

        step()
        return step

    ours, theirs = stepper(CPUAdam), stepper(torch.optim.AdamW, fused=True)
    times = [(ours(), theirs()) for _ in range(_ADAM_ROUNDS)]
    best, fused = (statistics.median(each) for each in zip(*times, strict=True))
    moved = 28 * _ADAM_ELEMENTS / best / 1e9
    return Check(
        "CPUAdam", "measured", f"{moved:.0f} GB/s of host memory; {fused / best:.2f}x as fast as torch's fused AdamW"
    )


def checks(job: Job) -> Iterator[Check]:
    reference, exact = by_torch(job, Trained(notes_outputs=True)), {"cpu_adam": False}
    again = by_torch(job, Trained(notes_outputs=True)) if job.options.script else reference
    if different := first_difference(again.noted, reference.noted):
        raise ConfigError(
            f"{job.options.script} does not train twice the same without offload, so there is nothing to compare. The "
            f"first that differs: {different}. model() must return a new model each time; a generator of your own must "
            "be seeded in batch(number) and model(); a device may need torch.use_deterministic_algorithms(True)"
        )
    stream = partial(by_us, job, {**exact, "stream_weights": True})
    check, streamed = compared("weights stream", stream, reference.noted)
    yield check
    if streamed.pages is not None:
        yield streamed.pages
    stay = partial(by_us, job, {**exact, "stream_weights": False})
    yield compared("weights stay on the device", stay, reference.noted)[0]
    if streamed.state is not None:
        resumed = partial(by_us, job, exact, state=streamed.state)
        check = compared("resumed in the middle", resumed, since(_RESUMED_AT, reference.noted, job))[0]
        if check.verdict == "WRONG":
            alone = compared(check.name, partial(by_torch, job, resumes=True), reference.noted)[0]
            if alone.verdict == "WRONG":
                why = f"a new model that loads the state_dict is not the same without offload, too; {alone.detail}"
                check = check._replace(verdict="skipped", detail=why)
        yield check

    adam = Trained()
    name = "CPUAdam, updates behind the training"
    try:
        by_us(job, {}, adam)
        least = _LEAST * max(map(abs, reference.losses)) or 1.0
        off = [abs(a - b) / max(abs(b), least) for a, b in zip(adam.losses, reference.losses, strict=True)]
        worst = float(torch.tensor(off).max())  # NaN if one is
        verdict: Verdict = "ok" if worst <= job.close else "WRONG"
        yield Check(name, verdict, f"losses differ by {worst:.1e} at most")
    except Exception as error:
        yield Check(name, "WRONG", repr(error).splitlines()[0])
    if not (metrics := adam.metrics):
        return
    hidden, stall = metrics.get("cxl/update_hidden_pct", 0.0), metrics.get("cxl/stall_update_s", 0.0)
    copied = "; ".join(f"{way} {metrics[f'cxl/{way}_GBps']:.2g} GB/s" for way in ("h2d", "d2h"))
    yield Check("overlap", "measured", f"{hidden:.0f} % of updates hidden, {stall:.3f} s of stall per step; {copied}")
    yield measure_adam()


def main(arguments: Sequence[str]) -> int:
    options = parsers.verify().parse_args(arguments)
    parsers.check_target(options.json)
    for name, default in parsers.OF_MODEL.items():
        given = getattr(options, name)
        if options.script is not None and given is not None:
            raise ConfigError(f"--{name} is of --model; with --script, the file says it: {parsers.SCRIPT}")
        setattr(options, name, default if given is None else given)
    for name in ("blocks", "batch", "seq", "accumulate_grad_batches"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    options.precision = options.precision or (None if options.script else "bf16-true")
    device = next((each.device for each in devices_apart()), torch.device("cpu"))
    name = str(options.script or options.model)
    found = []
    with redirect_stdout(sys.stderr if options.json == parsers.TO_STDOUT else sys.stdout):  # what a script prints, too
        job = Job(options, device)
        print(
            f"{name} with {len(job.units)} units (`{job.units[0]}` to `{job.units[-1]}`) on `{device}`, "
            f"{job.precision}, {_STEPS} steps of {options.accumulate_grad_batches} micro-batches; torch "
            f"{torch.__version__}",
            flush=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for check in checks(job):
                found.append(check)
                gc.collect()
                print(f"  {check.verdict:9} {check.name}: {check.detail}", flush=True)
        is_right = all(check.verdict != "WRONG" for check in found)
        skipped = sum(check.verdict == "skipped" for check in found)
        print(
            "something is WRONG: please report it with the output of --json"
            if not is_right
            else f"all that was compared is equal; {skipped} was skipped"
            if skipped
            else "all is equal"
        )
    if options.json is not None:
        data = {"model": name, "device": str(device), "torch": torch.__version__, "precision": job.precision}
        data |= {"is_right": is_right, "checks": [check._asdict() for check in found]}
        parsers.write_text(options.json, json.dumps(data, indent=1) + "\n")
    return 0 if is_right else 1
