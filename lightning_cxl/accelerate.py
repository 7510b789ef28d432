"""For Hugging Face Accelerate: `CXLAccelerator`."""

from lightning_cxl.integrations.accelerate.accelerator import CXLAccelerator

__all__ = ["CXLAccelerator"]
