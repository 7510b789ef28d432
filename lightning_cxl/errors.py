"""Every exception and warning of the package.

A message says what failed with its values, what is available, and what to do.
"""

import warnings
from pathlib import Path


class LightningCXLError(Exception):
    """Base of every exception raised on purpose by this package."""


class ConfigError(LightningCXLError, ValueError):
    """An option, rule or decorator asks for something that does not exist or cannot be honoured."""


class TierNotFoundError(ConfigError):
    """A tier name that this machine's topology does not have."""


class TierFullError(LightningCXLError, MemoryError):
    """A tier (and every tier it may spill to) cannot hold a request: budget or node exhausted."""


class PlacementError(LightningCXLError, RuntimeError):
    """Pages are not on the node that was asked for, or the kernel refused to place them."""


class PinnedMemoryError(LightningCXLError, RuntimeError):
    """Page-locking host memory for the device failed."""


class CheckpointError(LightningCXLError, RuntimeError):
    """A checkpoint or a file with weights is missing, damaged, or does not fit the model or optimizer."""


class StorageError(LightningCXLError, OSError):
    """A drive or a file on it failed, or what lies there is damaged.

    Args:
        message: what failed, why, and what to do.
        path: of the file.
        offset: where in the file, in bytes.
        errno: what the kernel said.
    """

    path: Path | None
    offset: int | None

    def __init__(
        self, message: str, path: Path | None = None, offset: int | None = None, errno: int | None = None
    ) -> None:
        super().__init__(errno, message)
        self.path = path
        self.offset = offset

    def anew(self) -> "StorageError":
        """Return an equal error to raise, if this one is kept: who keeps a raised one keeps the frames it came through.

        Memory that these hold would be held as long, and autograd's graph among it makes a circle that is never freed.
        """
        return StorageError(str(self), self.path, self.offset, self.errno)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[type["StorageError"], tuple[object, ...]]:
        return StorageError, (self.strerror, self.path, self.offset, self.errno)


class UnsupportedError(LightningCXLError, NotImplementedError):
    """A valid request that this version cannot serve; the message names what to use meanwhile."""


class GradientOverflowError(LightningCXLError, ArithmeticError):
    """Gradients are infinite or not a number, too often to go on."""


class LightningCXLWarning(UserWarning):
    """Base of every warning of this package."""


class MissingTierWarning(LightningCXLWarning):
    """A tier has no hardware behind it on this machine and is backed by another one."""


class SpillWarning(LightningCXLWarning):
    """Bytes went to another tier than the first choice."""


def warn(text: str, category: type[Warning] = LightningCXLWarning, level: int = 2) -> None:
    """Warn at a line: 1 is this call, 2 the call of the function that it is in, and so on up to the user's."""
    warnings.warn(text, category, stacklevel=level + 1)
