"""The progress bar under the path that configurations name it by."""

from lightning_cxl.integrations.lightning.callbacks import OffloadProgressBar

__all__ = ["OffloadProgressBar"]
