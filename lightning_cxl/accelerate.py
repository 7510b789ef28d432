"""For Hugging Face Accelerate: `CXLAccelerator`."""

from lightning_cxl.integrations.accelerate import CXLAccelerator

__all__ = ["CXLAccelerator"]
