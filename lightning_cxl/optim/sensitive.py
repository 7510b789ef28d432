"""Parameters whose optimizer state stays float32 when the rest is kept in 8 bit: embeddings and norms."""

from collections.abc import Container

from torch import Tensor, nn


class _ById:
    """A set of tensors, told apart by identity."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._tensors


def sensitive_parameters(model: nn.Module) -> Container[Tensor]:
    """Return the parameters of embeddings and norms.

    As bitsandbytes recommends (arXiv:2110.02861, section 2.3): rows of an embedding that are rarely used have gradients
    of another size than their neighbours in a block. Norms are told by their class name, as every model family
    has its own.
    """
    return _ById(
        [
            parameter
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Norm" in type(module).__name__
            for parameter in module.parameters(recurse=False)
        ]
    )
