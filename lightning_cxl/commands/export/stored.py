"""Tensors of a checkpoint that are read when they are written: as they are, renamed, or dequantised."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cxl.errors import CheckpointError
from lightning_cxl.weights.files import Staging, WeightSource, values_of

_BESIDE_4BIT = re.compile(
    r"(?P<name>.*weight)\.(?P<key>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)
_SCALES = {"absmax", "SCB"}
_BESIDE_8BIT = re.compile(r"(?P<prefix>.*\.)(?P<key>SCB|weight_format)")


class StoredTensor(NamedTuple):
    """A tensor of a file that torch has mapped."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape."""
        target.copy_(self.tensor.detach())

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values, flat and a part at a time."""
        yield from torch.split(self.tensor.detach().reshape(-1), num_elements)

    def mapped(self) -> Tensor | None:
        """Return the pages of the file."""
        return self.tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same numbers."""
        return torch.equal(self.tensor, tensor)


class Renamed(NamedTuple):
    """A tensor under another name."""

    name: str
    source: WeightSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.source.dtype

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape."""
        self.source.read_into(target, staging)

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values, flat and a part at a time."""
        return self.source.parts(num_elements)

    def mapped(self) -> Tensor | None:
        """Return the pages of the file."""
        return self.source.mapped()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the bits that are read."""
        return self.source.holds(tensor)


def innermost(source: WeightSource) -> WeightSource:
    """Return what a source was before it was renamed."""
    while isinstance(source, Renamed):
        source = source.source
    return source


class Dequantised:
    """A weight that bitsandbytes has quantised, as the numbers that it computes with."""

    def __init__(self, weight: WeightSource, beside: Mapping[str, WeightSource], dtype: torch.dtype) -> None:
        self.name = weight.name
        self.dtype = dtype
        self._weight = weight
        self._beside = beside
        self.shape = weight.shape if "SCB" in beside else tuple(self._state().shape)

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape."""
        from bitsandbytes import functional

        weight = values_of(self._weight)
        if "SCB" in self._beside:
            numbers = functional.int8_vectorwise_dequant(weight, values_of(self._beside["SCB"]))
        else:
            numbers = functional.dequantize_4bit(weight, self._state())
        target.copy_(numbers)

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values, flat and a part at a time; all of them are in memory meanwhile."""
        numbers = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(numbers, Staging())
        yield from torch.split(numbers.reshape(-1), num_elements)

    def mapped(self) -> None:
        """Return None: no file has these numbers."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the numbers that are read."""
        numbers = torch.empty_like(tensor)
        self.read_into(numbers, Staging())
        return torch.equal(numbers, tensor)

    def _state(self) -> Any:
        from bitsandbytes.functional import QuantState

        return QuantState.from_dict(
            {key: values_of(source) for key, source in self._beside.items()}, device=torch.device("cpu")
        )


def dequantised(sources: Sequence[WeightSource], dtype: torch.dtype) -> list[WeightSource]:
    """Return sources with each quantised weight and what is beside it as one, in the place of the weight."""
    beside: dict[str, dict[str, WeightSource]] = {}
    for source in sources:
        if found := _BESIDE_4BIT.fullmatch(source.name):
            beside.setdefault(found["name"], {})[found["key"]] = source
        elif found := _BESIDE_8BIT.fullmatch(source.name):
            beside.setdefault(found["prefix"] + "weight", {})[found["key"]] = source
    mine = {id(source) for group in beside.values() for source in group.values()}
    plain = [source for source in sources if id(source) not in mine]
    result: list[WeightSource] = []
    for source in plain:
        group = beside.get(source.name)
        if source.dtype in (torch.uint8, torch.int8) and not _SCALES & (group or {}).keys():
            raise CheckpointError(
                f"`{source.name}` is {source.dtype}, and no scales of bitsandbytes are beside it: it cannot be "
                "dequantised. Export from the files in full precision (--base)"
            )
        result.append(source if group is None else Dequantised(source, group, dtype))
    return result
