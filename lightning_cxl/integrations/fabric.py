"""`CXLFabricStrategy`: the strategy for Lightning Fabric, whose users write the training loop.

``fabric.setup(model, optimizer)`` places the model and adopts its optimizers; ``fabric.backward``, clipping and steps
are as ever. With several devices it is ``fabric.setup_module(model)``, which cuts the model, then the optimizer of what
it has now, and ``fabric.setup_optimizers(optimizer)``, as with Fabric's `ModelParallelStrategy`.
See [Note: Call order in a user's loop].
"""

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cxl.config import show_options
from lightning_cxl.devices import device_type_of
from lightning_cxl.errors import CheckpointError, UnsupportedError
from lightning_cxl.gradients.step import repoint_scheduler
from lightning_cxl.integrations import lightning
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.checkpoint import is_sharded_checkpoint
from lightning_cxl.run.session import cut_for, cut_state
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import without_reducing
from lightning_cxl.timing import timed

_UNKNOWN = Loop(writes_unseen=True)
_KEYS = "keys"  # in our entry of a folder: the user's names of the model and of the optimizers, in their order


class CXLFabricStrategy(lightning.CommonStrategy, lightning.FabricParallelStrategy):
    """Train with weights, gradients, optimizer state and activations on host memory tiers.

    Args:
        accelerator: filled in by Fabric.
        checkpoint_io: how checkpoints are written; ours (direct, atomic, memory-mapped) when None.
        precision: filled in by Fabric from ``precision=``.
        timeout: for which a rank waits for the others in a collective, where there are several; None is torch's own.
        **options: the fields of `OffloadConfig`.

    Raises:
        ConfigError: an option with an impossible value.

    Example::

        fabric = Fabric(strategy=CXLFabricStrategy(tiers={"dram": "48GiB"}))
        model, optimizer = fabric.setup(model, optimizer)
    """

    strategy_name = "cxl_offload"
    _num_nodes = 1  # filled in by Fabric

    def __init__(
        self,
        accelerator: lightning.Accelerator | None = None,
        checkpoint_io: lightning.CheckpointIO | None = None,
        precision: Any = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io or lightning.CXLCheckpointIO(), precision=precision
        )
        self.parallel_devices, self.cluster_environment = None, None  # filled in by Fabric
        self._backward_sync_control = _BackwardSync()  # type: ignore[assignment]
        self._begin(timeout, options)
        self._loop: UserLoop | None = None

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        return self._num_nodes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Which part of the data is for this process; None with one process, whose sampler stays."""
        return super().distributed_sampler_kwargs if self.is_distributed else None

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    def _configure_launcher(self) -> None:
        cluster = self.cluster_environment
        if self.is_distributed and cluster is not None and not cluster.creates_processes_externally:
            self._launcher = lightning.FabricLauncher(cluster, self.num_processes, self.num_nodes)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)

    @property
    def offload(self) -> UserLoop:
        if self._loop is None:
            if self.root_device.type != "cpu":
                device_type_of(self.root_device)
            self._loop = UserLoop(self._session, self.root_device, _UNKNOWN)
            scaler = getattr(self.precision, "scaler", None)
            if scaler is not None:
                self._loop.attach_scaler(scaler)
        return self._loop

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with super().module_init_context(empty_init=empty_init), self._creating():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module without weights, such as a metric; the weights of others move when they are set up."""
        if not any(True for _ in module.parameters()):
            module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Place a module for use without training, or until `setup_optimizer`; with several processes, cut it first."""
        if self.is_distributed:
            cut_for(self._session, module, self.device_mesh, self.root_device)
        self.offload.prepare(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self.offload.prepare(self.offload.model_of(optimizer), [optimizer])[0]

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if self.is_distributed:
            raise UnsupportedError(
                f"{type(self).__name__} cuts the model over {self.world_size} processes, and an optimizer that was "
                "made before has parameters that the model then has no more: call `model = fabric.setup_module(model)`,"
                " make the optimizer of `model.parameters()`, then call `fabric.setup_optimizers(optimizer)`"
            )
        adopted = self.offload.prepare(module, optimizers)
        for old, new in zip(optimizers, adopted, strict=True):
            if scheduler is not None and old is not new:
                repoint_scheduler(scheduler, old, new)
        return module, adopted, scheduler

    # `wraps`: Fabric looks whether a strategy has a backward of its own, and if so refuses `torch.autograd.grad`, too
    @functools.wraps(lightning.FabricParallelStrategy.backward)
    def backward(  # type: ignore[override]
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        with self.offload.backward(kwargs):
            super().backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        self.offload.before_clipping()
        norm = super().clip_gradients_norm(*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        self.offload.before_clipping()
        super().clip_gradients_value(*args, **kwargs)

    @timed("save_s", "save")
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a file ([Note: Optimizer files]), or with several processes a folder ([Note: Sharded checkpoints])."""
        if self.is_distributed:
            for name, value in {"storage_options": storage_options, "filter": filter}.items():
                if value is not None:
                    raise UnsupportedError(
                        f"`fabric.save({name}=...)` serves one process: with several each writes its part of a folder, "
                        f"all weights and all optimizer state. Leave `{name}` out"
                    )
            models = {key: each for key, each in state.items() if isinstance(each, nn.Module)}
            optimizers = {key: each for key, each in state.items() if isinstance(each, Optimizer)}
            if len(models) != 1:
                raise UnsupportedError(
                    f"a checkpoint of several processes has one model, and this state has {len(models)} "
                    f"({', '.join(models) or 'none'}): save each model, with its optimizers, to a path of its own"
                )
            rest = {
                key: each.state_dict() if hasattr(each, "state_dict") else each
                for key, each in state.items()
                if key not in models and key not in optimizers
            }
            rest[KEY] = {_KEYS: {"model": next(iter(models)), "optimizers": list(optimizers)}}
            folder = Path(self.broadcast(str(path)))
            self.offload.save_folder(folder, next(iter(models.values())), list(optimizers.values()), rest)
            return
        for run in self._session.runs:
            run.wait_for_updates()
            if run.on_ssd is not None:
                run.on_ssd.check_weights()
        super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        """Load objects from a file, or from a folder that any number of processes has written; see Fabric's `load`."""
        if not is_sharded_checkpoint(Path(path)):
            return super().load_checkpoint(path, state, strict, weights_only)
        from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint  # imports torch's checkpoints

        path = Path(path)
        options: Any = {"strict": strict, "weights_only": weights_only}
        if isinstance(state, nn.Module):
            self.offload.load_folder(path, state, {}, **options)
            return {}
        models = {key: each for key, each in (state or {}).items() if isinstance(each, nn.Module)}
        optimizers = {key: each for key, each in (state or {}).items() if isinstance(each, Optimizer)}
        if len(models) != 1:
            raise UnsupportedError(
                f"checkpoint `{path}` is of one model, and {len(models)} are to be loaded "
                f"({', '.join(models) or 'none'}): give `fabric.load` the model, alone or with its optimizers"
            )
        rest = ShardedCheckpoint(path).rest(weights_only=weights_only)
        known = (rest.pop(KEY, None) or {}).get(_KEYS) or {"model": "state_dict", "optimizers": []}
        have = (known["model"], *known["optimizers"], *rest)
        missing = [key for key in state if key not in have]
        if missing and strict:
            raise CheckpointError(f"checkpoint `{path}` has no `{missing[0]}`; it has {', '.join(map(repr, have))}")
        places = {key: number for number, key in enumerate(known["optimizers"])}
        numbered = {places[key]: each for key, each in optimizers.items() if key in places}
        self.offload.load_folder(path, next(iter(models.values())), numbered, **options)
        for key, each in list(state.items()):
            if key in rest and key not in models and key not in optimizers:
                value = rest.pop(key)
                if hasattr(each, "load_state_dict"):
                    each.load_state_dict(value)
                else:
                    state[key] = value
        return rest

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, cut_state(state_dict, module), strict)

    def teardown(self) -> None:
        loop, self._loop = self._loop, None
        try:
            if loop is not None:
                loop.close()
        finally:
            if self.cluster_environment is None:  # nobody has filled it in
                super(lightning.FabricParallelStrategy, self).teardown()
            else:
                super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without what is going on, which belongs to this process."""
        return {**vars(self), "_loop": None}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__, override=True)


class _BackwardSync:
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return without_reducing(module) if enabled else nullcontext()


show_options(CXLFabricStrategy)
# Fabric lets these two, and no others, go without `fabric.launch()`, as one process may. The other one is
# `SingleDeviceStrategy`, of which `fabric.no_backward_sync` asks nothing.
lightning.DataParallelStrategy.register(CXLFabricStrategy)
