"""`CXLOffloadStrategy`: the Lightning strategy. Thin: everything that trains lives in `Run`.

[Note: Call order under Lightning]
``tensor_init_context`` (configure_model: weights land on their tiers) -> ``setup`` (the user's optimizers made,
everything listed and decided, the run built, optimizers adopted: [Note: One inventory]) -> weights of a checkpoint were
loaded before ``setup``, optimizer state and masters after it -> per step: ``training_step``, ``backward`` (hooks
collect gradients; ``post_backward`` waits for them if they may be read next), clipping and
``on_before_optimizer_step`` (they read ``.grad`` of the optimizer's parameters: host gradients), ``optimizer.step`` ->
``teardown``, also after an exception or Ctrl-C.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cxl.config import show_options
from lightning_cxl.errors import ConfigError
from lightning_cxl.integrations.lightning.checkpoint_io import CXLCheckpointIO
from lightning_cxl.integrations.lightning.lightning_api import Accelerator, CheckpointIO, Precision, Trainer
from lightning_cxl.integrations.lightning.precision import (
    attach_scaling,
    check_masters_are_found,
    loop_of,
    unwrap,
    watch_for_edits,
)
from lightning_cxl.integrations.lightning.sharded import ShardedStrategy
from lightning_cxl.integrations.reporting import Reporting
from lightning_cxl.inventory.workload import Loop
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.run import checkpoint as ckpt
from lightning_cxl.run.host import Host
from lightning_cxl.run.run import Run
from lightning_cxl.run.session import Session
from lightning_cxl.run.sharded_checkpoint import is_sharded_checkpoint, optimizer_tensors
from lightning_cxl.run.state_on_ssd import StateOnSsd
from lightning_cxl.updates.adoption import repoint_scheduler
from lightning_cxl.weights.load import refuse_unready


class CXLOffloadStrategy(Reporting, ShardedStrategy):
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

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._session = Session(**options)
        self.config, self.config_origins = self._session.config, self._session.origins
        self.timeout, self.replicate_machines = timeout, self.config.replicate_machines

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    def host(self) -> Host:
        """Memory and policy of the next or present run; built at first use, replaced after teardown."""
        return self._session.host_on(self.root_device)

    @property
    def run(self) -> Run:
        """The run that is going on.

        Raises:
            RuntimeError: there is none.
        """
        run = self._session.run
        if run is None:
            raise RuntimeError(f"{type(self).__name__} has no run: it begins in `setup` and ends in `teardown`")
        return run

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create weights where their tier is, from the first byte; on a GPU, on it, unless they stream or are cut."""
        with super().tensor_init_context(empty_init=empty_init):
            if self.root_device.type == "cpu" or self.is_distributed or self.host.streams_weights:
                host = self.host
                with torch.device("cpu"), host.activate(), host.creating_weights():
                    yield
            else:
                yield

    def setup(self, trainer: Trainer) -> None:
        """Place the model, then adopt its optimizers; on failure nothing of it stays behind."""
        assert self.accelerator is not None and self.model is not None
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
        """List and decide everything, then build the run and adopt the optimizers. See [Note: One inventory]."""
        assert isinstance(self.model, nn.Module)
        refuse_unready(self.model)
        use = watch_for_edits(trainer)
        self._cut_model()
        self.setup_optimizers(trainer)
        before = set(self.model.parameters())
        self._start_run(self.optimizers, loop_of(trainer, use, self.config.on_overflow))
        if before != set(self.model.parameters()):  # some modules make new parameters when they move
            self.setup_optimizers(trainer)
        self._adopt_optimizers(trainer)
        self.setup_precision_plugin()
        attach_scaling(self.precision_plugin, self.run.guard, self._session.active, use)
        self._open_saves(trainer)

    def _start_run(self, optimizers: Sequence[Optimizer], loop: Loop) -> None:
        assert isinstance(self.model, nn.Module)
        if self.config.refers_to_ssd and not isinstance(self.checkpoint_io, CXLCheckpointIO):
            raise ConfigError(
                f"checkpoint='reference' of tier 'ssd' needs checkpoints that are on the drive when saving returns, "
                f"and {type(self.checkpoint_io).__name__} may write them later: leave `checkpoint_io` out, or set "
                f"checkpoint='copy'"
            )
        self._session.start(self.model, optimizers, loop)

    def model_to_device(self) -> None:
        """Move the model to its tiers (CPU) or to the device, and wrap its units; nothing is trained."""
        self._cut_model()
        self._start_run([], Loop())

    def _adopt_optimizers(self, trainer: Trainer) -> None:
        before = list(self.optimizers)
        adopted = self.run.adopt(before)
        for old, new in zip(before, adopted, strict=True):
            for config in self.lr_scheduler_configs if old is not new else ():
                repoint_scheduler(config.scheduler, old, new)
                self._session.active.callback(repoint_scheduler, config.scheduler, new, old)
        self.optimizers = adopted
        if self.run.masters.has_separate:
            check_masters_are_found(trainer)

    # -- training ----------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Make room for the backward pass."""
        self.run.start_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Wait for the gradients: clipping and the optimizer read them next."""
        self.run.finish_backward()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the activation arenas forget the step before; adopt what hooks have put into the optimizers since."""
        self.run.end_step()
        self.run.adopt_joined()

    # -- checkpoints -------------------------------------------------------------------------------------------------

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
            return optimizer_tensors(unwrap(optimizer), self._name_of())
        own = unwrap(optimizer)
        if self._on_ssd is not None and self._on_ssd.refers and isinstance(own, CPUAdam):
            return own.unread_state_dict()
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint with our entry beside it (not when only weights are saved)."""
        if self._session.run is not None:
            self.run.wait_for_updates()
            self.run.adopt_joined()
        if self._on_ssd is not None and self._root is None:  # else all processes do so together
            self._on_ssd.check_weights()
        run = self._session.trained
        if run is not None and checkpoint.get("optimizer_states"):
            optimizers = [unwrap(optimizer) for optimizer in self.optimizers]
            own = ckpt.entry_of(optimizers, run.masters, run.num_received)
            if self._root is not None:
                self._save_together(checkpoint, own, filepath)
                return
            with ckpt.refer_to_ssd(checkpoint, own, self._on_ssd, str(filepath)) as written:
                super().save_checkpoint(written, filepath, storage_options=storage_options)
        elif self._root is not None:
            self._save_together(checkpoint, {}, filepath)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what Lightning's own strategies return, which hooks get to see; our entry is hidden in it.

        Of a folder tensors are read when there is memory for them. See [Note: Sharded checkpoints]. All processes read
        what the first one names: each has looked for "last" by itself. What is being written is complete before.
        """
        if self._saves is not None:
            self._saves.wait()
        checkpoint_path = self.broadcast(checkpoint_path)
        if "://" not in str(checkpoint_path) and is_sharded_checkpoint(Path(checkpoint_path)):
            from lightning_cxl.run.sharded_reading import ShardedCheckpoint  # imports torch's checkpoints

            folder = ShardedCheckpoint(Path(checkpoint_path))
            return ckpt.LoadedCheckpoint(folder.rest(weights_only=weights_only), folder)
        return ckpt.LoadedCheckpoint(super().load_checkpoint(checkpoint_path, weights_only=weights_only))

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
            ckpt.load_folder(folder, own, optimizers, None if run is None else run.masters, name_of)
        else:
            ckpt.load_optimizers(optimizers, checkpoint["optimizer_states"], own, name_of, self._on_ssd)
        if isinstance(run, Run):
            for optimizer in optimizers:
                run.rehome_state(optimizer)
        if run is not None:
            run.num_received = own.get("num_gradients", 0)
            if folder is None:
                ckpt.restore_masters(own.get("master_weights"), run.masters, optimizers)

    def _name_of(self) -> Callable[[Tensor], str]:
        """Return what names parameters of the model, and masters of the run."""
        assert self.lightning_module is not None
        run = self._session.trained
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        return lambda p: names.get(p) or ("unnamed" if run is None else run.masters.name_of(p))

    @property
    def _on_ssd(self) -> StateOnSsd | None:
        return None if self._session.run is None else self.run.on_ssd

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Free everything but the model's weights and the optimizers' state, which belong to the user."""
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
        """Register ``strategy="cxl_offload"`` and its variants."""
        variants = {"cxl_offload": {}, "cxl_offload_optimizer": {"activation_offload": False}}  # the 2nd: no recompute
        for name, options in variants.items():
            strategy_registry.register(
                name, cls, description=f"{cls.__name__} {options or ''}".strip(), override=True, **options
            )


show_options(CXLOffloadStrategy)
