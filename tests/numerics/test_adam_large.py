"""Spans of more elements than 32 bits can count: offsets, scales and random numbers stay right beyond 2^31 and 2^32."""

import psutil
import pytest
import torch

from lightning_cxl.native import _cpu
from lightning_cxl.optim import kernels as formats
from tests.numerics.adam_case import ISAS, PLAIN, TENSORS, Case, Formats, scalars_at, update
from tests.numerics.big_tensors import BigMemory

WIDTH = 3 * 65536 + 512
"""Elements of each part that is looked at: more than two chunks."""
GAP = 2**20
"""Elements between two parts: their scales do not share a page."""
SMALLEST = Formats(torch.bfloat16, formats.WEIGHTS_SPLIT, "8bit")
ROUNDED = Formats(torch.float16, formats.WEIGHTS_FP32, "bf16")


def element_bytes(case: Case, name: str) -> float:
    return case[name].element_size() / (256 if name.endswith("_scale") else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("combination", "after", "lead"),
    [
        pytest.param(PLAIN, 2**31, 0, marks=[pytest.mark.full, pytest.mark.alone]),
        pytest.param(SMALLEST, 2**31, 1000, marks=[pytest.mark.full, pytest.mark.alone]),
        pytest.param(ROUNDED, 2**32, 1000, marks=[pytest.mark.full, pytest.mark.alone]),
    ],
    ids=["fp32", "split-8bit", "bf16-2^32"],
)
def test_more_elements_than_32_bits_can_count(combination, after, lead):
    """All is zero but the first elements, those around 2^31 and 2^32, and the last: they equal the definition."""
    if psutil.virtual_memory().available < 2 << 30:
        pytest.skip("needs 2 GiB of memory, for page tables above all")
    numel = after + GAP + WIDTH + 17
    starts = [
        0,
        *(middle - 2 * 65536 for middle in (2**31, 2**32) if middle <= after),
        (numel - WIDTH // 2) // 256 * 256,
    ]
    parts = [Case.random(min(WIDTH, numel - start), combination, index) for index, start in enumerate(starts)]
    key = parts[0].key
    present = [name for name in TENSORS if parts[0].tensors[name] is not None]
    memories = {name: BigMemory(int(numel * element_bytes(parts[0], name)) + 4096) for name in present}
    windows = []
    for start, part in zip(starts, parts, strict=True):
        window = Case(combination, key, dict.fromkeys(TENSORS))
        for name, memory in memories.items():
            place = int(start * element_bytes(part, name))
            window.tensors[name] = memory.window(place, part[name].nbytes, part[name].dtype).copy_(part[name])
        windows.append(window)
    span = [memories[name].address if name in memories else 0 for name in TENSORS]
    leading = Case.random(lead)  # so that the chunks of the span do not begin at multiples of their size
    table = [leading.span(), [*span, key, numel, 0, combination.code, 0, 0]]
    update(table, [scalars_at()], ISAS[-1], _cpu.available_threads())
    for start, part, window in zip(starts, parts, windows, strict=True):
        part.key = key
        window.assert_same(part.defined(scalars_at(), start), start)
    window, windows = None, None
    for memory in memories.values():
        memory.free()
