"""`ShardedStrategy`: the part of the Lightning strategy that is about a model cut over several processes."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.integrations.lightning.checkpoint_io import CXLCheckpointIO
from lightning_cxl.integrations.lightning.lightning_api import AsyncCheckpointIO, Trainer
from lightning_cxl.integrations.lightning.processes import ProcessesStrategy
from lightning_cxl.run.checkpoint import LoadedCheckpoint
from lightning_cxl.run.checkpoint_file import remove
from lightning_cxl.run.cutting import cut_for, cut_state
from lightning_cxl.run.session import Session
from lightning_cxl.run.sharded_checkpoint import TIED, AsyncSaves, is_sharded_checkpoint, save
from lightning_cxl.run.state_on_ssd import KEY, check_together
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.processes import gather_on_machine


class ShardedStrategy(ProcessesStrategy):
    """Cuts the model before its optimizers are made, calls what gathers it, and writes checkpoints together."""

    config: OffloadConfig
    _session: Session
    _root: nn.Module | None = None
    """The module whose call gathers what no unit has; None where nothing is cut."""
    _saves: AsyncSaves | None = None
    """Writes checkpoints while training goes on; None where training waits for them."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights of a checkpoint are loaded when they are in their places: only there is a shard known."""
        return self.is_distributed

    def setup_environment(self) -> None:
        """Prepare the device, let the processes meet, and give each its part of the machine."""
        super().setup_environment()
        if self.is_distributed:
            gather = partial(gather_on_machine, machine=self.node_rank)
            local = self.local_rank, self.num_processes
            self._session.bind(self.global_rank, self.world_size, *local, self.root_device, gather)

    def _cut_model(self) -> None:
        """Cut the model over all processes, if there are several. See [Note: Sharded models]."""
        if self.is_distributed:
            assert isinstance(self.model, nn.Module)
            self._warn_of_unused_io()
            root = self.model if getattr(self.model, "automatic_optimization", False) else None
            self._root = cut_for(self._session, self.model, self.device_mesh, self.root_device, root)

    def _warn_of_unused_io(self) -> None:
        given = self.checkpoint_io  # `AsyncCheckpointIO` asks for what `_open_saves` does: the plug-in in it writes
        io = given.checkpoint_io if isinstance(given, AsyncCheckpointIO) else given
        if self.is_global_zero and not isinstance(io, CXLCheckpointIO):
            warnings.warn(
                f"{type(io).__name__} writes no checkpoints here: {self.world_size} processes write each its part of a "
                "folder. It reads files of one process. Leave it out, or train with devices=1",
                LightningCXLWarning,
                stacklevel=2,
            )

    def _open_saves(self, trainer: Trainer) -> None:
        """Let checkpoints be written while training goes on, where the user asks for that with `AsyncCheckpointIO`."""
        if self.is_distributed and isinstance(self.checkpoint_io, AsyncCheckpointIO):
            on_all_ranks(partial(self._check_saves, trainer))
            engine = self._session.host_on(self.root_device).engine
            self._saves = AsyncSaves(self.timeout, engine.use_in_this_thread)

    def _check_saves(self, trainer: Trainer) -> None:
        if any(getattr(each, "save_last", None) == "link" for each in trainer.checkpoint_callbacks):
            raise ConfigError(
                "ModelCheckpoint(save_last='link') links to a checkpoint at once, and with AsyncCheckpointIO it is "
                "complete later: a run that is killed between would find no last one. Set save_last=True, or leave "
                "AsyncCheckpointIO out"
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
            warnings.warn(str(error), LightningCXLWarning, stacklevel=2)

    # -- steps: what Lightning calls must be the module that gathers -------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's `training_step`."""
        return self._call("training_step", self.precision_plugin.train_step_context, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's `validation_step`."""
        return self._call("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's `test_step`."""
        return self._call("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's `predict_step`."""
        return self._call("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _call(
        self, name: str, context: Callable[[], AbstractContextManager[Any]], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        module = self.lightning_module
        assert module is not None
        with ExitStack() as around:
            around.enter_context(context())
            if self._root is not None and torch.is_inference_mode_enabled():  # what is gathered is trained with later
                around.enter_context(torch.inference_mode(False))
                around.enter_context(torch.no_grad())
            if self._root is module:
                return self._forward_redirection(module, module, name, *args, **kwargs)
            return getattr(module, name)(*args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_together(self, checkpoint: Mapping[str, Any], own: Mapping[str, Any], filepath: Any) -> None:
        """Write a checkpoint, each process its shards. See [Note: Sharded checkpoints]."""
        states = checkpoint.get("optimizer_states", [])
        tensors = {"state_dict": checkpoint["state_dict"], **{f"optimizer_{i}": each for i, each in enumerate(states)}}
        assert isinstance(self.lightning_module, nn.Module)
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.lightning_module.named_parameters(remove_duplicate=False):
            names_of.setdefault(parameter, []).append(name)
        entry = {**own, TIED: [names for names in names_of.values() if len(names) > 1]}
        masters = entry.pop("master_weights", None)
        if masters:
            tensors[KEY] = {"master_weights": masters}
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

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the memory they have: what of them is here."""
        module = self.lightning_module
        assert module is not None
        if isinstance(checkpoint, LoadedCheckpoint) and checkpoint.folder is not None:
            checkpoint.folder.read_weights(module, strict=strict)
        elif self._root is not None:
            module.load_state_dict(cut_state(checkpoint["state_dict"], module), strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict)
