"""`UserLoop`: models and optimizers in a training loop that the user, or a framework without strategies, has written.

[Note: Call order in a user's loop]
``prepare`` for each model, with its optimizers where it has some: the run is built, the optimizers are adopted -> per
step: the model is called (a hook on it ends the step before), ``backward`` around the backward, clipping on
`holders` of gradients, ``optimizer.step`` -> ``close``, without which memory stays taken until the process ends. What
the loop does around a step is not known, so nothing is left to a later moment that it could see: ``.grad`` is complete
after each backward, clipping and unscaling change it in place.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cxl.errors import ConfigError, UnsupportedError, warn
from lightning_cxl.gradients.guard import HostUnscale, ReplacedMethod
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.parameter_state import plain
from lightning_cxl.run.checkpoint import entry_of, load_optimizers, own_entry, restore_masters
from lightning_cxl.run.run import Run, bring_to_host
from lightning_cxl.run.session import Session, follow
from lightning_cxl.run.state_on_ssd import KEY, check_together
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.streaming.unit_weights import peek
from lightning_cxl.torch_private import MOVE, UNSCALE, mark_as_called, set_compiler, skip_compiling, step_hooks

log = logging.getLogger(__name__)

# `state_dict` and `load_state_dict` of adopted optimizers, for frameworks that write a file for each optimizer.
#
# [Note: Optimizer files]
# Accelerate, Fabric and the Hugging Face Trainer save what ``optimizer.state_dict()`` returns, in files of their own.
# So our entry of a checkpoint (`run/checkpoint.py`) lies in that dict, beside ``state`` and ``param_groups``. A plain
# torch optimizer ignores it, so these files load without us; and files that plain torch optimizers have written load
# with us. The model's weights must be loaded before the optimizer: master weights that no file has are made from them.


class _FileMethod(ReplacedMethod):
    def __init__(self, plain: Callable[..., Any], optimizer: Optimizer, run: Run) -> None:
        super().__init__(plain)
        self._optimizer = optimizer
        self._run = run

    def _settled_run(self) -> Run:
        self._run.wait_for_updates()
        self._run.adopt_joined()
        return self._run


class _StateDict(_FileMethod):
    """`state_dict`: torch's with our entry in it, of tensors of the optimizer. See [Note: Optimizer files]."""

    def __call__(self) -> dict[str, Any]:
        run = self._settled_run()
        if run.on_ssd is not None:
            run.on_ssd.check_weights()
        own = entry_of([self._optimizer], run.masters, run.num_received)
        mine = {run.masters.name_of(p) for group in self._optimizer.param_groups for p in group["params"]}
        masters = {name: master for name, master in own["master_weights"].items() if name in mine}
        return {**self._plain(), KEY: {**own, "master_weights": masters}}


class _LoadStateDict(_FileMethod):
    """`load_state_dict`, into the memory that the state has already. See [Note: Optimizer files]."""

    def __call__(self, state_dict: Mapping[str, Any]) -> None:
        run, own = self._settled_run(), own_entry(state_dict)
        plain = {key: value for key, value in state_dict.items() if key != KEY}
        load_optimizers([self._optimizer], [plain], own, run.masters.name_of, run.on_ssd)
        run.place_state(self._optimizer)
        run.num_received = own.get("num_gradients", 0)
        restore_masters(own.get("master_weights"), run.masters, [self._optimizer])


@dataclass(frozen=True, slots=True)
class _Prepared:
    model: nn.Module
    run: Run
    undo: ExitStack  # takes away what is on the model and its optimizers


