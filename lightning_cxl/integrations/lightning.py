"""`CXLOffloadStrategy`: the Lightning strategy. `CommonStrategy`: what it shares with that for Fabric.

This is the one place that imports Lightning; others import its names from here.

With one device there is one process, which is on its own whatever a cluster calls it: no group, no launcher. Several
devices or machines have a process for each device, which start and meet as those of Lightning's `ModelParallelStrategy`
do. Everything that trains lives in `Run`.

[Note: Call order under Lightning]
``tensor_init_context`` (configure_model: weights land on their tiers) -> ``setup`` (the user's optimizers made,
everything listed and decided, the run built, optimizers adopted: [Note: One plan]) -> weights of a checkpoint were
loaded before ``setup``, optimizer state and masters after it -> per step: ``training_step``, ``backward`` (hooks
collect gradients; ``post_backward`` waits for them if they may be read next), clipping and
``on_before_optimizer_step`` (they read ``.grad`` of the optimizer's parameters: host gradients), ``optimizer.step`` ->
``teardown``, also after an exception or Ctrl-C.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_cxl.config import OffloadConfig, show_options
from lightning_cxl.devices import device_type_of
from lightning_cxl.errors import ConfigError, UnsupportedError, warn
from lightning_cxl.gradients.guard import HostClip, HostUnscale, ReplacedMethod
from lightning_cxl.gradients.step import repoint_scheduler
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.run import checkpoint as ckpt
from lightning_cxl.run.checkpoint import TIED, is_sharded_checkpoint, load_file, remove, save_file
from lightning_cxl.run.run import Host, Run
from lightning_cxl.run.session import Session, cut_for, cut_state, follow
from lightning_cxl.run.state_on_ssd import KEY, StateOnSsd, check_together
from lightning_cxl.run.user_loop import BeforeForward, end_earlier_trainings, methods_of_others, put_back
from lightning_cxl.sharding import processes
from lightning_cxl.timing import timed
from lightning_cxl.torch_private import UNSCALE, step_hooks
from lightning_cxl.weights.models import refuse_unready

# Lightning is published twice, as `lightning` and as `pytorch_lightning`; the two have separate base classes and
# separate strategy registries, and objects of one are refused by the other. The package follows whichever the program
# has imported already, and takes `lightning` when it has imported none or both.
_OTHER_FIRST = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules

if TYPE_CHECKING or not _OTHER_FIRST:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.dp import DataParallelStrategy
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import BaseFinetuning, RichProgressBar
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
else:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning_fabric.strategies import STRATEGY_REGISTRY
    from lightning_fabric.strategies.dp import DataParallelStrategy
    from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning_fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning_fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.seed import reset_seed
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from pytorch_lightning.accelerators import Accelerator
    from pytorch_lightning.callbacks import BaseFinetuning, RichProgressBar
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.plugins import Precision
    from pytorch_lightning.plugins.io import AsyncCheckpointIO
    from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
    from pytorch_lightning.utilities import rank_zero_only
    from pytorch_lightning.utilities.types import OptimizerLRScheduler

__all__ = [  # what other modules take from here of Lightning's
    "STRATEGY_REGISTRY", "Accelerator", "Callback", "CheckpointIO", "DataParallelStrategy", "FabricLauncher",
    "FabricParallelStrategy", "LightningArgumentParser", "LightningCLI", "LightningDataModule", "LightningModule",
    "MisconfigurationException", "OptimizerLRScheduler", "RichProgressBar", "StrategyRegistry", "Trainer",
    "seed_everything",
]  # fmt: skip

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    from lightning_cxl.run.sharded_checkpoint import AsyncSaves  # imports torch's checkpoints
else:

    def __getattr__(name: str) -> object:
        """Import the command line, and jsonargparse with it, for the main job alone."""
        if name in ("LightningArgumentParser", "LightningCLI"):
            package = "pytorch_lightning" if _OTHER_FIRST else "lightning.pytorch"
            return getattr(importlib.import_module(f"{package}.cli"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


log = logging.getLogger(__name__)

_KNOWN = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_cxl")
"""Packages whose modules, callbacks and plugins neither read nor write gradients."""
Defers = Callable[[Optimizer], bool]  # whether unscaling and clipping may be left to the step of an optimizer


_Base: Any = object  # two frameworks have each a class of their own behind `super()`


class CXLCheckpointIO(TorchCheckpointIO):
    """Writes local files directly and atomically, and reads them through a memory map.

    Lightning's own writer builds the whole file in memory first, its reader holds a full copy until training starts:
    both add the size of the model and optimizer to the peak. Remote paths go through Lightning's code unchanged.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            save_file(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if "://" in str(path):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        return load_file(Path(path), map_location, weights_only)


class CommonStrategy(_Base):  # type: ignore[misc]
    """Before Lightning's or Fabric's `ParallelStrategy` in the bases of a strategy.

    The framework fills in the devices, the number of machines and the cluster environment that it has found.
    """

    num_nodes = 1
    cluster_environment: Any
    config: OffloadConfig
    timeout: timedelta | None = None
    """For which a rank waits for the others in a collective; None is torch's own."""
    _device_mesh: DeviceMesh | None = None

    def _begin(self, timeout: timedelta | None, options: dict[str, Any]) -> None:
        self._session = Session(**options)
        self.config, self.config_origins = self._session.config, self._session.origins
        self.timeout = timeout

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or [None])

    @property
    def is_distributed(self) -> bool:
        return self.num_nodes * self.num_processes > 1

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, with dimension ``shard``; before it ``replicate``, where every machine has all of the state."""
        if self._device_mesh is None:
            raise RuntimeError(
                f"{type(self).__name__} has no device mesh: it is there after `setup_environment` (Fabric: `launch`), "
                f"where there are several devices; there are {self.num_nodes * self.num_processes} here"
            )
        return self._device_mesh

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and what prints on one rank alone, which process this is."""
        if not self.is_distributed:
            self.cluster_environment = None  # without one, rank and number of processes are those of one process
        elif self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        if self.root_device.type != "cpu":
            device_type_of(self.root_device)
        super().setup_environment()
        if self.is_distributed:
            self._meet()
            gather = partial(processes.gather_on_machine, machine=self.node_rank)
            local = self.local_rank, self.num_processes
            self._session.bind(self.global_rank, self.world_size, *local, self.root_device, gather)

    def _meet(self) -> None:
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        options: dict[str, Any] = {} if self.timeout is None else {"timeout": self.timeout}
        if (store := processes.store_of_restart(os.environ)) is not None:
            options["store"] = store
        if (backend := processes.backend_for(self.root_device)) != dist.Backend.GLOO:
            options["device_id"] = self.root_device
        init_dist_connection(self.cluster_environment, backend, self.global_rank, self.world_size, **options)
        self._device_mesh = processes.make_mesh(
            self.root_device, self.num_nodes, self.num_processes, replicate=self.config.replicate_machines
        )

    @contextmanager
    def _creating(self) -> Iterator[None]:
        """Create weights where their tier is, from the first byte; on a GPU, on it, unless they stream or are cut."""
        host = self._session.host_on(self.root_device)
        if self.root_device.type == "cpu" or self.is_distributed or host.streams_weights:
            with torch.device("cpu"), host.activate(), host.creating_weights():
                yield
        else:
            yield

    def barrier(self, name: str | None = None) -> None:
        if self._has_met:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return processes.broadcast(obj, src) if self._has_met else obj

    def _reduce(self, tensor: Any, group: Any, op: Any) -> Any:
        return processes.reduce(tensor, group, op) if self._has_met and isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._has_met else tensor

    @property
    def _has_met(self) -> bool:
        return self.is_distributed and dist.is_initialized()

    def metrics(self) -> dict[str, float]:
        """Return numbers of the steps since the last call, such as for ``fabric.log_dict``; see `Session.metrics`."""
        return self._session.metrics()

    def report(self) -> dict[str, Any]:
        return self._session.report(self.root_device)

    def __str__(self) -> str:
        return self._session.describe(type(self).__name__, self.root_device)

    def __repr__(self) -> str:
        return self._session.describe_options(type(self).__name__)


