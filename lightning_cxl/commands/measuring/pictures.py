"""Whether pictures can be drawn, asked before an hour is spent on measuring."""

import importlib

from lightning_cxl.errors import ConfigError


def check_matplotlib() -> None:
    """Check, before an hour is spent on measuring, that there is something to plot with.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: `pip install matplotlib`, or install this package with its extra `plot`"
        ) from error
