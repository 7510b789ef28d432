"""`CXLAccelerator`: Accelerate's accelerator, with models and optimizers on host memory tiers.

An Accelerate loop stays as it is: `prepare` places the model and adopts its optimizers, `backward` collects gradients,
clipping finds them where they are. Accelerate starts several processes and lets them meet; `prepare` cuts the model
over them. An optimizer is made before `prepare`, of whole parameters: it gets those of the model that is cut, by their
names. Everything else is Accelerate's own.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env
from safetensors.torch import load_file as load_safetensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices import process_device_type
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.gradients.step import repoint_scheduler
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.machine.speeds import load_yaml
from lightning_cxl.run.checkpoint import is_sharded_checkpoint, load_file, remove
from lightning_cxl.run.session import Session, cut_for, follow, taking_whole, whole_state
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding import processes
from lightning_cxl.sharding.fsdp import is_cut, without_reducing
from lightning_cxl.timing import timed

Options = Mapping[str, Any] | OffloadConfig | str | PathLike[str] | None
"""Options of a front end: fields of `OffloadConfig`, or a file with them."""


def read_options(given: Options) -> dict[str, Any]:
    """Return fields of `OffloadConfig`, given as such, or in a YAML file at its top level."""
    if isinstance(given, OffloadConfig):
        return {each.name: getattr(given, each.name) for each in fields(given)}
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    found = load_yaml(given, "the options in")
    if not isinstance(found, Mapping):
        raise ConfigError(f"`{fspath(given)}` must map names of options to values, such as `stream_weights: true`")
    return dict(found)


def with_gloo(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of an `Accelerator` that starts gloo beside NCCL; a backend that the user names stays."""
    on_cpu = arguments.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")
    kind = process_device_type()
    if on_cpu or int(os.environ.get("LOCAL_RANK", -1)) == -1 or kind.name != "cuda" or not kind.num_devices():
        return arguments
    handlers = list(arguments.get("kwargs_handlers") or ())
    given = [each for each in handlers if isinstance(each, InitProcessGroupKwargs)] or [InitProcessGroupKwargs()]
    if given[0].backend == InitProcessGroupKwargs.backend:
        handlers = [each for each in handlers if each is not given[0]]
        handlers.append(replace(given[0], backend=processes.backend_for(torch.device(kind.name))))
    return {**arguments, "kwargs_handlers": handlers}


