"""Arguments of the compiled kernels: number formats, layouts of tensors, threads and instructions."""

import operator
from array import array
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError, warn
from lightning_cxl.machine.topology import nearest_cpu_nodes, usable_cpus
from lightning_cxl.memory.host_memory import is_dense, laid_out_as
from lightning_cxl.memory.resource import node_at
from lightning_cxl.native import _adam, _cpu

# Number formats of host tensors: the codes that kernels take for them, split master weights, keys of random bits.
#
# ``cython_ext/include/number_formats.h`` does the same in C, bit for bit. Bit patterns are int64 tensors here, because
# torch has little arithmetic for unsigned integers.

StatePrecision = Literal["fp32", "bf16", "8bit"]
"""How momentum and variance are kept."""
MasterForm = Literal["split", "fp32"]
"""How master weights are kept beside 16-bit compute weights."""

GRAD_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WEIGHTS_FP32, WEIGHTS_BF16, WEIGHTS_FP16, WEIGHTS_SPLIT = range(4)
STATE_FORMATS: dict[StatePrecision, int] = {"fp32": 0, "bf16": 1, "8bit": 2}

_LOW = 0xFFFF
_WORD = 0xFFFFFFFF


def pack(grad: int, weights: int, state: int) -> int:
    """Return the one number that tells a kernel the formats of a span."""
    return grad | weights << 2 | state << 4


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 `values` as compute weights and remainders: upper half, rounded to nearest, and lower half.

    Ties go away from zero: with ties to even, a remainder of one half would not tell whether it was rounded up.
    """
    bits = values.view(torch.int32).long() & _WORD
    upper = torch.where(values.isnan(), bits >> 16 | 0x40, bits + 0x8000 >> 16)
    return _to_bits16(upper).view(torch.bfloat16), _to_bits16(bits & _LOW)


def join(compute_weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Return the float32 master weights that `split` took apart, bit for bit (a NaN becomes a quiet one).

    A compute weight that someone else has changed keeps its remainder, which is less than a rounding error of it;
    beside a zero, only a remainder that can belong to it counts.
    """
    upper, lower = compute_weights.view(torch.int16).long() & _LOW, remainders.long() & _LOW
    magnitude = upper & 0x7FFF
    rounded_up = (lower >= 0x8000) & (magnitude != 0) & (magnitude <= 0x7F80)
    lower = torch.where((magnitude == 0) & (lower >= 0x8000), 0, lower)
    bits = (upper << 16) - (rounded_up.long() << 16) + lower
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def mix_key(*numbers: int) -> int:
    """Return a 64-bit key that depends on every one of the integers (splitmix64 finaliser after each)."""
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key


def _to_bits16(bits: torch.Tensor) -> torch.Tensor:
    bits = bits & _LOW
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).short()


# 8-bit numbers in the format of bitsandbytes: coded, decoded, and the map that both sides agree on.
#
# A block of 256 elements shares a scale, its largest magnitude; an element is a code for its share of that. The
# *dynamic maps* have 7 decades of shares, each cut into equal steps, twice as many in each as in the one below.
#
# Reference: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).

BLOCK_SIZE = 256


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK_SIZE)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, unsigned: bool) -> None:
    """Code float32 values in blocks of 256 in memory order; `unsigned`: by the map of variances, else of momenta."""
    _adam.quantize(_numpy(flattened(values)), _numpy(flattened(codes)), _numpy(scales), unsigned, _cpu.best_isa())
    torch.autograd.graph.increment_version([codes, scales])  # as after an operation of torch


def decode(codes: torch.Tensor, scales: torch.Tensor, *, unsigned: bool) -> torch.Tensor:
    """Return the float32 values of dense 8-bit `codes`, in the same element order."""
    values = torch.empty_strided(codes.shape, codes.stride(), dtype=torch.float32)
    _adam.dequantize(
        _numpy(flattened(codes)),
        _numpy(scales.float().cpu().contiguous()),
        _numpy(flattened(values)),
        unsigned,
        _cpu.best_isa(),
    )
    return values


@cache
def dynamic_map(unsigned: bool) -> torch.Tensor:
    """Return the share of every code, float32 ``(256,)``: bitsandbytes calls it `qmap` or `code`."""
    return decode(torch.arange(256, dtype=torch.uint8), torch.ones(1), unsigned=unsigned)


def check_map(qmap: object, name: str, *, unsigned: bool) -> None:
    """Refuse 8-bit codes with another map than the dynamic one."""
    if qmap is None:
        return
    known = dynamic_map(unsigned)
    if (
        not isinstance(qmap, torch.Tensor)
        or qmap.shape != known.shape
        or qmap.is_meta
        or not torch.allclose(qmap.float().cpu(), known, rtol=1e-5, atol=1e-12)
    ):
        raise CheckpointError(f"the saved 8-bit state of {name} uses another map than bitsandbytes' dynamic one")


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()


# Which tensors the kernels take: host memory without gaps, all in the order of the parameter.

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    if parameter.is_meta or parameter.dtype not in (WEIGHT_DTYPES if parameter.is_cpu else (torch.float32,)):
        raise ConfigError(
            f"CPUAdam updates float32 weights, and bfloat16 weights on the host; {name} is {parameter.dtype} on "
            f"{parameter.device}. Give it float32 master weights on the host and the others as `compute_weights`"
        )
    if parameter.layout is not torch.strided or not is_dense(parameter):
        raise UnsupportedError(
            f"elements of {name} (shape {tuple(parameter.shape)}, strides {tuple(parameter.stride())}) share memory, "
            "or have gaps between them: make it a parameter of its own with `.contiguous()`, or set `cpu_adam=False`"
        )
    if parameter.is_neg():
        raise ConfigError(
            f"{name} is a lazily negated view: its memory has the opposite sign, and an update in place would go the "
            "wrong way. Give it memory of its own with `.data = .data.resolve_neg()`"
        )
    _check_memory(parameter, name)


def _check_memory(tensor: torch.Tensor, what: str) -> None:
    """Check that the storage still holds every element: it may have been resized under the tensor."""
    if tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed_bytes, held_bytes = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed_bytes > held_bytes:
        raise ConfigError(
            f"{what} (shape {tuple(tensor.shape)}) reaches to byte {needed_bytes} of its storage, which has "
            f"{held_bytes} bytes now: it was resized. Give the memory back before the step"
        )


def same_layout(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether element i in memory of `tensor` is element i in memory of the dense `parameter`."""
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor.shape == parameter.shape
    strides = zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    return all(size == 1 or own == other for size, own, other in strides)  # that of a dimension of 1 means nothing


def is_flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether `tensor` is on the device of a dense `parameter`, with its elements in the same order."""
    ordinary = tensor.device == parameter.device and tensor.layout is torch.strided and not tensor.is_neg()
    return ordinary and same_layout(tensor, parameter)


def usable_gradient(grad: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return a gradient as dense memory in the order of `parameter`; a copy only where needed."""
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {name} is sparse ({grad.layout}): use `sparse=False` in the embedding, or "
            "`cpu_adam=False` with torch.optim.SparseAdam"
        )
    if grad.device != parameter.device:
        raise ConfigError(
            f"the gradient of {name} is on {grad.device}, the parameter on {parameter.device}: bring it there"
        )
    _check_memory(grad, f"the gradient of {name}")
    if grad.dtype in GRAD_FORMATS and is_flat_like(grad, parameter):
        return grad
    dtype = grad.dtype if grad.dtype in GRAD_FORMATS else torch.float32
    own = torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)
    return laid_out_as(own, parameter).copy_(grad)


def check_compute_weights(compute: torch.Tensor | None, parameter: torch.Tensor, name: str) -> None:
    if compute is None:
        return
    is_half = compute.dtype is torch.bfloat16 or (compute.dtype is torch.float16 and compute.is_cpu)
    if not (is_half and parameter.dtype is torch.float32 and is_flat_like(compute, parameter)):
        raise ConfigError(
            f"the compute weights of {name} must be bfloat16 or float16 on the host with shape "
            f"{tuple(parameter.shape)} and strides {parameter.stride()}, "
            f"got {compute.dtype} on {compute.device} with shape {tuple(compute.shape)} and strides {compute.stride()}"
        )
    _check_memory(compute, f"the compute weights of {name}")


# Threads of the kernels: how many, with which instructions, and on machines with several nodes which update what.
#
# A *team* is the threads of one node with CPUs. It first updates what lies on that node, or on memory-only nodes near
# it.

_LAUNCHING_THREADS = 2


def thread_count(num_threads: int | None) -> int:
    """Return how many threads to use; None for what the process may use."""
    if num_threads is None:
        return _cpu.available_threads()
    try:
        count = operator.index(num_threads)
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"num_threads must be at least 1, got {num_threads!r}: give a whole number, or None for all")
    return count


def chosen_isa(isa: str | None) -> str:
    if isa is not None and isa not in _cpu.supported_isas():
        raise ConfigError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(_cpu.supported_isas())}")
    return _cpu.best_isa() if isa is None else isa


def kernel_threads(config: OffloadConfig, computes_on_host: bool) -> int:
    """Return how many threads the kernels of a run take: what the user asks for, else what the process may use."""
    # two cores are left to the threads that keep a device busy: one queues the forward, autograd's the backward
    if config.num_threads is not None or computes_on_host or not config.overlaps_step(computes_on_host):
        return thread_count(config.num_threads)
    return max(1, thread_count(None) - _LAUNCHING_THREADS)


class Stretch(NamedTuple):
    """Elements `begin` to `end` of a tensor, in memory order, that one team updates."""

    begin: int
    end: int
    team: int


class ThreadTeams:
    """Divides tensors over the teams of this process, given its CPUs by node that has some.

    `where` tells the node of an address. Where it may not ask (OSError, as in many containers), one team has everything
    and threads run anywhere: slower on such a machine, and never wrong.
    """

    def __init__(
        self,
        cpus: Mapping[int, tuple[int, ...]],
        nearest: Mapping[int, int],
        where: Callable[[int], int | None] = node_at,
    ) -> None:
        self._team_of_node = {node: team for team, node in enumerate(sorted(cpus))}
        self._nearest = nearest
        self._where: Callable[[int], int | None] | None = where
        # the kernel's masks end at CPU 1023; it does without the others
        pairs = [(self._team_of_node[node], cpu) for node in sorted(cpus) for cpu in cpus[node] if cpu < _adam.MAX_CPUS]
        self.cpus = array("q", [number for pair in pairs for number in pair])
        """Pairs of team and CPU, as the kernel takes them."""

    @classmethod
    def detect(cls, root: Path = Path("/"), allowed: frozenset[int] | None = None) -> "ThreadTeams | None":
        """Return the teams of this machine; None where this process has CPUs of one node only: all are near then."""
        cpus = usable_cpus(root, allowed)
        return cls(cpus, nearest_cpu_nodes(root, frozenset(cpus))) if len(cpus) > 1 else None

    def stretches(self, flat: torch.Tensor) -> list[Stretch]:
        """Divide a dense tensor in whole chunks of the kernel; the first page of each is asked for."""
        found: list[Stretch] = []
        if self._where is None:
            return [Stretch(0, flat.numel(), 0)] if flat.numel() else found
        for begin in range(0, flat.numel(), _adam.CHUNK):
            end = min(begin + _adam.CHUNK, flat.numel())
            try:
                node = self._where(flat.data_ptr() + begin * flat.element_size())
            except OSError as error:
                self._where = None
                self.cpus = array("q")  # with all work in one team, its CPUs would get all threads
                warn(
                    f"the kernel refuses to say where pages are ({error}): threads of the optimizer step run anywhere, "
                    "which is slower on a machine with several nodes. In a container allow the system call move_pages"
                )
                return self.stretches(flat)
            team = 0 if node is None else self._team_of_node.get(self._nearest.get(node, node), 0)
            if found and found[-1].team == team:
                found[-1] = Stretch(found[-1].begin, end, team)
            else:
                found.append(Stretch(begin, end, team))
        return found
