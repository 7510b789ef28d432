"""Weights that are quantised while they are read, with bitsandbytes: the full-precision weight never exists.

[Note: Quantising while loading]
The blocks of the 4-bit formats, and the rows of the 8-bit one, do not depend on each other. So a weight is read in
chunks of whole blocks (rows), each is given to bitsandbytes, and its result goes to memory that was taken where the
weight belongs. Only what is made from all blocks together waits for the end: the scales of a weight with
``bnb_4bit_use_double_quant`` are quantised themselves. The numbers are, bit by bit, those of the whole weight at once.
bitsandbytes needs several times a chunk beside it, therefore chunks are small.

bitsandbytes is imported when the first weight is quantised, not with this package.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl.memory.heap import large_blocks_apart
from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.memory.new_weight import new_weight
from lightning_cxl.placement.decorators import TierSpec
from lightning_cxl.weights.chunks import scratch
from lightning_cxl.weights.sources import WeightSource

_CHUNK_NUMBERS = 2**20  # a multiple of every block size of bitsandbytes; its kernels take up to 40 bytes for each
_NESTED_BLOCK = 256  # numbers; what bitsandbytes takes for scales of scales


@torch.no_grad()
def quantised(source: WeightSource, meta: nn.Parameter, dtype: torch.dtype, spec: TierSpec | None) -> nn.Parameter:
    """Return a quantised parameter in new memory, in the place of one on the meta device that waits to be quantised.

    Args:
        source: the weight in full precision.
        meta: ``Params4bit`` or ``Int8Params`` of bitsandbytes, of the shape of `source`.
        dtype: that the weight is rounded to before it is quantised, and that its module dequantises it to.
        spec: what decorators ask for the module.

    Raises:
        CheckpointError: the file could not be read.
        TierFullError: it fits nowhere.
    """
    with large_blocks_apart():  # what the kernels take for chunks
        return _KINDS[type(meta).__name__](source, meta, dtype, spec)


def quantised_on_meta(meta: Any) -> nn.Parameter:
    """Return what `quantised` would make of a parameter, on the meta device: for plans.

    Args:
        meta: ``Params4bit`` or ``Int8Params`` of bitsandbytes, in the type that it would be rounded to.
    """
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn.modules import Int8Params

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if type(meta).__name__ == "Int8Params":
        codes = empty(*meta.shape, dtype=torch.int8)
        return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=empty(meta.shape[0]))
    num_blocks = -(-meta.numel() // meta.blocksize)
    codes, scales = empty(-(-meta.numel() // 2), dtype=torch.uint8), empty(num_blocks)
    offset, nested = None, None
    if meta.compress_statistics:
        scales, offset = scales.to(torch.uint8), empty()
        nested = QuantState(  # type: ignore[no-untyped-call]
            absmax=empty(-(-num_blocks // _NESTED_BLOCK)), code=empty(256), blocksize=_NESTED_BLOCK, dtype=torch.float32
        )
    return _four_bit_parameter(meta, meta.dtype, codes, empty(16), scales, offset, nested)


def placed(like: Tensor, spec: TierSpec | None) -> Tensor:
    """Return uninitialised memory where a weight belongs, with the shape and type of a tensor."""
    return new_weight(like, like.dtype, spec)


def _four_bit(source: WeightSource, meta: Any, dtype: torch.dtype, spec: TierSpec | None) -> nn.Parameter:
    from bitsandbytes import functional

    num_blocks = -(-meta.numel() // meta.blocksize)
    codes = placed(torch.empty(-(-meta.numel() // 2), dtype=torch.uint8, device="meta"), spec)
    scales = placed(torch.empty(num_blocks, device="meta"), spec) if not meta.compress_statistics else None
    with ordinary_memory():
        wide = scratch((num_blocks,), torch.float32) if scales is None else scales
        nested: Any = None
        begin = 0
        for chunk in _chunks(source, _CHUNK_NUMBERS, dtype):
            packed, state = functional.quantize_4bit(chunk, blocksize=meta.blocksize, quant_type=meta.quant_type)
            codes[begin // 2 :][: packed.numel()].copy_(packed.view(-1))
            wide[begin // meta.blocksize :][: state.absmax.numel()].copy_(state.absmax)
            begin += chunk.numel()
        code = functional.get_4bit_type(meta.quant_type, device=codes.device)  # type: ignore[no-untyped-call]
        if scales is None:
            mean = wide.mean()
            coded, nested = functional.quantize_blockwise(wide - mean, blocksize=_NESTED_BLOCK)
    offset = None
    if scales is None:
        nested.absmax, nested.code = _moved(nested.absmax, spec), _moved(nested.code, spec)
        scales, offset = _moved(coded, spec), _moved(mean, spec)
    return _four_bit_parameter(meta, dtype, codes, code, scales, offset, nested)


def _four_bit_parameter(
    meta: Any, dtype: torch.dtype, codes: Tensor, code: Tensor, scales: Tensor, offset: Tensor | None, nested: Any
) -> nn.Parameter:
    """Return the parameter, with its quantisation state, which its module gets, too."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn.modules import Params4bit

    meta.module.quant_state = QuantState(  # type: ignore[no-untyped-call]
        absmax=scales,
        shape=meta.shape,
        code=code,
        blocksize=meta.blocksize,
        quant_type=meta.quant_type,
        dtype=dtype,
        offset=offset,
        state2=nested,
    )
    return Params4bit(
        codes.view(meta.quant_storage).view(-1, 1),
        requires_grad=False,
        quant_state=meta.module.quant_state,
        blocksize=meta.blocksize,
        compress_statistics=meta.compress_statistics,
        quant_type=meta.quant_type,
        quant_storage=meta.quant_storage,
        module=meta.module,
        bnb_quantized=True,
    )


def _eight_bit(source: WeightSource, meta: Any, dtype: torch.dtype, spec: TierSpec | None) -> nn.Parameter:
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import Int8Params

    num_rows, row = meta.shape
    codes = placed(torch.empty(num_rows, row, dtype=torch.int8, device="meta"), spec)
    scales = placed(torch.empty(num_rows, device="meta"), spec)
    begin = 0
    with ordinary_memory():
        for chunk in _chunks(source, max(1, _CHUNK_NUMBERS // row) * row, dtype):
            rows = chunk.view(-1, row).to(torch.float16)  # the only type that bitsandbytes quantises to 8 bit
            part, part_scales, _ = functional.int8_vectorwise_quant(rows)
            codes[begin : begin + len(rows)].copy_(part)
            scales[begin : begin + len(rows)].copy_(part_scales)
            begin += len(rows)
    return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)


def _chunks(source: WeightSource, num_elements: int, dtype: torch.dtype) -> Iterator[Tensor]:
    for part in source.parts(num_elements):
        yield part.to(dtype)


def _moved(tensor: Tensor, spec: TierSpec | None) -> Tensor:
    """Return a copy where a weight belongs."""
    return placed(tensor.to("meta"), spec).copy_(tensor)


_KINDS: dict[str, Callable[[WeightSource, Any, torch.dtype, TierSpec | None], nn.Parameter]] = {
    "Params4bit": _four_bit,
    "Int8Params": _eight_bit,
}
