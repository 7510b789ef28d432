"""State of `CPUAdam` as torch's own optimizers understand it: decoded momentum and variance, joined masters."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_cxl.optim.eight_bit import check_map, decode
from lightning_cxl.optim.number_formats import join, split
from lightning_cxl.optim.slot import REMAINDER
from lightning_cxl.optim.state import unwrapped

_CODED = (("exp_avg", "state1", "absmax1", "qmap1", False), ("exp_avg_sq", "state2", "absmax2", "qmap2", True))
_CODED_KEYS = {key for row in _CODED for key in row[1:4]}


def decoded(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one parameter's state with 8-bit momentum and variance as float32 under torch's keys.

    Args:
        entry: of CPUAdam or bitsandbytes; state of other optimizers stays as it is.
        name: of the parameter, for messages.

    Raises:
        CheckpointError: the codes are of another map than ours.
    """
    flat = unwrapped(entry) or {}
    if not {"state1", "state2"} <= flat.keys():
        return dict(flat)
    result = {key: value for key, value in flat.items() if key not in _CODED_KEYS}
    for plain, coded, scales, qmap, unsigned in _CODED:
        values = flat[coded]
        if values.dtype is torch.uint8:
            check_map(flat.get(qmap), name, unsigned=unsigned)
            values = decode(values, flat[scales], unsigned=unsigned)
        result[plain] = values
    return result


def without_remainder(entry: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the state without the lower half of split master weights, and that half where it means something.

    torch's optimizers carry it along as a floating point number, and their steps make it meaningless.
    """
    remainder = entry.get(REMAINDER)
    rest = {key: value for key, value in entry.items() if key != REMAINDER}
    return rest, remainder if isinstance(remainder, torch.Tensor) and remainder.dtype is torch.int16 else None


def joined(weights: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return float32 master weights from compute weights, in any precision, and what they lack of them."""
    upper = weights if weights.dtype is torch.bfloat16 else split(weights.float().contiguous())[0]
    return join(upper.contiguous(), remainder.contiguous())
