"""`ShardedAccelerator`: the part of our accelerator that is about a model cut over several processes.

Accelerate starts the processes, and lets them meet. An optimizer is made before `prepare`, of whole parameters: it gets
those of the model that is cut, by their names.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer

from lightning_cxl.devices.device_type import process_device_type
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.integrations.accelerate.whole_weights import load_whole
from lightning_cxl.run import loop_files
from lightning_cxl.run.checkpoint_file import remove
from lightning_cxl.run.cutting import cut_for, follow, whole_state
from lightning_cxl.run.sharded_checkpoint import is_sharded_checkpoint
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.fsdp import is_cut, without_reducing
from lightning_cxl.sharding.machines import find_machines
from lightning_cxl.sharding.processes import backend_for, gather_on_machine, make_mesh


def with_gloo(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of an `Accelerator` whose processes exchange what is on the host, too.

    Accelerate would start NCCL alone. Another backend that the user names stays, as does a group that exists.
    """
    on_cpu = arguments.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")
    kind = process_device_type()
    if on_cpu or int(os.environ.get("LOCAL_RANK", -1)) == -1 or kind.name != "cuda" or not kind.num_devices():
        return arguments
    handlers = list(arguments.get("kwargs_handlers") or ())
    given = [each for each in handlers if isinstance(each, InitProcessGroupKwargs)] or [InitProcessGroupKwargs()]
    if given[0].backend == InitProcessGroupKwargs.backend:
        handlers = [each for each in handlers if each is not given[0]]
        handlers.append(replace(given[0], backend=backend_for(torch.device(kind.name))))
    return {**arguments, "kwargs_handlers": handlers}


class ShardedAccelerator(Accelerator):  # type: ignore[misc]
    """Cuts models, follows them with optimizers, and writes their state together."""

    offload: UserLoop
    _models: list[nn.Module]
    _optimizers: list[Optimizer]
    _mesh: DeviceMesh | None = None
    _stand_ins: list[dict[str, Any]] | None = None
    """While `save_state` gathers no weights: what it has in their place, of each model."""

    def _check_processes(self) -> None:
        """Refuse processes that Accelerate has set up in another way."""
        kind = self.distributed_type.value
        several = self.num_processes > 1
        if kind not in ("MULTI_CPU", "MULTI_GPU") and (several or kind != "NO"):
            raise UnsupportedError(
                f"{type(self).__name__} places models itself, and Accelerate is set up for {self.num_processes} "
                f"processes, kind {kind}. Launch without a plugin for DeepSpeed, FSDP or Megatron-LM."
            )
        backends = dist.get_backend_config() if dist.is_initialized() else "none"
        if several and not {"cpu", self.device.type} <= {each.split(":")[0] for each in backends.split(",")}:
            wanted = backend_for(self.device)
            raise UnsupportedError(
                f"{type(self).__name__} exchanges what is on the host and on `{self.device}`, and the process group of "
                f"these {self.num_processes} processes has the backends {backends}. It was made before this "
                f'accelerator: give a Trainer TrainingArguments(ddp_backend="{wanted}"), and code that makes a '
                f'`PartialState` or calls `init_process_group` itself backend="{wanted}".'
            )

    def _meet(self) -> None:
        """Make the mesh, and give this process its part of the machine.

        `accumulate` reduces with every micro-batch from now on: Accelerate would keep gradients of the whole model on
        every device until the last one.

        Accelerate counts one process on each machine where a launcher has not said how many there are, so they are
        asked themselves.
        """
        if self.num_processes == 1:
            return
        self.gradient_state.plugin_kwargs["sync_each_batch"] = True
        session, rank, machines = self.offload.session, self.process_index, find_machines()
        replicate = session.config.replicate_machines
        per_machine = machines.num_ranks_of_each() if replicate else self.num_processes
        self._mesh = make_mesh(self.device, self.num_processes // per_machine, per_machine, replicate=replicate)
        gather = partial(gather_on_machine, machine=machines.of_rank[rank])
        local = machines.local_rank(rank), machines.num_ranks_beside(rank)
        session.bind(rank, self.num_processes, *local, self.device, gather)

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

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a region whose backwards exchange no gradients; the first one after it reduces the sum of all.

        Until then every device has gradients of all that is trained. See Accelerate's `no_sync`.
        """
        return without_reducing(model)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights of a model; with several processes whole and on the first one, empty on the others."""
        if not is_cut(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if self._stand_ins is not None and not unwrap:
            self._stand_ins.append({})
            return self._stand_ins[-1]
        return whole_state(self._plain(model) if unwrap else model)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Write what Accelerate does; models that are cut, and their optimizers, to a folder for each model in it.

        Hooks of the user get all models, and an empty dict in the place of each model's weights. As with Accelerate
        alone, one that takes a dict away has saved this model itself; what the first process says counts.
        """
        if self._mesh is None:
            location = super().save_state(output_dir, *args, **kwargs)
            for older in _folders(location):  # of several processes: `load_state` would take them
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
        own = on_all_ranks(lambda: own)[0]
        for index, (model, with_weights) in enumerate(zip(models, own, strict=True)):
            path, adopted = _folder(location, index), self.offload.optimizers_of(model)
            loop_files.save(path, model, adopted, self.offload, {}, weights=with_weights)
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
                    loop_files.load(path, model, numbered, self.offload, strict=True, weights=asked)
                elif asked:
                    load_whole(Path(folder), index, model)

    def _plain(self, model: nn.Module) -> nn.Module:
        unwrapped: nn.Module = self.unwrap_model(model, keep_torch_compile=False)
        return unwrapped


def _folder(state: str | Path, index: int) -> Path:
    return Path(state) / f"sharded_model_{index}"


def _folders(state: str | Path) -> list[Path]:
    return [path for path in Path(state).glob("sharded_model_*") if is_sharded_checkpoint(path)]
