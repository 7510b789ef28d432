"""`StandIn`: takes the place of a module's forward, outside of whatever the user compiles.

[Note: Compiled units]
A stand-in decides, copies and counts: none of that belongs into a graph of ``torch.compile``. There are three ways to
compile a unit, and in all of them its own forward is what is compiled, and what we do is not:

* The unit is wrapped (``torch.compile(block)`` in a `ModuleList`): the stand-in is on the wrapper, outside.
* The stand-in is inside what is compiled (``block.compile()``, ``torch.compile(model)``, a block that was wrapped after
  it was attached): the compiler leaves its graph at the stand-in. It would go on with every function that we call, so
  it is set aside while we run, and is back while the unit's own forward runs.
* The recompute, in backward, where no compiler is active, runs under the compiler of the call that it repeats: a
  compiled forward that a plain one repeats would have saved other tensors, with other rounding.

``torch.compiler.disable`` sets the compiler aside but cannot bring it back, so two private functions of torch are used.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_cxl.torch_private import leave_to_python, set_compiler

Compiler = Any
"""What torch calls with a frame to compile; None for none."""
_REASON = (
    "lightning_cxl moves a unit's weights and inputs here, so a unit cannot be part of a bigger graph. Where "
    "fullgraph=True is wanted, let `torch.compile(block, fullgraph=True)` take the place of each block in the model "
    "before the run"
)


class StandIn:
    """Takes the place of the forward of one module. A copy of the model (deepcopy, pickle) gets the plain forward."""

    stays_outside = False
    """Whether later stand-ins of the module come under this one."""

    def __init__(self, module: nn.Module) -> None:
        leave_to_python(StandIn.__call__, _REASON)
        self.module = module
        self._had_own = module.__dict__.get("forward")
        self._is_removed = False
        self._outer: StandIn | None = None
        if isinstance(self._had_own, StandIn) and self._had_own.stays_outside:
            self._outer = self._had_own
            self.original: Callable[..., Any] = self._outer.original
            self._had_own, self._outer.original, self._outer._had_own = self._outer._had_own, self, self
        else:
            self.original = module.forward
            module.__dict__["forward"] = self
        functools.update_wrapper(self, self.original, updated=())  # name, docstring, signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run` with the active compiler set aside. See [Note: Compiled units]."""
        compiler = set_compiler(None)
        try:
            if self._is_removed:
                return call_under(compiler, self.original, args, kwargs)
            return self.run(compiler, args, kwargs)
        finally:
            set_compiler(compiler)

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what is to be done instead of ``original(*args, **kwargs)``, which is to run under `compiler`."""
        raise NotImplementedError

    def remove(self) -> None:
        """Undo the wrapping; where someone has wrapped this object meanwhile, stay in place and pass calls through."""
        self._is_removed = True
        if self._outer is not None and self._outer.original is self:
            self._outer.original, self._outer._had_own = self.original, self._had_own
        if self.module.__dict__.get("forward") is not self:
            return
        if self._had_own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._had_own

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same_object, (self.original,)


def call_under(compiler: Compiler, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = set_compiler(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_compiler(before)


def _same_object(value: Any) -> Any:
    return value
