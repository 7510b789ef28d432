"""The one place that imports Lightning.

Lightning is published twice, as `lightning` and as `pytorch_lightning`; the two have separate base classes and
separate strategy registries, and objects of one are refused by the other. The package follows whichever the program
has imported already, and takes `lightning` when it has imported none or both.
"""

import importlib
import sys
from typing import TYPE_CHECKING

_OTHER_FIRST = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules

if TYPE_CHECKING or not _OTHER_FIRST:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.dp import DataParallelStrategy
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
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

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
else:

    def __getattr__(name: str) -> object:
        """Import the command line, and jsonargparse with it, for the main job alone."""
        if name in ("LightningArgumentParser", "LightningCLI"):
            package = "pytorch_lightning" if _OTHER_FIRST else "lightning.pytorch"
            return getattr(importlib.import_module(f"{package}.cli"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
