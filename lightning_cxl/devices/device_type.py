"""`DeviceType`: the seam to one kind of device; everything else speaks to devices through `torch.accelerator`.

A device type that torch knows needs one such object to be offloaded from. `register_device_type` adds it.
"""

import contextlib
from typing import NamedTuple, Protocol

import torch

from lightning_cxl.errors import PinnedMemoryError, UnsupportedError
from lightning_cxl.text import format_bytes

# ----------------------------------------------------------------------------------------------------
# `CudaDevices`: NVIDIA GPUs (and AMD's, whose torch answers to the same name).

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


class DeviceInfo(NamedTuple):
    """A device that copies go to and from, besides the CPU."""

    device: torch.device
    name: str
    memory_bytes: int


class DeviceType(Protocol):
    """The operations that differ between kinds of devices."""

    @property
    def name(self) -> str:
        """The type of ``torch.device``, such as ``"cuda"``."""

    def num_devices(self) -> int:
        """Return how many devices this process can use; 0 where torch or the machine has none."""

    def describe(self, index: int) -> tuple[str, int]:
        """Return the name of a device and its memory in bytes."""

    def pci_address(self, index: int) -> str | None:
        """Return where a device is on the machine's PCI buses, as in ``"0000:dc:00.0"``; None where it is on none."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock ``[address, address + nbytes)`` and let the driver of every device copy from and to it directly."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Never raises: it runs while buffers die, when the driver may be gone already."""


_known: dict[str, DeviceType] = {"cuda": CudaDevices()}


def register_device_type(device_type: DeviceType) -> None:
    """Make `device_type` one that runs can offload from; it takes the place of one with the same name."""
    _known[device_type.name] = device_type


def device_type_of(device: torch.device) -> DeviceType:
    """Return the seam to the kind of `device`."""
    if device.type not in _known:
        names = ", ".join(f"`{name}`" for name in ("cpu", *_known))
        raise UnsupportedError(
            f"weights and activations cannot be offloaded from `{device}`: this version knows {names}. "
            "Use one of these: Lightning and Fabric have `accelerator=`, Accelerate and transformers `cpu=True` and "
            "`use_cpu=True`."
        )
    return _known[device.type]


def process_device_type() -> DeviceType:
    """Return the kind of this process's accelerator; without one CUDA's, whose errors then say what is missing."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _known.get("" if accelerator is None else accelerator.type, _known["cuda"])


def devices_apart() -> tuple[DeviceInfo, ...]:
    """Return the devices of this process that have memory of their own, none where torch or the machine has none."""
    return tuple(
        DeviceInfo(torch.device(kind.name, index), *kind.describe(index))
        for kind in _known.values()
        for index in range(kind.num_devices())
    )
