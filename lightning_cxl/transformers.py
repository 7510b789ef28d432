"""For the Trainer of transformers and those built on it: `CXLTrainer`, `CXLTrainerMixin`, `offload`."""

from lightning_cxl.integrations.transformers import CXLTrainer, CXLTrainerMixin, offload

__all__ = ["CXLTrainer", "CXLTrainerMixin", "offload"]
