"""8-bit state that was saved for other shards: its scales are per block of a shard."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_cxl.optim.eight_bit import BLOCK_SIZE, dynamic_map
from lightning_cxl.optim.parameter_state import MOMENT_KEYS
from lightning_cxl.shards import first_element, local, sharded_like

_SCALES = tuple(keys.scales for keys in MOMENT_KEYS)
_MAPS = tuple(keys.map for keys in MOMENT_KEYS)


def of_this_shard(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return 8-bit state with the scales of this shard; as numbers, where other shards than this one were saved."""
    first, numel = first_element(parameter), local(parameter).numel()
    result = {key: value for key, value in entry.items() if not key.startswith((*_SCALES, *_MAPS))}
    for keys in MOMENT_KEYS:
        codes = entry[keys.codes]
        if codes.dtype is not torch.uint8:  # bitsandbytes keeps small parameters in float32 under the same names
            continue
        named = {key: value for key, value in entry.items() if key.startswith(keys.scales)}
        scales = {int(key.partition(".")[2] or 0): value.flatten() for key, value in named.items()}
        begins = sorted(scales)
        ends = dict(zip(begins, [*begins[1:], parameter.numel()], strict=True))
        if first in scales and ends[first] == first + numel:
            result |= {keys.scales: scales[first], keys.map: dynamic_map(keys.unsigned)}
            continue
        del result[keys.codes]
        numbers = dynamic_map(keys.unsigned)[local(codes).flatten().long()]
        for begin in begins:
            low, high = max(begin, first), min(ends[begin], first + numel)
            if low < high:
                block = (torch.arange(low, high) - begin) // BLOCK_SIZE
                numbers[low - first : high - first] *= scales[begin][block]
        result[keys.values] = sharded_like(numbers.view(local(parameter).shape), parameter)
    return result
