"""The weights of a model, tied ones as one with all their names: what is loaded and saved once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_cxl.errors import CheckpointError
from lightning_cxl.placement.decorators import TierSpec, owner_spec
from lightning_cxl.weights.unread import UnreadWeight


@dataclass(eq=False, slots=True)
class ModelWeight:
    """One parameter or persistent buffer of a model, under each name that it has."""

    tensor: Tensor
    spec: TierSpec | None
    """What decorators ask for the module that has it."""
    names: list[str] = field(default_factory=list)
    holders: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list)
    """The tables of modules in which it is found, with its key."""

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return isinstance(self.tensor, nn.Parameter)

    def put(self, tensor: Tensor) -> None:
        """Set a tensor in the place of the present one, everywhere."""
        for table, key in self.holders:
            table[key] = tensor
        self.tensor = tensor


def model_weights(model: nn.Module) -> dict[str, ModelWeight]:
    """Return what the files of a model hold, by name: its parameters and persistent buffers, tied ones as one object.

    Raises:
        CheckpointError: a module is lazy and has no shapes yet.
    """
    weights: dict[str, ModelWeight] = {}
    by_identity: dict[object, ModelWeight] = {}
    for path, modules in _paths(model):
        module = modules[-1]
        buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in [*module._parameters.items(), *buffers.items()]:
            if tensor is None:
                continue
            name = f"{path}{key}"
            if is_lazy(tensor):
                raise CheckpointError(
                    f"`{name}` of {type(model).__name__} has no shape yet: it belongs to a lazy module. Run the model "
                    "once on a sample, then load."
                )
            weight = by_identity.setdefault(_identity(tensor), ModelWeight(tensor, owner_spec(modules)))
            weight.names.append(name)
            table = module._parameters if key in module._parameters else module._buffers
            if not any(table is known and key == known_key for known, known_key in weight.holders):
                weight.holders.append((table, key))  # type: ignore[arg-type]  # a table of parameters is one of tensors
            weights[name] = weight
    return weights


def distinct(weights: Mapping[str, ModelWeight]) -> list[ModelWeight]:
    """Return each weight once, in the order of first names."""
    return list({id(weight): weight for weight in weights.values()}.values())


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the model computes itself, so that files do not hold them, by name."""
    return {
        f"{path}{key}": tensor
        for path, modules in _paths(model)
        for key, tensor in modules[-1]._buffers.items()
        if tensor is not None and key in modules[-1]._non_persistent_buffers_set
    }


def _paths(
    module: nn.Module, path: str = "", above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield every module with its prefix and with those that contain it, a shared one once for each of its names."""
    modules = (*above, module)
    yield path, modules
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{path}{name}.", modules)


def _identity(tensor: Tensor) -> object:
    """Return what two tensors have in common that are the same bytes, seen the same way."""
    if tensor.is_meta or isinstance(tensor, UnreadWeight) or tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
