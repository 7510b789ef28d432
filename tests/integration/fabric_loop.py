"""Fabric on the device under test."""

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy

from tests import training_device


def make_fabric(strategy="auto", precision=None):
    device = training_device.current
    plugins = []
    if device.type == "apart":
        strategy = SingleDeviceStrategy(device) if strategy == "auto" else strategy
        if precision in ("bf16-mixed", "16-mixed"):
            plugins, precision = [MixedPrecision(precision, device.type)], None
    fabric = Fabric(
        accelerator=training_device.accelerator(), devices=1, strategy=strategy, precision=precision, plugins=plugins
    )
    fabric.launch()
    return fabric
