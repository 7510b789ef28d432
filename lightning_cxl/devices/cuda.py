"""`CudaDevices`: NVIDIA GPUs (and AMD's, whose torch answers to the same name)."""

import contextlib

import torch

from lightning_cxl.errors import PinnedMemoryError
from lightning_cxl.units import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class CudaDevices:
    """The seam to CUDA; see `DeviceType`."""

    name = "cuda"

    def num_devices(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def describe(self, index: int) -> tuple[str, int]:
        properties = torch.cuda.get_device_properties(index)
        return properties.name, properties.total_memory

    def pci_address(self, index: int) -> str | None:
        properties = torch.cuda.get_device_properties(index)
        # torch's annotations leave these out
        domain, bus, device = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def register(self, address: int, nbytes: int) -> None:
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # torch without CUDA, or no driver
            raise PinnedMemoryError(f"CUDA cannot be used: {error}") from error
        if code == 0:
            return
        # the failure also stays behind as the runtime's "last error": let a launch that does not matter report it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise PinnedMemoryError(f"cudaHostRegister of {format_bytes(nbytes)} failed with CUDA error {code}")

    def unregister(self, address: int) -> None:
        """Undo `register`. Never raises: it runs while buffers die, when the driver may be gone already."""
        with contextlib.suppress(Exception):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
