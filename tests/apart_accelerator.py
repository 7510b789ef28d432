"""What makes the device apart one that a Trainer takes: Lightning's accelerator, and the package's seam to it."""

import torch
from lightning.pytorch.accelerators import Accelerator

from lightning_cxl.errors import PinnedMemoryError
from tests import apart


class ApartDevices:
    """The seam of the package; see `lightning_cxl.devices.CudaDevices`."""

    name = "apart"
    are_there = False
    """Whether the package finds any: tests that do not use the device must not notice it."""

    def num_devices(self):
        return torch.accelerator.device_count() if self.are_there else 0

    def describe(self, index):
        properties = torch.apart.get_device_properties(index)
        return properties.name, properties.total_memory

    def is_integrated(self, index):
        return False

    def pci_address(self, index):
        return None

    def register(self, address, nbytes):
        if not self.are_there:
            raise PinnedMemoryError("the device apart is not used by this test")
        if code := apart.host_register(address, nbytes):
            raise PinnedMemoryError(f"the device apart refuses {nbytes} bytes at {address:#x} with code {code}")

    def unregister(self, address):
        apart.host_unregister(address)


class ApartAccelerator(Accelerator):
    """For ``Trainer(accelerator=...)``."""

    def setup_device(self, device):
        torch.accelerator.set_device_index(device.index)

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("apart", index) for index in devices]

    @staticmethod
    def auto_device_count():
        return torch.accelerator.device_count()

    @staticmethod
    def is_available():
        return True

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def name():
        return "apart"
