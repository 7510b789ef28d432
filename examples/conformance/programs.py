"""Training programs that an offload can break, and the models which they train; nothing here knows any library.

A program gets a `Run` of one contender, and a folder. It trains, and returns what the user sees: losses, norms, weights
that it read. Programs with two parts run each part in a process of its own.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

VOCABULARY, DEPTH, BATCH, LENGTH = 37, 6, 4, 16
ADAM = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1}


class Run(Protocol):
    """One model in training, as one library offloads it."""

    model: Callable[..., Any]
    """What the user calls."""
    module: nn.Module
    """The user's module, as it is after the library prepared it."""
    optimizer: Any

    def backward(self, loss: torch.Tensor, *, last: bool = True, **options: Any) -> None:
        """Let gradients be added, with options of torch; `last`: a step follows."""

    def clip(self, *, norm: float | None = None, value: float | None = None) -> torch.Tensor | None: ...

    def step(self) -> None:
        """Update, and clear gradients."""

    def touch(self) -> contextlib.AbstractContextManager[Any]:
        """Where the library wants the user to say so: he reads and writes parameters inside."""

    def weights(self) -> dict[str, torch.Tensor]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.0, *, batch_norm: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH) if batch_norm else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for index in {int(y.detach().sum().abs() * 100) % len(self.experts)} if self.experts else ():
            y = y + self.experts[index](y)  # the other experts get no gradient
        return x + self.dropout(self.down(nn.functional.silu(self.up(y))))


