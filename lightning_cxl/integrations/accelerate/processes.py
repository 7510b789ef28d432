"""`ShardedAccelerator`: the part of our accelerator that is about a model cut over several processes.

Accelerate starts the processes, and lets them meet. An optimizer is made before `prepare`, of whole parameters: it gets
those of the model that is cut, by their names.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.run import loop_files
from lightning_cxl.run.cutting import cut_for, follow
from lightning_cxl.run.sharded_checkpoint import is_sharded_checkpoint
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import is_cut, without_reducing
from lightning_cxl.sharding.processes import gather_on_machine, make_mesh


class ShardedAccelerator(Accelerator):  # type: ignore[misc]
    """Cuts models, follows them with optimizers, and writes their state together."""

    offload: UserLoop
    _models: list[nn.Module]
    _optimizers: list[Optimizer]
    _mesh: DeviceMesh | None = None

    def _check_processes(self) -> None:
        """Refuse processes that Accelerate has set up in another way.

        Raises:
            UnsupportedError: a plugin places models itself, or the processes cannot exchange what is on the host.
        """
        kind = self.distributed_type.value
        several = self.num_processes > 1
        if kind not in ("MULTI_CPU", "MULTI_GPU") and (several or kind != "NO"):
            raise UnsupportedError(
                f"{type(self).__name__} places models itself, and Accelerate is set up for {self.num_processes} "
                f"processes, kind {kind}. Launch without a plugin for DeepSpeed, FSDP or Megatron-LM."
            )
        backends = dist.get_backend_config() if dist.is_initialized() else "none"
        if several and "cpu:gloo" not in backends:
            raise UnsupportedError(
                f"{type(self).__name__} exchanges what is on the host through gloo, and Accelerate is set up for "
                f"{self.num_processes} processes, kind {kind}, with the backends {backends}. Give the accelerator "
                'kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")], or start it on the CPU.'
            )

    def _meet(self) -> None:
        """Make the mesh, and give this process its part of the machine."""
        if self.num_processes == 1:
            return
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or self.num_processes)
        session = self.offload.session
        machine = self.process_index // per_machine
        self._mesh = make_mesh(
            self.device, self.num_processes // per_machine, per_machine, replicate=session.config.replicate_machines
        )
        gather = partial(gather_on_machine, machine=machine)
        session.bind(self.process_index, self.local_process_index, per_machine, self.device, gather)

    def _cut(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Cut a model, if there are several processes and it is whole, and let its optimizers have its new parameters.

        Raises:
            UnsupportedError: an optimizer has stepped already, or see `cut_for`.
        """
        if self._mesh is None or is_cut(model):
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            if any(id(parameter) in names for parameter in optimizer.state):
                raise UnsupportedError(
                    f"this {type(optimizer).__name__} has state of whole weights, and its model is to be cut over "
                    f"{self.num_processes} processes: prepare both before the first step, then load the state"
                )
        cut_for(self.offload.session, model, self._mesh, self.device)
        follow(names, model, optimizers)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a region whose backwards exchange no gradients; the first one after it reduces the sum of all.

        `accumulate` uses it for all micro-batches of a step but the last one, unless
        ``GradientAccumulationPlugin(sync_each_batch=True)`` says otherwise. See Accelerate's `no_sync`.
        """
        with without_reducing(model):
            yield

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights of a model; with several processes whole and on the first one, empty on the others."""
        if not is_cut(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        inner = self._plain(model) if unwrap else model
        return get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Write what Accelerate does; models that are cut, and their optimizers, to a folder for each model in it."""
        if self._mesh is None:
            return super().save_state(output_dir, *args, **kwargs)
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            location = super().save_state(output_dir, *args, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        for index, model in enumerate(map(self._plain, models)):
            path = _folder(location, index)
            loop_files.save(path, model, self.offload.optimizers_of(model), self.offload, {})
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what several processes have written, in any number of them; else as Accelerate does.

        Raises:
            UnsupportedError: one process has written it, and there are several.
        """
        models, optimizers = list(map(self._plain, self._models)), list(self._optimizers)
        folders: list[str] = []

        def take_out(given: list[nn.Module], folder: str) -> None:
            if is_sharded_checkpoint(_folder(folder, 0)):
                folders.append(folder)
                given.clear()
                self._optimizers.clear()
            elif self._mesh is not None:
                raise UnsupportedError(
                    f"`{folder}` was written by one process, and {self.num_processes} are to load it: load it with "
                    "one. What several processes have written any number of them loads"
                )

        handle = self.register_load_state_pre_hook(take_out)
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            self._optimizers[:] = optimizers
            handle.remove()
        for folder in folders:
            for index, model in enumerate(models):
                numbered = dict(enumerate(self.offload.optimizers_of(model)))
                loop_files.load(_folder(folder, index), model, numbered, self.offload, strict=True)

    def _plain(self, model: nn.Module) -> nn.Module:
        unwrapped: nn.Module = self.unwrap_model(model, keep_torch_compile=False)
        return unwrapped


def _folder(state: str | Path, index: int) -> Path:
    return Path(state) / f"sharded_model_{index}"