class UserLoop:
    """A context manager around one training; see [Note: Call order in a user's loop]."""

    def __init__(self, session: Session, device: torch.device, loop: Loop) -> None:
        if session.config.refers_to_ssd:
            raise ConfigError(
                "checkpoint='reference' of tier 'ssd' needs checkpoints that we write, as under Lightning; here the "
                "framework writes its own files: set checkpoint='copy'"
            )
        self.session = session
        self.device = device
        self.loop = loop
        self._prepared: dict[int, _Prepared] = {}  # by id of the model

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> list[Optimizer]:
        """Place a model, and adopt the optimizers of its parameters. See [Note: Adoption].

        A model that was prepared without optimizers, and comes again with some, is placed anew. One that another loop
        has prepared stays with that loop as long as it only computes here; with optimizers it is trained here from now
        on.
        """
        before = self._prepared.get(id(model))
        if not optimizers and any(trained is model for trained, _ in _trainings_of(model)):
            return []  # it computes already
        if before is not None and before.run.optimizers:
            raise UnsupportedError(
                f"{type(model).__name__} is part of a training that goes on. To train it with new optimizers, end that "
                "training first: `accelerator.free_memory()`, `fabric.strategy.teardown()` or `trainer.end()`. A model "
                "and all its optimizers belong in one call"
            )
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            if strange := sum(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    f"{strange} parameters of the {type(optimizer).__name__} are not in the model "
                    f"{type(model).__name__}. If they are weights of a loss, register them there (`model.loss_weights "
                    "= nn.Parameter(...)`) before the optimizer is made. Else make the optimizer after everything that "
                    "replaces parameters (quantisation, LoRA, `.to`). An optimizer for several models must become one "
                    "for each model"
                )
        for other in (each.model for each in self._prepared.values() if each.model is not model):
            if shared := [own[id(p)] for p in peek(other) if id(p) in own]:  # only one run can say where they are
                raise UnsupportedError(
                    f"{type(model).__name__} shares {len(shared)} parameters, such as `{shared[0]}`, with "
                    f"{type(other).__name__}, which is prepared already: prepare one module that has both"
                )
        end_earlier_trainings(model, self)
        if before is not None:
            self._end(model)
        if self.session.host is None:
            self.session.open(self.device)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        run, undo = self.session.start(model, optimizers, self.loop), ExitStack()
        self._prepared[id(model)] = _Prepared(model, run, undo)
        try:
            follow(names, model, optimizers)  # some modules make new parameters when they move
            adopted = run.adopt(optimizers)
            for given, optimizer in zip(optimizers, adopted, strict=True):
                mark_as_called(given)  # a scheduler that stays with it shares its groups, and sees none of its steps
                for name, method in (("state_dict", _StateDict), ("load_state_dict", _LoadStateDict)):
                    vars(optimizer)[name] = method(getattr(optimizer, name), optimizer, run)
                    undo.callback(put_back, optimizer, name, None)
            undo.callback(model.register_forward_pre_hook(_Forward(run, self)).remove)
            for module in (each for each in model.modules() if any(True for _ in each.parameters())):
                undo.callback(put_back, module, MOVE, vars(module).get(MOVE))
                module.__dict__[MOVE] = _Move(module, model, self)
        except BaseException:
            self._end(model, after_error=True)
            raise
        return adopted

    def knows(self, model: nn.Module) -> bool:
        return id(model) in self._prepared

    def optimizers_of(self, model: nn.Module) -> Sequence[Optimizer]:
        return self._prepared[id(model)].run.optimizers if self.knows(model) else ()

    def model_of(self, optimizer: Optimizer, models: Sequence[nn.Module] = ()) -> nn.Module:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        for model in [*models, *(each.model for each in self._prepared.values())]:
            if not held.isdisjoint(model.parameters()):
                return model
        raise ConfigError(
            f"the model of this {type(optimizer).__name__} was not prepared: give a model to `prepare`, or Fabric's "
            "`setup`, together with its optimizers, or before them"
        )

    @contextmanager
    def backward(self, options: dict[str, Any] | None = None, *, is_last: bool = True) -> Iterator[None]:
        """Return a region for a backward with `options`; after the last of a step ``.grad`` of `holders` is complete.

        Raises:
            UnsupportedError: options that would leave out weights.
        """
        if not self._prepared:
            raise ConfigError(
                "no model has been prepared, so nothing of this backward would be offloaded: before training, call "
                "`model, optimizer = accelerator.prepare(model, optimizer)`, or `fabric.setup(model, optimizer)`"
            )
        runs = [each.run for each in self._prepared.values() if each.run.optimizers]
        for run in runs:
            run.check_backward({} if options is None else options)
            run.start_backward()
        yield
        for run in runs:
            run.finish_backward(is_last=is_last)
        for each in self._prepared.values():
            if not each.run.optimizers and any(p.grad is not None for p in peek(each.model)):
                warn(
                    f"{type(each.model).__name__} gets gradients and was prepared without an optimizer: they stay "
                    "where torch makes them, and so does the state of an optimizer that steps with them. Give the "
                    "optimizer to the same call, or call `model.requires_grad_(False)`"
                )

    def holders(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """Return the tensors whose ``.grad`` is the gradient of given parameters: their masters, if there are some."""
        found = []
        for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
            pairs = (run.masters.find(parameter) for run in self.session.runs)
            found.append(next((pair.master for pair in pairs if pair is not None), parameter))
        return found

    def before_clipping(self) -> None:
        """Remember which gradient is bad before all are: they are about to be clipped in place."""
        for run in self.session.runs:
            for optimizer in run.optimizers:
                run.guard.note_bad(optimizer)

    def clipping_in_step(self, holders: Sequence[Tensor]) -> CPUAdam | None:
        """Return the optimizer that can clip the gradients of `holders` in the sweep of its step, if there is one."""
        # none where gradients may be read before they are dropped, or not all of them are of one `CPUAdam`
        optimizers = [each for run in self.session.runs for each in run.optimizers]
        if len(optimizers) != 1 or self.loop.reads_gradients:
            return None
        (optimizer,) = optimizers
        if not isinstance(optimizer, CPUAdam) or step_hooks(optimizer)[0]:
            return None
        own = {p for group in optimizer.param_groups for p in plain(group["params"]) if p.grad is not None}
        return optimizer if own == {p for p in holders if p.grad is not None} else None

    def attach_scaler(self, scaler: Any) -> None:
        """Let a loss scaler of torch's, perhaps on a device, unscale gradients on the host; until `close`."""
        setattr(scaler, UNSCALE, partial(_unscale, scaler, self))
        self.session.active.callback(put_back, scaler, UNSCALE, None)

    def run_of(self, optimizer: Optimizer) -> Run:
        for run in self.session.runs:
            if any(each is optimizer for each in run.optimizers):
                return run
        raise ConfigError(f"this {type(optimizer).__name__} was not prepared: `prepare` or `setup` it with its model")

    def save_folder(
        self,
        path: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        rest: Mapping[str, Any] | None = None,
        *,
        weights: bool = True,
    ) -> None:
        from lightning_cxl.run import sharded_checkpoint as sharded  # imports torch's checkpoints

        states, own, rest = [], {}, rest or {}
        for optimizer in optimizers:
            run = self.run_of(optimizer)
            on_all_ranks(run.wait_for_updates)  # a drive of one may fail
            run.adopt_joined()
            check_together(run.on_ssd)
            states.append(sharded.optimizer_tensors(optimizer, run.masters.name_of))
            own = entry_of(optimizers, run.masters, run.num_received)
        tensors = sharded.tensors_of_folder(model.state_dict() if weights else None, states, own)
        sharded.save(path, tensors, {**rest, KEY: {**rest.get(KEY, {}), **own}})

    def load_folder(
        self,
        path: Path,
        model: nn.Module,
        optimizers: Mapping[int, Optimizer],
        *,
        strict: bool,
        weights: bool = True,
        weights_only: bool | None = None,
    ) -> None:
        """Load a model and its optimizers, by their number in the checkpoint; each process what it has of them."""
        from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint  # imports torch's checkpoints

        folder = ShardedCheckpoint(path)
        own = folder.rest(weights_only=weights_only).get(KEY) or {}
        if weights:
            folder.read_weights(model, strict=strict)
        for index, optimizer in optimizers.items():
            run = self.run_of(optimizer)
            run.adopt_joined()
            folder.optimizer(index, optimizer, run.masters.name_of)
            run.place_state(optimizer)
            run.num_received = own.get("num_gradients", 0)
        for run in {id(run): run for run in map(self.run_of, optimizers.values())}.values():
            folder.restore_masters(run.masters, run.optimizers)

    def only_computes(self, model: nn.Module, message: str) -> None:
        """Let a model compute as before, and every backward of it fail with a message."""
        if not self.knows(model):
            return

        def refuse(_: Tensor) -> None:
            raise UnsupportedError(message)

        for parameter in peek(model):
            if parameter.requires_grad:
                handle = parameter.register_hook(refuse)  # type: ignore[no-untyped-call]
                self._prepared[id(model)].undo.callback(handle.remove)

    def end_run(self, model: nn.Module) -> None:
        if len(self._prepared) > 1:
            self._end(model)
        else:
            self.close()

    def _end(self, model: nn.Module, *, after_error: bool = False) -> None:
        gone = self._prepared.pop(id(model))
        self.session.runs.remove(gone.run)
        with ExitStack() as cleanup:
            cleanup.callback(bring_to_host, model, self.device)
            cleanup.callback(gone.run.close, after_error=after_error)
            cleanup.callback(gone.undo.close)

    def close(self, *, after_error: bool = False) -> None:
        """Free everything but weights and optimizer state, which belong to the user and are on the host. Idempotent."""
        prepared, self._prepared = self._prepared, {}
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            for each in prepared.values():
                cleanup.callback(bring_to_host, each.model, self.device)
            cleanup.callback(self.session.drop_finished)
            cleanup.callback(self.session.close, after_error=after_error)
            for each in prepared.values():
                cleanup.callback(each.undo.close)

    def __enter__(self) -> "UserLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(after_error=kind is not None)

    def __reduce__(self) -> tuple[type["UserLoop"], tuple[Session, torch.device, Loop]]:
        return UserLoop, (self.session, self.device, self.loop)


def end_earlier_trainings(model: nn.Module, loop: UserLoop | None = None) -> None:
    """End the runs that loops other than `loop` have of a model or its parts: a cell of a notebook runs again."""
    for trained, other in set(_trainings_of(model)):
        if other is not loop and other.knows(trained):
            other.end_run(trained)
            log.info(
                f"the training that {type(trained).__name__} was part of has ended, because a new one begins: the "
                "weights stay, the state of its optimizers does not go on"
            )


def _trainings_of(model: nn.Module) -> Iterator[tuple[nn.Module, UserLoop]]:
    for module in model.modules():
        move = vars(module).get(MOVE)
        owner = move.owner() if isinstance(move, _Move) else None
        if owner is not None:
            yield owner


class _Move(ReplacedMethod):
    """Stands in for what ``.to``, ``.cpu`` and others of a module come to: a move to another device ends the run."""

    def __init__(self, module: nn.Module, model: nn.Module, loop: UserLoop) -> None:
        super().__init__(getattr(module, MOVE))
        self._model = model
        self._loop = loop

    def owner(self) -> tuple[nn.Module, UserLoop] | None:
        return (self._model, self._loop) if self._loop.knows(self._model) else None

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **keywords: Any) -> Any:
        owner = self.owner()
        if owner is None:
            return self._plain(fn, *args, **keywords)
        model, loop = owner
        here = torch.zeros(1, device=loop.device)
        there = fn(here).device
        if there != here.device:
            loop.end_run(model)
            warn(
                f"{type(model).__name__} was moved to `{there}`, which ends its run: all of it is plain again. "
                "To train it on with offload, call `prepare`, Fabric's `setup` or `trainer.train` again",
                level=3,
            )
        return self._plain(fn, *args, **keywords)


