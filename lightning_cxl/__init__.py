"""PyTorch Lightning strategy that keeps weights, gradients, optimizer state and activations in DRAM and CXL memory.

Importing this package registers ``Trainer(strategy="cxl_offload")`` and ``Fabric(strategy="cxl_offload")``.
"""

from lightning_cxl.commands.parsers import VERSION, answer_before_imports

answer_before_imports()  # `python -m lightning_cxl --help` comes through here, and need not wait for torch

from lightning_cxl.callbacks import OffloadProgressBar
from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import (
    CheckpointError,
    ConfigError,
    GradientOverflowError,
    LightningCXLError,
    LightningCXLWarning,
    MissingTierWarning,
    PinnedMemoryError,
    PlacementError,
    SpillWarning,
    StorageError,
    TierFullError,
    TierNotFoundError,
    UnsupportedError,
)
from lightning_cxl.integrations.fabric import CXLFabricStrategy
from lightning_cxl.integrations.lightning import STRATEGY_REGISTRY, CXLOffloadStrategy, StrategyRegistry
from lightning_cxl.machine.speeds import Machine, MachineTier, load_machine
from lightning_cxl.machine.topology import Node, Tier, TierKind, Topology
from lightning_cxl.memory.hook import empty, host_allocation, residency
from lightning_cxl.memory.placement import TensorRole, tier
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.planning.job import Job, MemoryClass, Move, predict_adam_seconds, predict_copy_seconds
from lightning_cxl.planning.policies import Decision, PlanningPolicy
from lightning_cxl.run.checkpoint import plain_checkpoint
from lightning_cxl.sequences.chunked_loss import chunked_loss
from lightning_cxl.sequences.packing import pack_sequences, packed_arguments
from lightning_cxl.weights.hf import from_pretrained, save_pretrained
from lightning_cxl.weights.models import LoadReport, empty_weights, load_weights, save_weights

__version__ = VERSION

__all__ = [
    "CPUAdam", "CXLFabricStrategy", "CXLOffloadStrategy", "CheckpointError", "ConfigError", "Decision",
    "GradientOverflowError", "Job", "LightningCXLError", "LightningCXLWarning", "LoadReport",
    "Machine", "MachineTier", "MemoryClass", "MissingTierWarning", "Move", "Node", "OffloadConfig",
    "OffloadProgressBar", "PinnedMemoryError", "PlacementError", "PlanningPolicy", "SpillWarning", "StorageError",
    "TensorRole", "Tier", "TierFullError", "TierKind", "TierNotFoundError", "Topology", "UnsupportedError",
    "chunked_loss", "empty", "empty_weights", "from_pretrained", "host_allocation", "load_machine", "load_weights",
    "pack_sequences", "packed_arguments", "plain_checkpoint", "predict_adam_seconds", "predict_copy_seconds",
    "residency", "save_pretrained", "save_weights", "tier",
]  # fmt: skip

CXLOffloadStrategy.register_strategies(StrategyRegistry)
CXLFabricStrategy.register_strategies(STRATEGY_REGISTRY)


def __getattr__(name: str) -> object:
    if name in ("Placement", "PlacementPolicy", "PlacementRequest", "RoleHomePolicy"):
        raise ImportError(
            f"lightning_cxl.{name} was removed: policies are asked once for the whole run (PlanningPolicy), the policy "
            "'by_role' takes the place of RoleHomePolicy, and `tier_rules` place single modules"
        )
    raise AttributeError(f"module 'lightning_cxl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