class CXLOffloadStrategy(CommonStrategy, ParallelStrategy):
    """Train with weights, gradients, optimizer state and activations on host memory tiers.

    Args:
        accelerator: filled in by the Trainer.
        checkpoint_io: how checkpoints are written; ours (direct, atomic, memory-mapped) when None.
        precision_plugin: filled in by the Trainer from ``precision=``.
        timeout: for which a rank waits for the others in a collective, where there are several; None is torch's own.
        **options: the fields of `OffloadConfig`.

    Raises:
        ConfigError: an option with an impossible value.

    Example::

        import lightning_cxl
        trainer = Trainer(strategy="cxl_offload")
        trainer = Trainer(strategy=lightning_cxl.CXLOffloadStrategy(tiers={"dram": "16GiB"}))
    """

    strategy_name = "cxl_offload"
    _root: nn.Module | None = None
    """The module whose call gathers what no unit has; None where nothing is cut."""
    _saves: "AsyncSaves | None" = None
    """Writes checkpoints while training goes on; None where training waits for them."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._begin(timeout, options)

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            assert self.cluster_environment is not None
            self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _meet(self) -> None:
        super()._meet()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # users find it there in `configure_model`

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)

    @property
    def host(self) -> Host:
        """Memory and policy of the next or present run; built at first use, replaced after teardown."""
        return self._session.host_on(self.root_device)

    @property
    def run(self) -> Run:
        run = self._session.run
        if run is None:
            raise RuntimeError(f"{type(self).__name__} has no run: it begins in `setup` and ends in `teardown`")
        return run

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with super().tensor_init_context(empty_init=empty_init), self._creating():
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        end_earlier_trainings(self.model)
        try:
            self._session.open(self.root_device)
            self.accelerator.setup(trainer)
            self.model = self.precision_plugin.convert_module(self.model)
            if trainer.state.fn == "fit":
                self._setup_fit(trainer)
            else:
                self.model_to_device()
                self.setup_precision_plugin()
        except BaseException:
            self._session.close(after_error=True)
            raise

    def _setup_fit(self, trainer: Trainer) -> None:
        """List and decide everything, then build the run and adopt the optimizers. See [Note: One plan]."""
        assert isinstance(self.model, nn.Module)
        refuse_unready(self.model)
        self._cut_model()
        self.setup_optimizers(trainer)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        loop, defers = loop_of(trainer, self.config.on_overflow)
        self._start_run(self.optimizers, loop)
        follow(names, self.model, self.optimizers)  # some modules make new parameters when they move
        run, active, before = self.run, self._session.active, list(self.optimizers)
        self.optimizers = run.adopt(before)
        for old, new in zip(before, self.optimizers, strict=True):
            for config in self.lr_scheduler_configs if old is not new else ():
                repoint_scheduler(config.scheduler, old, new)
                active.callback(repoint_scheduler, config.scheduler, new, old)
        if run.masters.has_separate and self.is_distributed:
            warn_of_hidden_gradients(trainer)
        if run.masters.has_separate and not getattr(self.lightning_module, "automatic_optimization", True):
            # a step may call the model several times; SAM writes to `optimizer.param_groups` in between
            hook, inside = BeforeForward(run), tuple(f"{name}." for name in run.units)
            for name, module in self.model.named_modules():
                if not name.startswith(inside):
                    active.callback(module.register_forward_pre_hook(hook).remove)
        for callback in getattr(trainer, "callbacks", []):
            if isinstance(callback, BaseFinetuning):
                active.callback(put_back, callback, _EPOCH, vars(callback).get(_EPOCH))
                setattr(callback, _EPOCH, _ComparesWithModel(callback.on_train_epoch_start, run))
        self.setup_precision_plugin()
        # clipping and a loss scaler work on host gradients, without a pass of their own where that is allowed
        plugin, unscale = self.precision_plugin, None
        scaler: Any = getattr(plugin, "scaler", None)
        if scaler is not None:
            unscale = HostUnscale(scaler, unwrap, defers, run.guard)
            setattr(scaler, UNSCALE, unscale)
            active.callback(put_back, scaler, UNSCALE, None)
        active.callback(put_back, plugin, "clip_grad_by_norm", vars(plugin).get("clip_grad_by_norm"))
        clip = HostClip(plugin.clip_grad_by_norm, unwrap, defers, run.guard, unscale)
        plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
        self._open_saves(trainer)

    def _start_run(self, optimizers: Sequence[Optimizer], loop: Loop) -> None:
        assert isinstance(self.model, nn.Module)
        if self.config.refers_to_ssd and not isinstance(self.checkpoint_io, CXLCheckpointIO):
            raise ConfigError(
                "checkpoint='reference' of tier 'ssd' needs checkpoints that are on the drive when saving returns, and "
                f"{type(self.checkpoint_io).__name__} may write later: leave it out, or set checkpoint='copy'"
            )
        self._session.start(self.model, optimizers, loop)

    def model_to_device(self) -> None:
        """Move the model to its tiers (CPU) or to the device, and wrap its units; nothing is trained."""
        self._cut_model()
        self._start_run([], Loop())

    def _cut_model(self) -> None:
        if self.is_distributed:
            assert isinstance(self.model, nn.Module)
            given = self.checkpoint_io  # `AsyncCheckpointIO` asks for what `_open_saves` does: the plug-in in it writes
            io = given.checkpoint_io if isinstance(given, AsyncCheckpointIO) else given
            if self.is_global_zero and not isinstance(io, CXLCheckpointIO):
                warn(
                    f"{type(io).__name__} writes no checkpoints here: {self.world_size} processes write each its part "
                    "of a folder. It reads files of one process. Leave it out, or train with devices=1"
                )
            root = self.model if getattr(self.model, "automatic_optimization", False) else None
            self._root = cut_for(self._session, self.model, self.device_mesh, self.root_device, root)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.run.check_backward(kwargs)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.run.start_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        self.run.finish_backward()  # clipping and the optimizer read gradients next

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the activation arenas forget the step before; take in what hooks have put into the optimizers since."""
        self.run.end_step()
        self.run.start_forward()
        adopted = [*map(id, self.run.optimizers)]
        if not all(id(unwrap(optimizer)) in adopted for optimizer in self.optimizers):
            raise UnsupportedError(
                "`trainer.optimizers` has a new optimizer in the middle of a run, which would find no gradients. "
                "Change `optimizer.param_groups` or call `optimizer.add_param_group`; for another optimizer, end this "
                "`trainer.fit` and call it again with a module whose `configure_optimizers` returns it"
            )
        self.run.adopt_joined()
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning's own callbacks count
        every = trainer.log_every_n_steps  # 0: never
        if step and every and step % every == 0 and trainer.loggers and (metrics := self.metrics()):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step - 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("training_step", self.precision_plugin.train_step_context, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _call(
        self, name: str, context: Callable[[], AbstractContextManager[Any]], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        module = self.lightning_module
        assert module is not None
        # what Lightning calls must be the module that gathers
        with ExitStack() as around:
            around.enter_context(context())
            if self._root is not None and torch.is_inference_mode_enabled():  # what is gathered is trained with later
                around.enter_context(torch.inference_mode(False))
                around.enter_context(torch.no_grad())
            if self._root is module:
                return self._forward_redirection(module, module, name, *args, **kwargs)
            return getattr(module, name)(*args, **kwargs)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights of a checkpoint are loaded when they are in their places: only there is a shard known."""
        return self.is_distributed

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plug-in that writes and reads files; a wrapper without one of its own gets ours."""
        if self._checkpoint_io is None:
            self._checkpoint_io = CXLCheckpointIO()
        elif getattr(self._checkpoint_io, "checkpoint_io", self) is None:
            self._checkpoint_io.checkpoint_io = CXLCheckpointIO()  # type: ignore[attr-defined]
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer for a checkpoint; one that refers to state on SSD needs no values of it."""
        if self._root is not None:
            from lightning_cxl.run.sharded_checkpoint import optimizer_tensors

            return optimizer_tensors(unwrap(optimizer), self._name_of())
        own = unwrap(optimizer)
        if self._on_ssd is not None and self._on_ssd.refers and isinstance(own, CPUAdam):
            return own.unread_state_dict()
        return super().optimizer_state(optimizer)

    @timed("save_s", "save")
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint with our entry beside it (not when only weights are saved)."""
        if self._session.run is not None:
            self.run.wait_for_updates()
            self.run.adopt_joined()
        if self._on_ssd is not None and self._root is None:  # else all processes do so together
            self._on_ssd.check_weights()
        run, own = self._session.trained, {}
        if run is not None and checkpoint.get("optimizer_states"):
            own = ckpt.entry_of([unwrap(optimizer) for optimizer in self.optimizers], run.masters, run.num_received)
        if self._root is not None:
            self._save_together(checkpoint, own, filepath)
        elif own:
            with ckpt.refer_to_ssd(checkpoint, own, self._on_ssd, str(filepath)) as written:
                super().save_checkpoint(written, filepath, storage_options=storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _save_together(self, checkpoint: Mapping[str, Any], own: Mapping[str, Any], filepath: Any) -> None:
        from lightning_cxl.run.sharded_checkpoint import save, tensors_of_folder  # imports torch's checkpoints

        states = checkpoint.get("optimizer_states", [])
        assert isinstance(self.lightning_module, nn.Module)
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.lightning_module.named_parameters(remove_duplicate=False):
            names_of.setdefault(parameter, []).append(name)
        entry = {**own, TIED: [names for names in names_of.values() if len(names) > 1]}
        tensors = tensors_of_folder(checkpoint["state_dict"], states, entry)
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        check_together(None if self._session.run is None else self._session.run.on_ssd, state=bool(states))
        begin = save if self._saves is None else self._saves.save
        begin(Path(self.broadcast(str(filepath))), tensors, {**rest, KEY: entry})

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, a folder at once; where one is being written, when that is complete."""
        if self._saves is None:
            self._remove(filepath)
        elif self.is_global_zero:
            self._saves.then(partial(self._remove, filepath))

    def _remove(self, filepath: Any) -> None:
        path = Path(filepath)
        if "://" in str(filepath) or path.is_symlink() or not is_sharded_checkpoint(path):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            remove(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what Lightning's own strategies return, which hooks get to see; our entry is hidden in it.

        Of a folder tensors are read when there is memory for them. See [Note: Sharded checkpoints]. All processes read
        what the first one names: each has looked for "last" by itself. A save that is going on ends before.
        """
        if self._saves is not None:
            self._saves.wait()
        checkpoint_path = self.broadcast(checkpoint_path)
        if "://" not in str(checkpoint_path) and is_sharded_checkpoint(Path(checkpoint_path)):
            from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint

            folder = ShardedCheckpoint(Path(checkpoint_path))
            return ckpt.LoadedCheckpoint(folder.rest(weights_only=weights_only), folder)
        return ckpt.LoadedCheckpoint(super().load_checkpoint(checkpoint_path, weights_only=weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        if isinstance(checkpoint, ckpt.LoadedCheckpoint) and checkpoint.folder is not None:
            checkpoint.folder.read_weights(module, strict=strict)
        elif self._root is not None:
            module.load_state_dict(cut_state(checkpoint["state_dict"], module), strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer state into the host memory it has, by parameter name, then the master weights.

        Where no run is going on it goes into what the last one left, or into the optimizers as the user made them.
        """
        assert self.lightning_module is not None
        own, run = ckpt.own_entry(checkpoint), self._session.trained
        if isinstance(run, Run):
            run.adopt_joined()
        optimizers, name_of = [unwrap(optimizer) for optimizer in self.optimizers], self._name_of()
        folder = checkpoint.folder if isinstance(checkpoint, ckpt.LoadedCheckpoint) else None
        if folder is not None:
            folder.load_optimizers(optimizers, None if run is None else run.masters, name_of)
        else:
            ckpt.load_optimizers(optimizers, checkpoint["optimizer_states"], own, name_of, self._on_ssd)
        if isinstance(run, Run):
            for optimizer in optimizers:
                run.place_state(optimizer)
        if run is not None:
            run.num_received = own.get("num_gradients", 0)
            if folder is None:
                ckpt.restore_masters(own.get("master_weights"), run.masters, optimizers)

    def _name_of(self) -> Callable[[Tensor], str]:
        assert self.lightning_module is not None
        run = self._session.trained
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        return lambda p: names.get(p) or ("unnamed" if run is None else run.masters.name_of(p))

    @property
    def _on_ssd(self) -> StateOnSsd | None:
        return None if self._session.run is None else self.run.on_ssd

    def _open_saves(self, trainer: Trainer) -> None:
        """Let checkpoints be written while training goes on, where the user asks for that with `AsyncCheckpointIO`."""
        if self.is_distributed and isinstance(self.checkpoint_io, AsyncCheckpointIO):
            from lightning_cxl.run.sharded_checkpoint import AsyncSaves

            processes.on_all_ranks(partial(self._check_saves, trainer))
            engine = self._session.host_on(self.root_device).engine
            self._saves = AsyncSaves(self.timeout, engine.use_in_this_thread)

    def _check_saves(self, trainer: Trainer) -> None:
        if any(getattr(each, "save_last", None) == "link" for each in trainer.checkpoint_callbacks):
            raise ConfigError(
                "ModelCheckpoint(save_last='link') links to a checkpoint at once, and with AsyncCheckpointIO it is "
                "complete later: a run that is killed between would find none. Set save_last=True"
            )
        run = self._session.run
        if run is not None and run.on_ssd is not None and run.on_ssd.has_saved:
            raise UnsupportedError(
                "optimizer state or weights of this run lie on tier 'ssd', and AsyncCheckpointIO would copy them to "
                "memory at every save. Leave AsyncCheckpointIO out: training then waits until the checkpoint is written"
            )

    def _close_saves(self, *, after_error: bool) -> None:
        """Wait for what is being written. After an error, what failed there is only told: it hides nothing."""
        saves, self._saves = self._saves, None
        if saves is None:
            return
        try:
            saves.close()
        except Exception as error:
            if not after_error:
                raise
            warn(str(error))

    def teardown(self) -> None:
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            if self.cluster_environment is not None:
                cleanup.callback(self.cluster_environment.teardown)
            if self.accelerator is not None:
                cleanup.callback(self.accelerator.teardown)
            cleanup.callback(self.precision_plugin.teardown)
            if self.lightning_module is not None and self.root_device.type != "cpu" and self._root is None:
                cleanup.callback(self.lightning_module.cpu)
            trainer = None if self.lightning_module is None else self.lightning_module._trainer
            after_error = trainer is not None and trainer.interrupted
            cleanup.callback(self._session.close, after_error=after_error)
            cleanup.callback(self._close_saves, after_error=after_error)
            cleanup.callback(self.checkpoint_io.teardown)  # it may still be writing

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        variants = {"cxl_offload": {}, "cxl_offload_optimizer": {"activation_offload": False}}  # the 2nd: no recompute
        for name, options in variants.items():
            strategy_registry.register(
                name, cls, description=f"{cls.__name__} {options or ''}".strip(), override=True, **options
            )


show_options(CXLOffloadStrategy)


class _Launcher(SubprocessScriptLauncher):
    """Names an error before callbacks get it: one that saves then waits for other ranks, and may end with theirs."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                log.error("rank %s fails: %s: %s", rank_zero_only.rank, type(error).__name__, error)  # type: ignore[attr-defined]
                raise

        return super().launch(call, *args, trainer=trainer, **kwargs)


_EPOCH = "on_train_epoch_start"


class _ComparesWithModel(ReplacedMethod):
    """Stands in for that method of a `BaseFinetuning`, which looks for the optimizer's parameters in the model."""

    def __init__(self, plain: Callable[..., None], run: Run) -> None:
        super().__init__(plain)
        self._run = run

    def __call__(self, *args: Any) -> None:
        with self._run.showing_model(), _SameParameters():
            self._plain(*args)


class _SameParameters(TorchFunctionMode):
    """Lets parameters be equal that are the same: torch refuses to compare values on the host and on a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal and len(args) == 2 and all(isinstance(each, nn.Parameter) for each in args):
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))


def warn_of_hidden_gradients(trainer: Trainer) -> None:
    """Warn where the module does not find the gradients of master weights: shards do not show them."""
    module = trainer.lightning_module
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    own = methods_of_others(module, hooks, _KNOWN)
    if own:
        warn(
            f"{type(module).__name__} overrides {', '.join(sorted(own))}: gradients are on the parameters in "
            "`optimizer.param_groups`, on the host; `p.grad` of the model's own parameters is None there."
        )


def loop_of(trainer: Trainer, on_overflow: str) -> tuple[Loop, Defers]:
    """Return what the Trainer, its callbacks and the module do around a step. See [Note: Measured gradients]."""
    module, plugin, callbacks = trainer.lightning_module, trainer.precision_plugin, getattr(trainer, "callbacks", [])

    def overridden(*names: str) -> bool:
        return any(methods_of_others(each, names, _KNOWN) for each in (module, *callbacks))

    manual = not module.automatic_optimization
    scales, clips = getattr(plugin, "scaler", None) is not None, trainer.gradient_clip_val
    step = ("on_before_optimizer_step", "configure_gradient_clipping")
    # between backward and step, perhaps through `.data`
    edits = manual or overridden("backward", "on_after_backward", "optimizer_step", "optimizer_zero_grad", *step)
    edits = edits or bool(methods_of_others(plugin, ("backward", "post_backward"), _KNOWN))
    # before the next backward: they must be unscaled and clipped where they are; a plugin's own clipping works on what
    # it finds, and values are clipped when they are unscaled
    reads = manual or overridden("on_before_zero_grad", "on_train_batch_end", *step)
    reads = reads or bool(methods_of_others(plugin, ("clip_gradients", "clip_grad_by_norm", "main_params"), _KNOWN))
    reads = reads or bool(clips and trainer.gradient_clip_algorithm == "value")
    # between micro-batches, or before the closure of a step is over
    early = overridden("on_train_batch_start", "on_before_backward") or scales
    early = early or bool(methods_of_others(plugin, ("optimizer_step",), _KNOWN))
    # writes to weights, perhaps through `.data`, between a step and the next forward
    between = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad", "optimizer_step")
    why_whole = None
    if manual:
        why_whole = "the module optimizes manually"
    elif edits or reads:
        why_whole = "a hook of the module, a callback or a plugin may read gradients"
    elif clips:
        why_whole = "gradient_clip_val needs the norm of all gradients first"
    elif scales:
        why_whole = "the loss scaler reads all gradients first"
    elif on_overflow == "skip" or (on_overflow == "error" and trainer.world_size > 1):  # all processes must agree
        why_whole = f"on_overflow={on_overflow!r} may call the step off"
        why_whole += " ('error' need not wait: it ends the run)" if trainer.world_size == 1 else ""
    schedules = [getattr(callback, "going_to_accumulate_grad_batches", None) for callback in callbacks]
    loop = Loop(
        accumulates=trainer.accumulate_grad_batches > 1 or any(asked() for asked in schedules if asked is not None),
        needs_whole_step=why_whole,
        reads_gradients=edits or reads or early,
        edits_gradients=edits,
        writes_unseen=manual or overridden(*between),
    )
    return loop, lambda optimizer: not (reads or step_hooks(optimizer)[0])


def unwrap(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
