"""More of what is updated: 20 M parameters in many tensors, and tensors of zeros."""

from collections.abc import Sequence

import torch

from adam_bench.problems import Layout


def llama_tensors() -> Layout:
    """Return 20 M parameters as a small Llama has them: 57 tensors, norms among them."""
    hidden, between, vocabulary, layers = 512, 1408, 768, 6
    attention = ((hidden, hidden),) * 4
    perceptron = ((between, hidden),) * 2 + ((hidden, between),)
    block = (*attention, *perceptron, (hidden,), (hidden,))
    shapes = ((vocabulary, hidden), *block * layers, (hidden,), (vocabulary, hidden))
    return Layout(f"20M in {len(shapes)} tensors", shapes)


def small_tensors() -> Layout:
    """Return 20 M parameters in tensors of 4096."""
    return Layout("20M in 4882 tensors", ((4096,),) * 4882)


def zeroed(like: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return touched tensors of zeros, shaped as others."""
    return [torch.zeros(tensor.shape, dtype=dtype).fill_(0) for tensor in like]
