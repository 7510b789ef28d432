"""`Slot`: all that the optimizer keeps of one parameter, in memory that stays where it was placed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.host_tensors import is_dense, laid_out_as
from lightning_cxl.optim.eight_bit import dynamic_map
from lightning_cxl.optim.homes import Run
from lightning_cxl.optim.layout import follows
from lightning_cxl.optim.moment import AllocateState, Moment
from lightning_cxl.optim.number_formats import StatePrecision, join, split
from lightning_cxl.placement.placement import TensorRole


class KnownRow(NamedTuple):
    """A row of the kernel's table, and what must be the same for it to be used again."""

    signature: tuple[object, ...]
    numbers: tuple[int, ...]


REMAINDER = "remainder"
"""Key of what bfloat16 weights lack of float32 master weights, int16; see `number_formats.split`."""


class Slot:
    """Step count, momentum, variance and, of a bfloat16 parameter, the remainder of its master weights.

    Args:
        parameter: float32 or bfloat16, on the host.
        precision: of momentum and variance.
        allocate: gives the memory, which is held from now on.
    """

    __slots__ = (
        "_entries", "dtype", "known", "momentum", "numel", "precision", "remainder", "runs", "step",
        "step_address", "variance",
    )  # fmt: skip

    def __init__(self, parameter: torch.Tensor, precision: StatePrecision, allocate: AllocateState) -> None:
        self.numel = parameter.numel()
        self.dtype = parameter.dtype  # decides whether there is a remainder
        self.precision = precision
        self.step = torch.zeros((), dtype=torch.float32)
        self.step_address = self.step.data_ptr()
        self.known: KnownRow | None = None  # the row of the last step, see `spans.SpanTable`
        self.momentum = Moment(parameter, TensorRole.MOMENTUM, precision, allocate)
        self.variance = Moment(parameter, TensorRole.VARIANCE, precision, allocate)
        self.runs: list[Run] | None = None  # where its threads are at home; found out at the first step
        self.remainder: torch.Tensor | None = None
        if parameter.dtype is torch.bfloat16:
            memory = allocate(parameter, TensorRole.MASTER_WEIGHTS, torch.int16, self.numel)
            self.remainder = laid_out_as(memory, parameter)
        self._entries = self._varying()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: all but addresses."""
        return {
            name: getattr(self, name)
            for name in ("dtype", "momentum", "numel", "precision", "remainder", "step", "variance")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, in memory of its own."""
        for name, value in state.items():
            setattr(self, name, value)
        self.step_address = self.step.data_ptr()
        self.known = self.runs = None
        self._entries = self._varying()

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Return whether `state` refers to this memory throughout."""
        return all(state.get(key) is value for key, value in self._entries)

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Check that this memory is still right for `parameter`, which may have changed since the slot was made.

        Raises:
            ConfigError: it has got another shape or dtype, or gaps in memory that the state cannot follow.
        """
        if parameter.dtype is not self.dtype:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, parameter.dtype))
            raise ConfigError(
                f"{name} was {before} when the optimizer was made, is {now} now: convert the model first, then make "
                "the optimizer"
            )
        if parameter.shape != self.momentum.values.shape:
            raise ConfigError(
                f"{name} had shape {tuple(self.momentum.values.shape)} when the optimizer was made and has "
                f"{tuple(parameter.shape)} now: make a new optimizer after resizing a model"
            )
        if self.precision != "fp32" and not is_dense(parameter):
            raise ConfigError(
                f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) has gaps in memory now, and "
                f"its state, {self.precision}, is for weights without gaps: make it `.contiguous()`, or make a new "
                "optimizer, which keeps the state of such weights in float32"
            )

    def bind(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Make ``optimizer.state[parameter]`` refer to this memory.

        The keys are torch's (``exp_avg``, ``exp_avg_sq``), with 8-bit state bitsandbytes' (``state1``, ``absmax1``,
        ``qmap1``, ...), so that torch does not take codes for numbers. An empty `state` starts at zero. A tensor that
        someone else put there is copied in and replaced by ours. The parameter has passed `check` and
        `layout.check_parameter`, the state `state.check_moments`.
        """
        values = self.momentum.values
        if (values.shape, values.stride()) != (parameter.shape, parameter.stride()) and not follows(values, parameter):
            self._follow_layout(parameter, state)
        if not state:
            self.step.zero_()
            self.momentum.zero_()
            self.variance.zero_()
            if self.remainder is not None:
                self.remainder.zero_()
        elif self.holds(state):
            return
        else:
            self._take(parameter, state)
        state.clear()
        state.update(self._entries)
        if self.precision == "8bit":
            state.update(qmap1=dynamic_map(False), qmap2=dynamic_map(True))

    def _varying(self) -> list[tuple[str, torch.Tensor]]:
        """Return the entries of the state that steps change."""
        entries = [("step", self.step)]
        if self.momentum.scales is not None and self.variance.scales is not None:
            entries += [("state1", self.momentum.values), ("state2", self.variance.values)]
            entries += [("absmax1", self.momentum.scales), ("absmax2", self.variance.scales)]
        else:
            entries += [("exp_avg", self.momentum.values), ("exp_avg_sq", self.variance.values)]
        if self.remainder is not None:
            entries.append((REMAINDER, self.remainder))
        return entries

    def _take(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Copy another state in, of any precision; see `state.check_moments` for what it may look like."""
        if state["step"] is not self.step:
            self.step.fill_(float(state["step"]))
        for moment, plain, coded, scales in (
            (self.momentum, "exp_avg", "state1", "absmax1"),
            (self.variance, "exp_avg_sq", "state2", "absmax2"),
        ):
            values = state[plain] if plain in state else state[coded]
            if values is not moment.values:
                moment.load(values, state[scales] if values.dtype is torch.uint8 else None)
        saved = state.get(REMAINDER)
        if saved is not None and saved.dtype is not torch.int16:
            saved = None  # torch's optimizers carry it along as a number, and their steps make it meaningless
        if self.remainder is None:
            if saved is not None:  # of split weights: these are float32 masters of the same compute weights
                parameter.copy_(join(split(parameter.detach())[0], saved))
        elif saved is None:
            self.remainder.zero_()
        elif saved is not self.remainder:
            self.remainder.copy_(saved)

    def _follow_layout(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Put the elements in the parameter's new order: the model's memory format has changed."""
        before = self._entries
        self.momentum.follow(parameter)
        self.variance.follow(parameter)
        if self.remainder is not None:
            new = laid_out_as(self.remainder, parameter)
            self.remainder = new.copy_(self.remainder.clone())
        self._entries = self._varying()
        for (key, old), (_, new) in zip(before, self._entries, strict=True):
            if state.get(key) is old:
                state[key] = new