class CXLAccelerator(Accelerator):  # type: ignore[misc]
    """Train with weights, gradients, optimizer state and activations on host memory tiers.

    Args:
        *args: of `accelerate.Accelerator`.
        offload: an `OffloadConfig`, its fields, or the path of a YAML file with them; None: what the environment says
            (``LIGHTNING_CXL_TIERS`` and so on), else the defaults.
        **kwargs: of `accelerate.Accelerator`.

    Raises:
        ConfigError: an option with an impossible value.
        UnsupportedError: several processes without gloo for host memory, or a plugin that places models itself
            (DeepSpeed, FSDP, Megatron-LM).

    Example::

        accelerator = CXLAccelerator(offload={"tiers": {"dram": "48GiB"}})
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    """

    _models: list[nn.Module]
    _optimizers: list[Optimizer]
    _mesh: DeviceMesh | None = None
    _stand_ins: list[dict[str, Any]] | None = None
    """While `save_state` gathers no weights: what it has in their place, of each model."""

    def __init__(self, *args: Any, offload: Options = None, **kwargs: Any) -> None:
        super().__init__(*args, **with_gloo(kwargs))
        self._attach(offload, None)

    @classmethod
    def attach(cls, accelerator: Accelerator, offload: Options = None, loop: Loop | None = None) -> "CXLAccelerator":
        """Make an accelerator that exists, and has prepared no model yet, one of this class."""
        if accelerator._models or accelerator._optimizers:
            raise ConfigError(
                f"this accelerator has prepared {len(accelerator._models)} models and {len(accelerator._optimizers)} "
                "optimizers already: offload them before `prepare`"
            )
        accelerator.__class__ = cls
        ours: CXLAccelerator = accelerator
        ours._attach(offload, loop)
        return ours

    def _attach(self, offload: Options, loop: Loop | None) -> None:
        self._check_processes()
        loop = loop or Loop(accumulates=self.gradient_accumulation_steps > 1, writes_unseen=True)
        self.offload = UserLoop(Session(**read_options(offload)), self.device, loop)
        """Models and optimizers in host memory; its `session` has the report."""
        self._meet()
        self._replaced: list[tuple[Optimizer, Optimizer]] = []  # what schedulers have, and what they are to step with
        if self.scaler is not None:
            self.offload.attach_scaler(self.scaler)

    def _check_processes(self) -> None:
        kind = self.distributed_type.value
        several = self.num_processes > 1
        if kind not in ("MULTI_CPU", "MULTI_GPU") and (several or kind != "NO"):
            raise UnsupportedError(
                f"{type(self).__name__} places models itself, and Accelerate is set up for {self.num_processes} "
                f"processes, kind {kind}. Launch without a plugin for DeepSpeed, FSDP or Megatron-LM."
            )
        backends = dist.get_backend_config() if dist.is_initialized() else "none"
        if several and not {"cpu", self.device.type} <= {each.split(":")[0] for each in backends.split(",")}:
            wanted = processes.backend_for(self.device)
            raise UnsupportedError(
                f"{type(self).__name__} exchanges what is on the host and on `{self.device}`, and the process group of "
                f"these {self.num_processes} processes has the backends {backends}. It was made before this "
                f'accelerator: give a Trainer TrainingArguments(ddp_backend="{wanted}"), and code that makes a '
                f'`PartialState` or calls `init_process_group` itself backend="{wanted}".'
            )

    def _meet(self) -> None:
        if self.num_processes == 1:
            return
        # `accumulate` would keep gradients of the whole model on every device until the last micro-batch
        self.gradient_state.plugin_kwargs["sync_each_batch"] = True
        # processes are asked: Accelerate counts one on each machine where a launcher has not said how many there are
        session, rank, machines = self.offload.session, self.process_index, processes.find_machines()
        replicate = session.config.replicate_machines
        per_machine = processes.ranks_of_each(machines) if replicate else self.num_processes
        self._mesh = processes.make_mesh(
            self.device, self.num_processes // per_machine, per_machine, replicate=replicate
        )
        own = machines[rank]
        gather = partial(processes.gather_on_machine, machine=own)
        local_rank, num_local = machines[:rank].count(own), machines.count(own)
        session.bind(rank, self.num_processes, local_rank, num_local, self.device, gather)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as Accelerate does; models and optimizers stay where their tiers are.

        A model and all its optimizers must come in the same call, or the model first.

        Raises:
            ConfigError: an optimizer whose model was not prepared, or a model without values.
            TierFullError: a model or its training does not fit.
        """
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        for model in args:
            if isinstance(model, nn.Module):
                self._cut(model, [_inner(each) for each in optimizers])
        adopted = self._adopt([each for each in args if isinstance(each, nn.Module)], optimizers)
        new_of = dict(zip(map(id, optimizers), adopted, strict=True))
        return super().prepare(*(new_of.get(id(each), each) for each in args), **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self._cut(model, [])
        self.offload.prepare(model)
        plain = evaluation_mode or self.num_processes > 1  # else Accelerate wraps it in DDP
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=plain)
        if prepared is not model:  # a wrapper, of torch.compile: its own `zero_grad` knows no masters
            prepared.__dict__["zero_grad"] = partial(_zero_grad_of, model)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        if not self._is_adopted(optimizer):
            (optimizer,) = self._adopt([], [optimizer])
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare a scheduler, perhaps of an optimizer whose place ours has taken; see Accelerate's own."""
        for old, new in self._replaced:
            repoint_scheduler(scheduler, old, new)
        return super().prepare_scheduler(scheduler)

    def _cut(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Cut a whole model over several processes, and give its optimizers the new parameters."""
        if self._mesh is None or is_cut(model):
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            if any(id(parameter) in names for parameter in optimizer.state):
                raise UnsupportedError(
                    f"this {type(optimizer).__name__} has state of whole weights, and its model is to be cut over "
                    f"{self.num_processes} processes: prepare both before the first step, then load the state"
                )
        cut_for(self.offload.session, model, self._mesh, self.device, root=model)
        follow(names, model, optimizers)
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        for module in model.modules():
            if hasattr(module, "generate"):  # of transformers: each process then generates for as long as one has to
                module._is_fsdp_managed_module = True  # type: ignore[assignment]

    def _adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return what takes the place of optimizers; one that Accelerate has wrapped before keeps its wrapper."""
        new: dict[int, Optimizer] = {id(each): each for each in optimizers}
        rest = [each for each in optimizers if not self._is_adopted(each)]
        owners = {id(each): self.offload.model_of(_inner(each), models) for each in rest}
        for model in dict.fromkeys([*models, *owners.values()]):
            mine = [each for each in rest if owners[id(each)] is model]
            adopted = self.offload.prepare(model, [_inner(each) for each in mine])
            for each, result in zip(mine, adopted, strict=True):
                self._replaced.append((_inner(each), result))
                if isinstance(each, AcceleratedOptimizer):
                    AcceleratedOptimizer.__init__(each, result, device_placement=False, scaler=each.scaler)
                else:
                    new[id(each)] = result
        return [new[id(each)] for each in optimizers]

    def _is_adopted(self, optimizer: Optimizer) -> bool:
        return any(_inner(optimizer) is each for run in self.offload.session.runs for each in run.optimizers)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass; afterwards gradients are on the host, complete. See Accelerate's `backward`."""
        with self.offload.backward(kwargs, is_last=self.sync_gradients):
            super().backward(loss, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a region whose backwards exchange no gradients; the first one after it reduces the sum of all.

        Until then every device has gradients of all that is trained. See Accelerate's `no_sync`.
        """
        return without_reducing(model)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip gradients of a model's parameters where they are: on the host. See Accelerate's `clip_grad_norm_`."""
        self.offload.before_clipping()
        holders = self.offload.holders(parameters)
        optimizer = self.offload.clipping_in_step(holders) if norm_type == 2 else None
        if optimizer is None:
            norm = super().clip_grad_norm_(holders, max_norm, norm_type)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.unscale_gradients()
        return torch.tensor(optimizer.clip_grad_norm_(max_norm))

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        self.offload.before_clipping()
        super().clip_grad_value_(self.offload.holders(parameters), clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights of a model; with several processes whole and on the first one, empty on the others."""
        if not is_cut(model):
            return super().get_state_dict(model, unwrap)
        if self._stand_ins is not None and not unwrap:
            self._stand_ins.append({})
            return self._stand_ins[-1]
        return whole_state(self._plain(model) if unwrap else model)

    @timed("save_s", "save")
    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Write what Accelerate does; models that are cut, and their optimizers, to a folder for each model in it.

        Hooks of the user get all models, and an empty dict in the place of each model's weights. As with Accelerate
        alone, one that takes a dict away has saved this model itself; what the first process says counts.
        """
        if self._mesh is None:
            location = super().save_state(output_dir, *args, **kwargs)
            for older in Path(location).glob("sharded_model_*"):  # of several processes: `load_state` would take them
                if is_sharded_checkpoint(older):
                    remove(older)
            return location
        models, optimizers, own = list(map(self._plain, self._models)), self._optimizers, [True] * len(self._models)
        self._optimizers, self._stand_ins = [], []

        def take_out(_: Any, weights: list[Any], __: str) -> None:
            assert self._stand_ins is not None
            own[:] = [any(each is stand_in for each in weights) for stand_in in self._stand_ins]
            weights.clear()

        save = super().save_state
        handle = self.register_save_state_pre_hook(take_out)  # the last one
        try:  # where one process fails it ends, and all with it: hooks and Accelerate wait for others in there
            location = save(output_dir, *args, **kwargs)
        finally:
            self._optimizers, self._stand_ins = optimizers, None
            handle.remove()
        own = processes.on_all_ranks(lambda: own)[0]
        for index, (model, with_weights) in enumerate(zip(models, own, strict=True)):
            path, adopted = _folder(location, index), self.offload.optimizers_of(model)
            self.offload.save_folder(path, model, adopted, weights=with_weights)
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what any number of processes has written, in any number of them.

        Hooks of the user get all models; one that takes a model away has loaded its weights itself.
        """
        models, optimizers = list(map(self._plain, self._models)), list(self._optimizers)
        folders: list[str] = []
        left: list[nn.Module] = []

        def take_out(given: list[nn.Module], folder: str) -> None:
            sharded = is_sharded_checkpoint(_folder(folder, 0))
            if sharded or self._mesh is not None:
                folders.append(folder)
                left[:] = map(self._plain, given)
                given.clear()
            if sharded:
                self._optimizers.clear()

        handle = self.register_load_state_pre_hook(take_out)  # the last one
        if self._mesh is not None:
            kwargs.setdefault("map_location", "cpu")  # what is whole does not fit on a device
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            self._optimizers[:] = optimizers
            handle.remove()
        for folder in folders:
            for index, model in enumerate(models):
                path, asked = _folder(folder, index), any(each is model for each in left)
                if is_sharded_checkpoint(path):
                    numbered = dict(enumerate(self.offload.optimizers_of(model)))
                    self.offload.load_folder(path, model, numbered, strict=True, weights=asked)
                elif asked:
                    load_whole(Path(folder), index, model)

    def _plain(self, model: nn.Module) -> nn.Module:
        return self.unwrap_model(model, keep_torch_compile=False)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all that was prepared; models are plain again, on the host. See Accelerate's `free_memory`."""
        self.offload.close()
        self._replaced.clear()
        if self.scaler is not None:
            self.offload.attach_scaler(self.scaler)
        return super().free_memory(*objects)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log values to the trackers, as Accelerate does, and what the steps since the last call took and moved."""
        super().log({**self.offload.session.metrics(), **values} if self.trackers else values, *args, **kwargs)

    def report(self) -> dict[str, Any]:
        """Return bytes planned, used and at the peak, per tier and role; see `Session.report`."""
        return self.offload.session.report(self.offload.device)


def _zero_grad_of(model: nn.Module, set_to_none: bool = True) -> None:
    model.zero_grad(set_to_none)  # as it is when it is called: a run replaces it


def _inner(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _folder(state: str | Path, index: int) -> Path:
    return Path(state) / f"sharded_model_{index}"


def load_whole(folder: Path, index: int, model: nn.Module) -> None:
    """Load the weights of the model that was prepared as number `index`; each process keeps its part of them."""
    ending = f"_{index}" if index else ""
    path = folder / f"model{ending}.safetensors"
    other = folder / f"pytorch_model{ending}.bin"
    if path.exists():
        saved = load_safetensors(path)
    elif other.exists():
        saved = load_file(other, "cpu", True)
    else:
        found = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"state `{folder}` has no {path.name} or {other.name}; it has {found}")
    saved = {name.replace("_orig_mod.", ""): value for name, value in saved.items()}  # of a compiled model
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():  # safetensors has a tied weight once
        saved |= dict.fromkeys(names, next((saved[name] for name in names if name in saved), None))
    lacking = [name for name in model.state_dict() if saved.get(name) is None]
    if lacking:
        raise CheckpointError(f"state `{folder}` is of another model: it lacks {lacking[:3]} ({len(lacking)} in all)")
    with taking_whole(model):
        model.load_state_dict(saved)