class Net(nn.Module):
    """Tokens to logits by six blocks."""

    def __init__(
        self, kind: type[Block] = Block, *, width: int = 32, tied: bool = False, twice: bool = False, frozen: int = 0,
        **block: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(kind(width, **block) for _ in range(DEPTH))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.twice = twice
        for each in self.blocks[:frozen]:
            each.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.twice:
            x = self.blocks[0](x)
        return self.head(x)


class Collecting(Block):
    """Takes a dictionary, appends to a list that it is given, and returns another dictionary."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        x = super().forward(state["x"])
        state["seen"].append(x.mean())
        return {"x": x, "seen": state["seen"]}


class Containers(Net):
    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        state = {"x": self.embed(tokens), "seen": []}
        for block in self.blocks:
            state = block(state)
        return {"logits": self.head(state["x"]), "seen": torch.stack(state["seen"])}


# -- programs ----------------------------------------------------------------------------------------------------------

Seen = list[torch.Tensor]


class Program(NamedTuple):
    name: str
    parts: tuple[Callable[[Run, Path], Seen], ...]
    model: Callable[[], nn.Module]
    settings: dict[str, Any]
    """`clip_norm` and `groups`, which some libraries want to know before; `lives`: how often it runs in one process."""


PROGRAMS: list[Program] = []


def program(name: str, model: Callable[[], nn.Module] = Net, **settings: Any) -> Callable[..., Any]:
    def add(*parts: Callable[[Run, Path], Seen]) -> None:
        PROGRAMS.append(Program(name, parts, model, settings))

    return add


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(run: Run, step: int) -> torch.Tensor:
    batch = tokens(step)
    return nn.functional.cross_entropy(run.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(run: Run, steps: range) -> Seen:
    seen = []
    for step in steps:
        loss = loss_of(run, step)
        run.backward(loss)
        run.step()
        seen.append(loss.detach())
    return seen


@program("four steps of AdamW")
def _(run: Run, _: Path) -> Seen:
    return train(run, range(4))


def accumulated(run: Run, counts: tuple[int, ...]) -> Seen:
    seen, drawn = [], 0
    for count in counts:
        for index in range(count):
            loss = loss_of(run, drawn) / count
            run.backward(loss, last=index + 1 == count)
            seen.append(loss.detach())
            drawn += 1
        run.step()
    return seen


@program("gradients of four micro-batches")
def _(run: Run, _: Path) -> Seen:
    return accumulated(run, (4, 4, 4))


@program("1, 3, then 2 micro-batches")
def _(run: Run, _: Path) -> Seen:
    return accumulated(run, (1, 3, 2))


@program("two backward passes of one forward")
def _(run: Run, _: Path) -> Seen:
    for step in range(3):
        loss = loss_of(run, step)
        run.backward(loss, last=False, retain_graph=True)
        run.backward(loss.square())
        run.step()
    return []


@program("clipping by norm", clip_norm=0.05)
def _(run: Run, _: Path) -> Seen:
    seen = []
    for step in range(4):
        run.backward(loss_of(run, step))
        seen.append(run.clip(norm=0.05))
        run.step()
    return seen


@program("clipping by value")
def _(run: Run, _: Path) -> Seen:
    for step in range(4):
        run.backward(loss_of(run, step))
        run.clip(value=1e-3)
        run.step()
    return []


@program("a scheduler and two groups", groups=True)
def _(run: Run, _: Path) -> Seen:
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (step + 1))
    seen = []
    for step in range(4):
        seen += train(run, range(step, step + 1))
        scheduler.step()
    return seen


def unfrozen(run: Run, _: Path) -> Seen:
    seen = train(run, range(2))
    for block in run.module.blocks[:2]:
        block.requires_grad_(True)
    return seen + train(run, range(2, 5))


program("two frozen blocks", lambda: Net(frozen=2))(lambda run, _: train(run, range(4)))
program("frozen blocks that train from step 3 on", lambda: Net(frozen=2))(unfrozen)
program("embedding and head tied", lambda: Net(tied=True))(lambda run, _: train(run, range(4)))
program("a block that runs twice in a step", lambda: Net(twice=True))(lambda run, _: train(run, range(4)))
program("experts without tokens", lambda: Net(experts=4))(lambda run, _: train(run, range(4)))


@program("dropout, same random numbers", lambda: Net(dropout=0.3))
def _(run: Run, _: Path) -> Seen:
    torch.manual_seed(7)
    return train(run, range(4))


@program("BatchNorm counts a batch once", lambda: Net(batch_norm=True))
def _(run: Run, _: Path) -> Seen:
    seen = train(run, range(4))
    return seen + [each.detach().clone().float() for _, each in sorted(run.module.named_buffers())]


@program("blocks that take and return containers", lambda: Containers(Collecting))
def _(run: Run, _: Path) -> Seen:
    seen = []
    for step in range(4):
        batch = tokens(step)
        out = run.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(out["logits"].flatten(0, 1), batch[:, 1:].flatten())
        run.backward(loss + out["seen"].square().mean())
        run.step()
        seen.append(out["seen"].detach())
    return seen


@program("second derivatives: a penalty on the gradient")
def _(run: Run, _: Path) -> Seen:
    seen = []
    embedded: Seen = []
    run.module.embed.register_forward_hook(lambda module, args, out: embedded.append(out))
    for step in range(3):
        loss = loss_of(run, step)
        (gradient,) = torch.autograd.grad(loss, embedded[-1], create_graph=True)
        run.backward(loss + gradient.square().sum())
        run.step()
        seen.append(loss.detach())
    return seen


@program("gradients that the user changes in place")
def _(run: Run, _: Path) -> Seen:
    for step in range(4):
        run.backward(loss_of(run, step))
        for each in run.module.parameters():
            each.grad.mul_(0.5).add_(1e-3)
        run.step()
    return []


@program("gradients that the user assigns")
def _(run: Run, _: Path) -> Seen:
    for step in range(4):
        run.backward(loss_of(run, step))
        for each in run.module.parameters():
            each.grad = each.grad.sign() * 1e-3
        run.step()
    return []


@program("a mean of weights, read after each step")
def _(run: Run, _: Path) -> Seen:
    mean: Seen = []
    for step in range(4):
        train(run, range(step, step + 1))
        with run.touch(), torch.no_grad():
            now = [whole(each).detach().clone() for each in run.module.parameters()]
        mean = [a.lerp_(b, 0.1) for a, b in zip(mean, now, strict=True)] if mean else now
    return mean


@program("weights that the user changes after each step")
def _(run: Run, _: Path) -> Seen:
    seen = []
    for step in range(4):
        seen += train(run, range(step, step + 1))
        with run.touch(), torch.no_grad():
            for each in run.module.parameters():
                each.clamp_(-0.1, 0.1)
    return seen


@program("evaluation between steps")
def _(run: Run, _: Path) -> Seen:
    seen = []
    for step in range(4):
        seen += train(run, range(step, step + 1))
        run.module.eval()
        with torch.no_grad():
            seen.append(loss_of(run, 100 + step))
        run.module.train()
    return seen


@program("a forward without a backward between steps")
def _(run: Run, _: Path) -> Seen:
    seen = train(run, range(2))
    with contextlib.suppress(ZeroDivisionError):
        loss_of(run, 50)
        raise ZeroDivisionError  # the user skips this batch: its forward has no backward
    return seen + train(run, range(2, 4))


# -- programs of files -------------------------------------------------------------------------------------------------


def to_the_middle(run: Run, folder: Path) -> Seen:
    train(run, range(3))
    run.save(folder / "first")
    return []


def from_the_middle(run: Run, folder: Path) -> Seen:
    run.load(folder / "first")
    return train(run, range(3, 6))


def killed(run: Run, folder: Path) -> Seen:
    """Save, train on, and die in the middle of the next save."""
    train(run, range(3))
    begin = time.perf_counter()
    run.save(folder / "first")
    seconds = time.perf_counter() - begin
    train(run, range(3, 4))
    threading.Timer(seconds / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    run.save(folder / "second")
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def after_the_kill(run: Run, folder: Path) -> Seen:
    """Load what was being saved; if that is refused, the one before, and train to the same step."""
    try:
        run.load(folder / "second")
    except BaseException:  # that of torch's checkpoints is no Exception
        run.load(folder / "first")
        train(run, range(3, 4))
    return train(run, range(4, 6))


program("resume in another process")(to_the_middle, from_the_middle)
program("killed in the middle of a save")(killed, after_the_kill)


program("twenty trainings in one process", lambda: Net(width=512), lives=20)(lambda run, _: train(run, range(1)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