def put_back(target: Any, name: str, own: Any) -> None:
    """Give an object the attribute that it had of its own; None: it had none, its class has."""
    vars(target).pop(name, None)
    if own is not None:
        vars(target)[name] = own


def methods_of_others(target: object, names: Iterable[str], known: Sequence[str]) -> set[str]:
    """Return those of the named methods that an object, or a class of it, has from outside of the `known` packages."""

    def is_known(definition: Any) -> bool:
        return (getattr(definition, "__module__", None) or "").partition(".")[0] in known

    found = set()
    for name in names:
        definitions = [(cls, vars(cls)[name]) for cls in type(target).__mro__ if name in vars(cls)]
        own = [vars(target)[name]] if name in vars(target) else []  # `module.hook = function`, `LambdaCallback`
        if not all(map(is_known, (*own, *(each for pair in definitions for each in pair)))):
            found.add(name)
    return found


class BeforeForward:
    """Hook on a module: each call of it finds what others have written to the weights in its optimizer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        skip_compiling(BeforeForward.__call__, "lightning_cxl has something to do before a model's forward")

    def __call__(self, *_: Any) -> None:
        compiler = set_compiler(None)  # which would compile this anew in each step
        try:
            self._begin()
        finally:
            set_compiler(compiler)

    def _begin(self) -> None:
        self._run.start_forward()

    def __reduce__(self) -> tuple[type["_NoHook"], tuple[()]]:
        """Copy and pickle as a hook that does nothing: the copy of a model is in no run."""
        return _NoHook, ()


class _Forward(BeforeForward):
    """Each call of the model may be the first of a step. See [Note: Call order in a user's loop]."""

    def __init__(self, run: Run, loop: UserLoop) -> None:
        super().__init__(run)
        self._num_steps = self._num_received = 0
        self.loop = loop  # lives as long as a model that it has placed

    def _begin(self) -> None:
        super()._begin()
        num_steps, num_received = self._run.guard.num_steps, self._run.num_received
        if num_steps != self._num_steps:
            self._run.end_step()
        elif num_received == self._num_received:  # an evaluation; else copies last from one micro-batch to the next
            self._run.code_has_run()
        self._num_steps, self._num_received = num_steps, num_received
        self._run.adopt_joined()


class _NoHook:
    def __call__(self, *_: Any) -> None:
        pass


def _unscale(scaler: Any, loop: UserLoop, optimizer: Optimizer, *args: Any) -> Any:
    """`GradScaler._unscale_grads_` for optimizers of several runs."""
    guard = loop.run_of(optimizer).guard
    return HostUnscale(scaler, lambda same: same, lambda _: False, guard)(optimizer, *args)
