"""What operators see of a weight that is still in its file: its values, in memory that begins with them."""

import pytest
import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.weights.files import UnreadWeight

VALUES = torch.arange(100.0)[10:26].view(4, 4)  # not at the begin of its memory, like the pages of a file
OPERATORS = {
    "transposed": lambda w: w.t().reshape(-1),
    "a diagonal": lambda w: w.diagonal(),
    "unfolded": lambda w: w.unfold(0, 2, 1),
    "expanded": lambda w: w[0].expand(3, 4),
    "split": lambda w: torch.cat(list(w.split(3))),
    "a chunk": lambda w: w.chunk(2)[1],
    "as complex numbers": lambda w: torch.view_as_complex(w.view(4, 2, 2)),
    "as other numbers": lambda w: w.view(torch.int32),
    "chosen": lambda w: w[w > 15],
    "added": lambda w: w + 1,
    "cloned": lambda w: w.clone(),
    "copied from": lambda w: torch.zeros(4, 4).copy_(w),
    "as it is": lambda w: w,
}


def unread():
    return UnreadWeight(torch.empty(4, 4, device="meta"), torch.float32, lambda: VALUES)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_it_gives_of_the_values(name):
    expected, found = OPERATORS[name](VALUES.clone()), OPERATORS[name](unread())
    values = found.values() if isinstance(found, UnreadWeight) else found
    assert (found.dtype, found.shape, values.dtype) == (expected.dtype, expected.shape, expected.dtype)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("operator", [lambda w: w.as_strided((2, 2), (4, 1)), lambda w: w[2].as_strided((2,), (1,), 8)])
def test_what_counts_from_the_begin_of_memory_is_refused(operator):
    with pytest.raises(UnsupportedError, match=r"as_strided.*is in its file.*mapped=False"):
        operator(unread())
