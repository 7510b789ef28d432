"""The one place that imports Lightning.

Lightning is published twice, as `lightning` and as `pytorch_lightning`; the two have separate base classes and
separate strategy registries, and objects of one are refused by the other. The package follows whichever the program
has imported already, and takes `lightning` when it has imported none or both.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.dp import DataParallelStrategy
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import BaseFinetuning, RichProgressBar
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.types import OptimizerLRScheduler

    PACKAGE: str
else:

    def _chosen_package() -> str:
        """Return "lightning" or "pytorch_lightning"; see the module's docstring for the rule."""
        other_first = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        return "pytorch_lightning" if other_first else "lightning"

    PACKAGE = _chosen_package()
    _pytorch = "lightning.pytorch" if PACKAGE == "lightning" else "pytorch_lightning"
    _fabric = "lightning.fabric" if PACKAGE == "lightning" else "lightning_fabric"
    for _module, _names in {
        f"{_fabric}.plugins": ("CheckpointIO", "ClusterEnvironment", "TorchCheckpointIO"),
        f"{_fabric}.strategies": ("STRATEGY_REGISTRY", "DataParallelStrategy"),
        f"{_fabric}.utilities.distributed": ("_init_dist_connection",),
        f"{_fabric}.utilities.seed": ("reset_seed",),
        _pytorch: ("Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"),
        f"{_pytorch}.accelerators": ("Accelerator",),
        f"{_pytorch}.callbacks": ("BaseFinetuning", "RichProgressBar"),
        f"{_pytorch}.core.optimizer": ("LightningOptimizer",),
        f"{_pytorch}.plugins": ("Precision",),
        f"{_pytorch}.plugins.io": ("AsyncCheckpointIO",),
        f"{_pytorch}.strategies": ("ParallelStrategy", "Strategy", "StrategyRegistry"),
        f"{_pytorch}.strategies.launchers": ("_SubprocessScriptLauncher",),
        f"{_pytorch}.utilities": ("rank_zero_only",),
        f"{_pytorch}.utilities.types": ("OptimizerLRScheduler",),
    }.items():
        found = importlib.import_module(_module)
        globals().update({name.lstrip("_"): getattr(found, name) for name in _names})
    _launchers = importlib.import_module(f"{_fabric}.strategies.launchers.subprocess_script")
    FabricLauncher = _launchers._SubprocessScriptLauncher
    FabricParallelStrategy = importlib.import_module(f"{_fabric}.strategies").ParallelStrategy

    def __getattr__(name: str) -> object:
        """Import the command line, and jsonargparse with it, for the main job alone."""
        if name in ("LightningArgumentParser", "LightningCLI"):
            return getattr(importlib.import_module(f"{_pytorch}.cli"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def loaded_packages() -> tuple[str, ...]:
    """Return which of "lightning" and "pytorch_lightning" this process has imported; the one in use comes first."""
    loaded = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
    return tuple(sorted((name for name, root in loaded.items() if root in sys.modules), key=PACKAGE.__ne__))


def overridden(trainer: "Trainer", *names: str) -> set[str]:
    """Return those of the named hooks that the module or a callback of the user has its own version of."""
    own = own_methods(trainer.lightning_module, *names)
    for callback in getattr(trainer, "callbacks", []):
        own |= own_methods(callback, *names)
    return own


def own_methods(target: object, *names: str) -> set[str]:
    """Return those of the named methods that are neither Lightning's nor ours, of class or object.

    Of the object because that is what `LambdaCallback` does, and what ``module.hook = function`` does.
    """
    return {name for name in names if not _is_known(vars(target).get(name) or getattr(type(target), name, None))}


def _is_known(method: object) -> bool:
    if method is None:
        return True
    package = (getattr(method, "__module__", None) or "").partition(".")[0]
    return package in ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_cxl")


__all__ = [
    "PACKAGE",
    "STRATEGY_REGISTRY",
    "Accelerator",
    "AsyncCheckpointIO",
    "BaseFinetuning",
    "Callback",
    "CheckpointIO",
    "ClusterEnvironment",
    "DataParallelStrategy",
    "FabricLauncher",
    "FabricParallelStrategy",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningDataModule",
    "LightningModule",
    "LightningOptimizer",
    "OptimizerLRScheduler",
    "ParallelStrategy",
    "Precision",
    "RichProgressBar",
    "Strategy",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "TorchCheckpointIO",
    "Trainer",
    "init_dist_connection",
    "loaded_packages",
    "overridden",
    "own_methods",
    "rank_zero_only",
    "reset_seed",
    "seed_everything",
]
