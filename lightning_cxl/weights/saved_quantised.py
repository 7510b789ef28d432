"""`SavedQuantised`: a weight that files hold quantised by bitsandbytes, with the tensors beside it."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl.errors import CheckpointError
from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.placement.decorators import TierSpec
from lightning_cxl.weights.chunks import Staging
from lightning_cxl.weights.quantise import placed
from lightning_cxl.weights.sources import WeightSource

_BESIDE = re.compile(
    r"(?P<module>.*)\.(?P<key>weight\.(absmax|quant_map|nested_absmax|nested_quant_map|"
    r"quant_state\.bitsandbytes__(nf4|fp4))|SCB|weight_format)"
)
_FORMAT = "weight_format"  # a number of bitsandbytes; 0 is the only layout that there still is


def weight_beside(name: str) -> tuple[str, str] | None:
    """Return the name of the weight that a tensor of a file belongs to, and which of its tensors it is; None: none."""
    found = _BESIDE.fullmatch(name)
    return None if found is None else (f"{found['module']}.weight", found["key"].removeprefix("weight."))


class SavedQuantised:
    """What the files hold of one quantised weight: a `WeightSource` that makes the parameter, too.

    Args:
        weight: its codes.
        beside: the tensors beside it, by key, such as ``absmax`` or ``SCB``.
        meta: the parameter of the model.

    Raises:
        CheckpointError: tensors are missing, or are not of this weight.
    """

    def __init__(self, weight: WeightSource, beside: Mapping[str, WeightSource], meta: nn.Parameter) -> None:
        self._weight, self._beside = weight, beside
        self._is_four_bit = type(meta).__name__ == "Params4bit"
        self.name, self.shape, self.dtype = weight.name, tuple(meta.shape), meta.dtype
        needed = {"absmax", "quant_map"} if self._is_four_bit else {"SCB"}
        if "nested_absmax" in beside:
            needed |= {"nested_quant_map"}
        missing = sorted(needed - beside.keys())
        if self._is_four_bit and not self._state_key():
            missing.append("quant_state.bitsandbytes__nf4 (or __fp4)")
        if missing:
            raise CheckpointError(
                f"the quantised weight `{self.name}` lacks {', '.join(missing)} in the files. Complete the download, "
                "or save the model again."
            )
        count = meta.numel()
        nbytes = -(-count // 2) if self._is_four_bit else count
        if prod(weight.shape) * weight.dtype.itemsize != nbytes:
            raise CheckpointError(
                f"`{self.name}` has {tuple(weight.shape)} {weight.dtype} in the files; {tuple(meta.shape)} numbers of "
                f"{4 if self._is_four_bit else 8} bit are {nbytes:,} bytes. Build the model with the sizes that the "
                "files were saved with (their config)."
            )

    def parameter(self, meta: Any, spec: TierSpec | None, staging: Staging, *, mapped: bool) -> nn.Parameter:
        """Return the quantised parameter, with what belongs to it, where the weight belongs.

        Args:
            meta: the parameter in whose place it comes.
            spec: what decorators ask for the module.
            staging: as of `TensorFile.read_into`.
            mapped: show the pages of the files where that can be, as in `load_weights`.

        Raises:
            CheckpointError: the files could not be read, or what they hold is not of bitsandbytes.
            TierFullError: it fits nowhere.
        """
        from bitsandbytes.nn.modules import Int8Params, Params4bit

        codes, scales = (
            self._placed(tensor, spec, staging, mapped=mapped)
            for tensor in (self._weight, self._beside["absmax" if self._is_four_bit else "SCB"])
        )
        if not self._is_four_bit:
            if _FORMAT in self._beside and int(self._small(_FORMAT, staging)) != 0:
                raise CheckpointError(
                    f"`{self.name}` has the layout of an old bitsandbytes for one kind of GPU. Save it again with a "
                    "present one."
                )
            return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        small = {key: self._small(key, staging) for key in self._beside if key != "absmax"}
        try:
            return Params4bit.from_prequantized(
                data=codes,
                quantized_stats={"absmax": scales, **small},
                requires_grad=False,
                device=codes.device,
                module=meta.module,
            )
        except (ValueError, KeyError, AssertionError, TypeError) as error:
            raise CheckpointError(
                f"bitsandbytes does not understand what the files hold of `{self.name}`: {error}. Save the model again "
                "with the version that reads it."
            ) from error

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Raise: a quantised weight that has memory already has other tensors beside it."""
        raise CheckpointError(
            f"`{self.name}` is quantised in the files; only a weight on the meta device can be loaded from there"
        )

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Raise: its numbers are not read, see `parameter`."""
        raise CheckpointError(f"`{self.name}` is quantised in the files and is not quantised again")

    def mapped(self) -> None:
        """Return None: see `parameter`."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a parameter has these codes."""
        with ordinary_memory():
            return self._weight.holds(tensor)

    def _state_key(self) -> str | None:
        return next((key for key in self._beside if key.startswith("quant_state.")), None)

    def _placed(self, source: WeightSource, spec: TierSpec | None, staging: Staging, *, mapped: bool) -> Tensor:
        pages = source.mapped() if mapped and torch.get_default_device().type == "cpu" else None
        if pages is not None:
            return pages
        tensor = placed(torch.empty(source.shape, dtype=source.dtype, device="meta"), spec)
        with ordinary_memory():
            source.read_into(tensor, staging)
        return tensor

    def _small(self, key: str, staging: Staging) -> Tensor:
        """Return a tensor of a few numbers, which are not worth a place of their own."""
        source = self._beside[key]
        with ordinary_memory():
            tensor = torch.empty(source.shape, dtype=source.dtype, device="cpu")
            source.read_into(tensor, staging)
        return tensor
