"""Tensors of a folder that several processes have written. See [Note: Sharded checkpoints]."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cxl.run.sharded_checkpoint import TIED
from lightning_cxl.run.sharded_reading import ShardedCheckpoint
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.weights.files import Staging


class FolderTensor(NamedTuple):
    """A tensor whose shards are put together when it is read."""

    name: str
    folder: ShardedCheckpoint
    full_name: str
    """In the folder."""
    first: str
    """Name of the tensor that it is tied to; its own where there is none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.folder.empty(self.full_name).shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.folder.empty(self.full_name).dtype

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape."""
        self.folder.read({self.full_name: target})

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values, flat and a part at a time; the whole is in memory meanwhile."""
        yield from torch.split(self.folder.tensor(self.full_name).reshape(-1), num_elements)

    def mapped(self) -> None:
        """Return None: no file has it whole."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same numbers."""
        return torch.equal(self.folder.tensor(self.full_name), tensor)


def weights_in(folder: ShardedCheckpoint, rest: dict[str, object]) -> list[FolderTensor]:
    own = rest.get(KEY)
    tied = own.get(TIED, []) if isinstance(own, dict) else []
    first = {name: names[0] for names in tied for name in names}
    found = [(name, f"state_dict.{name}") for name in folder.names("state_dict")]
    return [FolderTensor(name, folder, full, first.get(name, name)) for name, full in found if folder.is_tensor(full)]


def masters_of(folder: ShardedCheckpoint) -> dict[str, FolderTensor]:
    """Return master weights by the parameter's name: float32, or int16 where it is the remainder."""
    return {name: FolderTensor(name, folder, full, name) for name, full in folder.master_names().items()}
