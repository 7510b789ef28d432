"""Parameters whose optimizer state stays float32 when the rest is kept in 8 bit: embeddings and norms."""

from torch import Tensor, nn


def sensitive_parameters(model: nn.Module) -> dict[Tensor, None]:
    """Return the parameters of embeddings and norms, as keys: told apart by identity, also in a copy or a pickle.

    As bitsandbytes recommends (arXiv:2110.02861, section 2.3): rows of an embedding that are rarely used have gradients
    of another size than their neighbours in a block. Norms are told by their class name, as every model family
    has its own.
    """
    return {
        parameter: None
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }
