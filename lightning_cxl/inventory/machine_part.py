"""`of_machine`: tensors of a whole model become what the ranks of one machine keep of them."""

from collections.abc import Iterable

from torch import Tensor

from lightning_cxl.inventory.mesh import Mesh
from lightning_cxl.inventory.tensors import HostTensor, StreamedUnit
from lightning_cxl.placement.placement import TensorRole


def of_machine(tensors: Iterable[HostTensor], streamed: Iterable[StreamedUnit], mesh: Mesh) -> tuple[HostTensor, ...]:
    """Return the tensors as large as all shards of one machine together; inputs of units stay as they are.

    Args:
        tensors: of the whole model.
        streamed: units; what one piece of weights has is in their groups.
        mesh: the ranks.
    """
    if not mesh.is_sharded:
        return tuple(tensors)
    pieces: dict[int, list[Tensor]] = {id(group[0]): [*group] for unit in streamed for group in unit.groups}

    def part(each: HostTensor) -> HostTensor:
        if each.parameter is None:
            return each
        whole = (
            pieces.get(id(each.parameter), [each.parameter])
            if each.role is TensorRole.COMPUTE_WEIGHTS
            else [each.parameter]
        )
        return each._replace(nbytes=mesh.machine_bytes(each.nbytes, whole))

    return tuple(map(part, tensors))
