"""`load_weights`: from safetensors files straight into the memory that the weights will stay in. `save_weights`: back.

[Note: Loading straight]
Headers decide everything first: what is missing, unexpected or of another shape is one error, with the model as it was.
Then tensor by tensor, in the order of the files: memory is taken where the tensor belongs (only for one on the meta
device), its bytes are read there, and it is put into the model. So memory grows by what has been loaded and nothing
else; conversion to another dtype goes through a chunk of bounded size. When reading fails in the middle, tensors that
were on the meta device are there again; of those that existed, some have been overwritten, and the error says which.

[Note: Saving straight]
Every file is written under a temporary name and synced; only when all are complete, they get their names. Until then
what was saved before is as it was. Then the old index (or single file) goes first and the new one comes last, so that a
crash in between leaves a folder that does not load, not one that loads a mixture.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError, warn
from lightning_cxl.memory.hook import new_weight, ordinary_memory
from lightning_cxl.memory.host_memory import large_blocks_apart
from lightning_cxl.memory.placement import TierSpec, owner_spec
from lightning_cxl.shards import is_sharded
from lightning_cxl.storage.drive import sync_folder
from lightning_cxl.streaming.quantised import is_quantised_later
from lightning_cxl.text import format_bytes, listed, parse_bytes
from lightning_cxl.weights.files import (
    INDEX_FILE,
    SINGLE_FILE,
    NamedTensor,
    Source,
    Staging,
    Translate,
    UnreadWeight,
    WeightSource,
    is_reading_deferred,
    open_weights,
    scratch,
    tensors_of,
    write_tensors,
)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules in this thread with parameters on the ``meta`` device, which take no memory, until exit.

    Buffers are real: they are computed as always, also those that no file holds (rotary frequencies, masks).
    Parameters that are tied stay tied. At no time is there more than one parameter in memory, and no page of it where
    the module makes it with ``torch.empty``, as torch's own do. `load_weights` gives the parameters their memory.

    Example::

        with lightning_cxl.empty_weights():
            model = MyModel()
        lightning_cxl.load_weights(model, "folder")
    """
    thread, twins = threading.get_ident(), WeakTensorKeyDictionary()  # of the same parameter the same twin

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.layout is torch.strided
        # torch's hook is global, so that another thread which builds a model gets here, too
        if not plain or parameter is None or threading.get_ident() != thread:
            return None
        if parameter not in twins:
            twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            twin.__dict__.update(parameter.__dict__)
            twins[parameter] = twin
        return twins[parameter]  # type: ignore[no-any-return]

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # its annotation is wrong
    try:
        with ordinary_memory():
            yield
    finally:
        hook.remove()


def refuse_unready(model: nn.Module) -> None:
    """Raise where parameters or buffers of a model have no memory: there is nothing to compute with."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name in (name for name, tensor in named if is_lazy(tensor)):
        raise ConfigError(f"`{name}` belongs to a lazy module and has no shape: run the model once, then train it.")
    names = [name for name, tensor in named if tensor.is_meta]
    if names:
        raise ConfigError(
            f"{len(names)} of {len(named)} tensors of {type(model).__name__} are on the meta device and have no "
            f"values: {listed(names)}. Load them before training with "
            "`lightning_cxl.load_weights(model, folder)` (under Lightning in `configure_model`; its result names what "
            "the files lack), or build the model without `empty_weights` or `torch.device('meta')` to train it from "
            "scratch."
        )


@dataclass(eq=False, slots=True)
class ModelWeight:
    """One parameter or persistent buffer of a model, under each name that it has."""

    tensor: Tensor
    spec: TierSpec | None  # the tier that decorators ask for, of the module that has it
    names: list[str] = field(default_factory=list)
    holders: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list)
    """The tables of modules in which it is found, with its key."""

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def put(self, tensor: Tensor) -> None:
        for table, key in self.holders:
            table[key] = tensor
        self.tensor = tensor


def model_weights(model: nn.Module) -> dict[str, ModelWeight]:
    """Return what a model's files hold, by name: parameters and persistent buffers, tied ones as one object."""
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
                raise CheckpointError(f"`{name}` belongs to a lazy module and has no shape: run it once, then load.")
            # two tensors are one weight that are the same bytes, seen the same way
            identity: object = id(tensor)
            no_memory = tensor.is_meta or isinstance(tensor, UnreadWeight) or not tensor.numel()
            if not no_memory and tensor.layout is torch.strided:
                identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            weight = by_identity.setdefault(identity, ModelWeight(tensor, owner_spec(modules)))
            weight.names.append(name)
            table = module._parameters if key in module._parameters else module._buffers
            if not any(table is known and key == known_key for known, known_key in weight.holders):
                weight.holders.append((table, key))  # type: ignore[arg-type]  # a table of parameters is one of tensors
            weights[name] = weight
    return weights


def distinct(weights: Mapping[str, ModelWeight]) -> list[ModelWeight]:
    return list({id(weight): weight for weight in weights.values()}.values())


def _paths(
    module: nn.Module, path: str = "", above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield every module with its prefix and those that contain it, a shared one once for each of its names."""
    modules = (*above, module)
    yield path, modules
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{path}{name}.", modules)


_SHOWN = 8  # names in a message
_MAY_BE_MISSING = "_keys_to_ignore_on_load_missing"


class Read(NamedTuple):
    source: WeightSource
    weight: ModelWeight


@dataclass(frozen=True, slots=True)
class Matches:
    reads: list[Read]
    missing: list[str]  # names of weights that no file holds, one for those that are tied
    unexpected: list[str]  # names in files that the model does not have
    lost: list[str]
    """Buffers that the model computes itself and that have no values, because it was built on the meta device."""


def match_names(model: nn.Module, named: Sequence[tuple[str, WeightSource]], *, completes: bool) -> Matches:
    """Match names of the model, with the base model's prefix added or left out as transformers does.

    Where the caller `completes`, which is to initialise what is left on the meta device, fewer names are missing.
    """
    weights = model_weights(model)
    computed = {  # buffers that files do not hold
        f"{path}{key}": tensor
        for path, modules in _paths(model)
        for key, tensor in modules[-1]._buffers.items()
        if tensor is not None and key in modules[-1]._non_persistent_buffers_set
    }
    reads, unexpected, wrong = [], [], []
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # a base model loads into one with a head, and back

    def is_ignored(attribute: str, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())

    for name, source in named:
        if name not in weights and prefix != ".":
            name = next((each for each in (f"{prefix}{name}", name.removeprefix(prefix)) if each in weights), name)
        weight = weights.get(name)
        if weight is None:
            if name not in computed and not is_ignored("_keys_to_ignore_on_load_unexpected", name):
                unexpected.append(source.name)
            continue
        own = weight.tensor.dtype  # numbers of one kind become the other by rounding
        converts = source.dtype == own or (source.dtype.is_floating_point and own.is_floating_point)
        if source.shape != tuple(weight.tensor.shape) or not converts:
            wrong.append(f"`{name}`: {_show(source)} in the file, {_show(weight.tensor)} in the model")
        reads.append(Read(source, weight))
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors do not fit {type(model).__name__}: {'; '.join(wrong[:_SHOWN])}. Nothing has been "
            "loaded. Build the model with the sizes that the files were saved with (their config)."
        )
    filled = {id(read.weight) for read in reads}
    missing = [
        weight.names[0]
        for weight in distinct(weights)
        if id(weight) not in filled
        and ((weight.tensor.is_meta and not completes) or not is_ignored(_MAY_BE_MISSING, weight.names[0]))
    ]
    return Matches(reads, missing, unexpected, [name for name, tensor in computed.items() if tensor.is_meta])


def refuse_mismatch(matches: Matches, model: nn.Module) -> None:
    if matches.lost:
        raise CheckpointError(
            f"{len(matches.lost)} buffers of {type(model).__name__} are on the meta device, and no file holds them, "
            f"because the model computes them when it is built: {listed(matches.lost, _SHOWN)}. Nothing has been "
            "loaded. Build it in `lightning_cxl.empty_weights()`, which keeps buffers real."
        )
    both = (
        (matches.missing, "weights are missing from the files"),
        (matches.unexpected, "tensors of the files are not in the model"),
    )
    if texts := [f"{len(names)} {what}: {listed(names, _SHOWN)}" for names, what in both if names]:
        raise CheckpointError(
            f"the files do not fit {type(model).__name__}: {'. '.join(texts)}. {len(matches.reads)} tensors fit. "
            "Nothing has been loaded. Load into the class that was saved, or pass strict=False to load what fits."
        )


def _show(tensor: WeightSource | torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# Weights that bitsandbytes quantises while they are read: the full-precision weight never exists.
#
# [Note: Quantising while loading]
# The blocks of the 4-bit formats, and the rows of the 8-bit one, do not depend on each other. So a weight is read in
# chunks of whole blocks (rows), each is given to bitsandbytes, and its result goes to memory that was taken where the
# weight belongs. Only what is made from all blocks together waits for the end: the scales of a weight with
# ``bnb_4bit_use_double_quant`` are quantised themselves. The numbers are, bit by bit, those of the whole weight at
# once. bitsandbytes needs several times a chunk beside it, therefore chunks are small.
#
# bitsandbytes is imported when the first weight is quantised, not with this package.

_CHUNK_NUMBERS = 2**20  # a multiple of every block size of bitsandbytes; its kernels take up to 40 bytes for each
_NESTED_BLOCK = 256  # numbers; what bitsandbytes takes for scales of scales


def quantised_like(meta: Any, dtype: torch.dtype, make: Callable[[Sequence[int], torch.dtype], Tensor]) -> nn.Parameter:
    """Return the quantised parameter for the place of one that waits, which its module dequantises to `dtype`."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn.modules import Int8Params, Params4bit

    if type(meta).__name__ == "Int8Params":
        codes = make(meta.shape, torch.int8)
        scales = make(meta.shape[:1], torch.float32)
        return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    num_blocks = -(-meta.numel() // meta.blocksize)
    nested: dict[str, Any] = {}
    if meta.compress_statistics:
        scales_of_scales = make([-(-num_blocks // _NESTED_BLOCK)], torch.float32)
        own = {"code": make([256], torch.float32), "blocksize": _NESTED_BLOCK, "dtype": torch.float32}
        nested = {"offset": make([], torch.float32), "state2": QuantState(absmax=scales_of_scales, **own)}  # type: ignore[no-untyped-call]
    meta.module.quant_state = QuantState(  # type: ignore[no-untyped-call]
        absmax=make([num_blocks], torch.uint8 if nested else torch.float32),
        shape=meta.shape,
        code=make([16], torch.float32),
        blocksize=meta.blocksize,
        quant_type=meta.quant_type,
        dtype=dtype,
        **nested,
    )
    return Params4bit(
        make([-(-meta.numel() // 2)], torch.uint8).view(meta.quant_storage).view(-1, 1),
        requires_grad=False,
        quant_state=meta.module.quant_state,
        blocksize=meta.blocksize,
        compress_statistics=meta.compress_statistics,
        quant_type=meta.quant_type,
        quant_storage=meta.quant_storage,
        module=meta.module,
        bnb_quantized=True,
    )


@torch.no_grad()
def _quantised(source: WeightSource, meta: Any, dtype: torch.dtype, spec: TierSpec | None) -> nn.Parameter:
    """Return a quantised parameter for the place of one on the meta device; values are rounded to `dtype` first."""
    from transformers.modeling_utils import local_torch_dtype

    with large_blocks_apart():  # what the kernels take for chunks
        parameter: nn.Parameter = quantised_like(meta, dtype, lambda shape, own: _new(shape, own, spec))
        with ordinary_memory(), local_torch_dtype(torch.float32):  # bitsandbytes makes code books without naming a type
            if type(meta).__name__ == "Int8Params":
                _fill_8bit(parameter, source, dtype)
            else:
                _fill_4bit(parameter, source, dtype)
    return parameter


def _new(shape: Sequence[int], dtype: torch.dtype, spec: TierSpec | None) -> Tensor:
    return new_weight(torch.empty(shape, dtype=dtype, device="meta"), dtype, spec)


def _fill_4bit(parameter: Any, source: WeightSource, dtype: torch.dtype) -> None:
    from bitsandbytes import functional

    state, codes = parameter.quant_state, parameter.data.view(-1).view(torch.uint8)
    scales = state.absmax if state.state2 is None else scratch(state.absmax.shape, torch.float32)
    begin = 0
    for chunk in source.parts(_CHUNK_NUMBERS):
        part, own = functional.quantize_4bit(chunk.to(dtype), blocksize=state.blocksize, quant_type=state.quant_type)
        codes[begin // 2 :][: part.numel()].copy_(part.view(-1))
        scales[begin // state.blocksize :][: own.absmax.numel()].copy_(own.absmax)
        begin += chunk.numel()
    state.code.copy_(functional.get_4bit_type(state.quant_type, device="cpu"))  # type: ignore[no-untyped-call]
    if state.state2 is not None:
        state.offset.copy_(scales.mean())
        coded, nested = functional.quantize_blockwise(scales - state.offset.cpu(), blocksize=_NESTED_BLOCK)
        state.absmax.copy_(coded)
        state.state2.absmax.copy_(nested.absmax)
        state.state2.code.copy_(nested.code)


def _fill_8bit(parameter: Any, source: WeightSource, dtype: torch.dtype) -> None:
    from bitsandbytes import functional

    row, begin = parameter.shape[1], 0
    for chunk in source.parts(max(1, _CHUNK_NUMBERS // row) * row):
        rows = chunk.to(dtype).view(-1, row).to(torch.float16)  # the only type that bitsandbytes quantises to 8 bit
        codes, scales, _ = functional.int8_vectorwise_quant(rows)
        parameter.CB[begin : begin + len(rows)].copy_(codes)
        parameter.SCB[begin : begin + len(rows)].copy_(scales)
        begin += len(rows)


_BESIDE = re.compile(
    r"(?P<module>.*)\.(?P<key>weight\.(absmax|quant_map|nested_absmax|nested_quant_map|"
    r"quant_state\.bitsandbytes__(nf4|fp4))|SCB|weight_format)"
)


def weight_beside(name: str) -> tuple[str, str] | None:
    """Return the weight that a tensor of a file belongs to, and which of its tensors this is, if any."""
    found = _BESIDE.fullmatch(name)
    return None if found is None else (f"{found['module']}.weight", found["key"].removeprefix("weight."))


_Source = TypeVar("_Source", bound=WeightSource)


def with_beside(tensors: Sequence[_Source]) -> tuple[list[_Source], dict[str, dict[str, _Source]]]:
    """Return weights, and by the name of a quantised one what files have beside it, by key."""
    weights, beside, names = list[_Source](), dict[str, dict[str, _Source]](), {tensor.name for tensor in tensors}
    for tensor in tensors:
        owner, key = weight_beside(tensor.name) or ("", "")
        if owner in names:
            beside.setdefault(owner, {})[key] = tensor
        else:
            weights.append(tensor)
    return weights, beside


class SavedQuantised(WeightSource):
    """One weight that is quantised in the files, with the tensors beside it by key, such as ``absmax`` or ``SCB``."""

    def __init__(self, weight: WeightSource, beside: Mapping[str, WeightSource], meta: nn.Parameter) -> None:
        self._weight, self._beside = weight, beside
        self.name, self.shape, self.dtype = weight.name, tuple(meta.shape), meta.dtype
        bits = 4 if type(meta).__name__ == "Params4bit" else 8
        if prod(weight.shape) * weight.dtype.itemsize != -(-meta.numel() * bits // 8):
            raise CheckpointError(
                f"`{self.name}` has {tuple(weight.shape)} {weight.dtype} in the files, which is not {self.shape} "
                f"numbers of {bits} bit. Build the model with the sizes that the files were saved with (their config)."
            )

    def parameter(self, meta: Any, spec: TierSpec | None, staging: Staging, *, mapped: bool) -> nn.Parameter:
        """Return the quantised parameter, with what belongs to it, where the weight belongs."""
        from bitsandbytes.nn.modules import Int8Params, Params4bit

        def placed(source: WeightSource) -> Tensor:
            pages = source.mapped() if mapped and torch.get_default_device().type == "cpu" else None
            return filled(source, _new(source.shape, source.dtype, spec)) if pages is None else pages

        def filled(source: WeightSource, tensor: Tensor) -> Tensor:
            with ordinary_memory():
                source.read_into(tensor, staging)
            return tensor

        large = "absmax" if type(meta).__name__ == "Params4bit" else "SCB"
        try:
            codes, scales = placed(self._weight), placed(self._beside[large])
            small = {}  # of a few numbers, which are not worth a place of their own
            with ordinary_memory():
                for key, each in self._beside.items():
                    if key != large:
                        small[key] = filled(each, torch.empty(each.shape, dtype=each.dtype, device="cpu"))
            if large == "SCB":
                if int(small.get("weight_format", 0)) != 0:
                    raise ValueError("it has the layout of an old bitsandbytes for one kind of GPU")
                return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
            return Params4bit.from_prequantized(
                data=codes,
                quantized_stats={"absmax": scales, **small},
                requires_grad=False,
                device=codes.device,
                module=meta.module,
            )
        except (ValueError, KeyError, AssertionError, TypeError) as error:
            raise CheckpointError(
                f"bitsandbytes does not understand what the files hold of the quantised weight `{self.name}` "
                f"({type(error).__name__}: {error}). Complete the download, or save the model again."
            ) from error

    def values(self, staging: Staging | None = None) -> Tensor:
        raise CheckpointError(f"`{self.name}` is quantised in the files: only a weight on the meta device is loaded")

    def holds(self, tensor: Tensor) -> bool:
        with ordinary_memory():
            return self._weight.holds(tensor)


class LoadReport(NamedTuple):
    """The result of `load_weights`; the first two as `torch.nn.Module.load_state_dict` returns them."""

    missing_keys: list[str]
    """Weights that no file holds: as they were, or still on the meta device."""
    unexpected_keys: list[str]
    """Tensors of the files that the model does not have."""
    num_tensors: int
    """Tensors loaded."""
    nbytes: int
    """Bytes that they take in the model."""


def load_weights(
    model: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    mapped: bool | None = None,
) -> LoadReport:
    """Load safetensors files into a model, tensor by tensor; at no time is there a second copy in memory.

    Parameters and persistent buffers on the ``meta`` device get memory: inside a run (`configure_model` under the
    strategy) on the tier that decorators and the policy say, elsewhere as `host_allocation` says or ordinary. Others
    are written in place and stay the same objects. Numbers are converted to the dtype that the model has, rounded to
    nearest. Tied weights stay tied, and need to be in the files under one of their names only. Names may lack or have
    the prefix of a transformers base model.

    Args:
        model: INOUT.
        source: a safetensors file, a list of them, or a folder with `model.safetensors` or
            `model.safetensors.index.json`.
        strict: refuse when a weight is missing or a tensor of the files is not in the model; False: load what fits.
        dtype: of floating-point parameters that are on the ``meta`` device; None: the one they have there.
        mapped: weights on the ``meta`` device show the pages of the files instead, as with ``torch.load(mmap=True)``,
            and take no memory until a run moves them to their tiers. For a model that is larger than memory, whose
            weights go to the tier ``ssd``. Files must not change meanwhile. Weights that are converted, or have
            another layout, are read as without it. None: False in one process; several that have met
            read parameters when the model is cut, also those that are converted: [Note: Deferred reading].

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit the model; or reading fails.
        TierFullError: the weights do not fit in memory.
        UnsupportedError: the model is cut over processes already.

    Example::

        with lightning_cxl.empty_weights():
            model = MyModel()
        lightning_cxl.load_weights(model, "folder", dtype=torch.bfloat16)
    """

    options: Any = {"strict": strict, "dtype": dtype, "mapped": mapped, "completes": False}
    return load_translated(model, source, lambda tensors: [(each.name, each) for each in tensors], **options)


def load_translated(
    model: nn.Module,
    source: Source,
    translate: Translate,
    *,
    strict: bool,
    dtype: torch.dtype | None = None,
    mapped: bool | None = None,
    completes: bool = True,
) -> LoadReport:
    name = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if name is not None:
        raise UnsupportedError(
            f"`{name}` is cut over processes already, and files are loaded into a model that is not: load first (under "
            "Lightning in `configure_model`), then cut"
        )
    with open_weights(source) as files:
        matches = match_names(model, translate(tensors_of(files)), completes=completes)
        if strict:
            refuse_mismatch(matches, model)
        nbytes = _read_all(matches, dtype, mapped)
    return LoadReport(matches.missing, matches.unexpected, len(matches.reads), nbytes)


def _read_all(matches: Matches, dtype: torch.dtype | None, mapped: bool | None) -> int:
    """Read every tensor that matches; return the bytes they take in the model. See [Note: Loading straight]."""
    sources: dict[int, Read] = {}
    made: list[tuple[ModelWeight, Tensor]] = []
    staging = Staging()
    nbytes = 0
    try:
        for read in matches.reads:
            first = sources.setdefault(id(read.weight), read)
            if first is not read:
                with ordinary_memory():
                    is_same = read.source.holds(read.weight.tensor)
                if not is_same:
                    raise CheckpointError(
                        f"`{first.source.name}` and `{read.source.name}` are tied in the model and differ in the "
                        "files. Build the model untied (tie_word_embeddings=False in the config)."
                    )
                continue
            before = read.weight.tensor
            if before.is_meta or isinstance(before, UnreadWeight):
                made.append((read.weight, before))
                _materialise(read, dtype, mapped, staging)
            else:
                with ordinary_memory():
                    read.source.read_into(before, staging)
            nbytes += read.weight.tensor.nbytes
    except BaseException as error:
        for weight, before in made:
            weight.put(before)
        put_back = {id(weight) for weight, _ in made}
        names = [read.weight.names[0] for read in sources.values() if id(read.weight) not in put_back]
        if names:
            error.add_note(
                f"{len(names)} weights of the model have been overwritten, the last of them perhaps in part: "
                f"`{names[0]}` to `{names[-1]}`. Load again before you use it."
            )
        raise
    return nbytes


def _materialise(read: Read, dtype: torch.dtype | None, mapped: bool | None, staging: Staging) -> None:
    weight, meta = read.weight, read.weight.tensor
    wanted = dtype if dtype is not None and weight.is_parameter and meta.is_floating_point() else meta.dtype
    if isinstance(meta, nn.Parameter) and isinstance(read.source, SavedQuantised):
        weight.put(read.source.parameter(meta, weight.spec, staging, mapped=bool(mapped)))
        return
    if isinstance(meta, nn.Parameter) and is_quantised_later(meta):
        weight.put(_quantised(read.source, meta, wanted, weight.spec))
        return
    # a scalar is whole on every process
    is_deferred = mapped is None and weight.is_parameter and meta.ndim > 0 and is_reading_deferred()
    tensor = None
    # pages of files may stand for new memory that would have their layout, and be on the host
    if (mapped or is_deferred) and meta.is_contiguous() and torch.get_default_device().type == "cpu":
        tensor = read.source.mapped() if read.source.dtype == wanted else None
        reader = read.source.reader() if is_deferred and tensor is None else None
        if reader is not None:
            tensor = UnreadWeight(meta, wanted, reader)
    if tensor is None:
        tensor = new_weight(meta, wanted, weight.spec)
        with ordinary_memory():
            read.source.read_into(tensor, staging)
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    tensor.__dict__.update(meta.__dict__)
    weight.put(tensor)


_METADATA = {"format": "pt"}  # transformers refuses files without it
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class LaterValues(NamedTuple):
    dtype: torch.dtype
    read: Callable[[], Tensor]


def save_weights(
    model: nn.Module, target: str | PathLike[str], max_shard_bytes: int | str = "5GiB", dtype: torch.dtype | None = None
) -> list[Path]:
    """Write a model's parameters and persistent buffers as safetensors, with a few tens of MiB of extra memory.

    Tied weights are written once, under the name that transformers keeps. The files load with `load_weights`, with
    ``safetensors.torch.load_file`` and, beside a config, with ``from_pretrained`` of transformers. Files that a
    folder had from an earlier save are replaced; on an error they stay.

    Args:
        model: on any device.
        target: a folder, or a file whose name ends in ``.safetensors``, which then holds everything.
        max_shard_bytes: a folder gets one file up to this size, else several and an index.
        dtype: of floating-point parameters in the files; None: the one they have.

    Returns:
        The files with weights.

    Raises:
        CheckpointError: the file system refused, or the model has tensors that such files cannot hold.
        ConfigError: `max_shard_bytes` is no size, or `target` neither a folder nor a ``.safetensors`` file.

    Example::

        lightning_cxl.save_weights(model, "folder", max_shard_bytes="2GiB", dtype=torch.bfloat16)
    """
    return save_tensors(named_tensors(model, dtype), Path(fspath(target)), max_shard_bytes)


def named_tensors(
    model: nn.Module, dtype: torch.dtype | None, values: Mapping[str, LaterValues] | None = None
) -> list[NamedTensor]:
    """Return what `save_weights` writes, in the model's order, tied weights once.

    `values` gives values later: of weights on the meta device, by the first name of each.
    """
    by_name = model_weights(model)
    weights = distinct(by_name)
    later = values or {}
    empty = [weight.names[0] for weight in weights if weight.tensor.is_meta and weight.names[0] not in later]
    if empty:
        raise CheckpointError(
            f"{len(empty)} weights of {type(model).__name__} are on the meta device and have no values, such as "
            f"`{empty[0]}`: load them before you save."
        )
    sparse = [
        weight.names[0] for weight in weights if weight.tensor.layout is not torch.strided or weight.tensor.is_quantized
    ]
    if sparse:
        raise CheckpointError(f"safetensors files hold dense tensors; `{sparse[0]}` is sparse or quantized")
    state = model.state_dict()
    beside: dict[str, list[NamedTensor]] = {}  # what state dicts have for each quantised weight
    for name, tensor in state.items():
        owner = weight_beside(name)
        if name not in by_name and owner is not None and owner[0] in by_name:
            beside.setdefault(owner[0], []).append(NamedTensor(name, tensor, tensor.dtype))
    _warn_of_other_state(model, state.keys(), by_name.keys() | {item.name for each in beside.values() for item in each})
    declared = []  # patterns of names that transformers will tie to others when it loads the model
    for path, module in model.named_modules():
        tied: Any = getattr(module, "_tied_weights_keys", None) or ()
        declared += [f"{path}.{pattern}" if path else pattern for pattern in tied]
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    named = []
    for weight in weights:
        parts = beside.get(weight.names[0], [])
        converts = dtype is not None and weight.is_parameter and weight.tensor.is_floating_point() and not parts
        # the first name that is not tied to another one, as transformers does
        names = [name for name in weight.names if name not in ignored]
        names.sort(key=lambda name: any(re.search(pattern, name) for pattern in declared))
        if names:
            own, read = later.get(weight.names[0], (weight.tensor.dtype, None))
            named.append(NamedTensor(names[0], weight.tensor, dtype if converts and dtype else own, read))
            named += parts
    return named


def save_tensors(tensors: Sequence[NamedTensor], path: Path, max_shard_bytes: int | str) -> list[Path]:
    """Write files, and an index where there are several. See [Note: Saving straight]."""
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        max_bytes = parse_bytes(max_shard_bytes)
    except ValueError as error:
        raise ConfigError(f"max_shard_bytes: {error}") from None
    if max_bytes == 0:
        raise ConfigError("max_shard_bytes must be more than 0")
    is_folder = path.suffix != ".safetensors" or path.is_dir()
    if is_folder and path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file: give a folder, or a file name that ends in .safetensors")
    files, index = {path / SINGLE_FILE if is_folder else path: list(tensors)}, None
    if is_folder and tensors:
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) < len(tensors):
            raise CheckpointError("two tensors of the model would have one name in the files; rename one")
        split = split_state_dict_into_shards_factory(
            by_name,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_bytes,
        )
        files = {path / file: [by_name[name] for name in own] for file, own in split.filename_to_tensors.items()}
        if split.is_sharded:
            num_parameters = sum(each.tensor.numel() for each in tensors if isinstance(each.tensor, nn.Parameter))
            metadata = {**split.metadata, "total_parameters": num_parameters}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    try:
        (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
        with ordinary_memory():
            for final, own in files.items():
                write_tensors(_partial(final), own, _METADATA)
        _rename(list(files), index, path if is_folder else None)
    except OSError as error:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        raise CheckpointError(
            f"could not save {format_bytes(nbytes)} of weights to `{path}`: {error.strerror or error}. Free space "
            "there or save elsewhere."
        ) from error
    finally:
        for final in files:
            _partial(final).unlink(missing_ok=True)
    return list(files)


def _warn_of_other_state(model: nn.Module, state: Set[str], written: Set[str]) -> None:
    """Warn where modules have a state dict of their own making: only parameters and buffers are saved."""
    other = [
        f"{len(names)} {where}, such as `{min(names)}`"
        for names, where in (
            (state - written, "entries of its state dict are no parameters or buffers and not in the files"),
            (written - state, "tensors have other names in the files than in its state dict"),
        )
        if names
    ]
    if other:
        warn(f"{type(model).__name__}: {'; '.join(other)}.", level=4)


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.{os.getpid()}.partial")


def _rename(files: Sequence[Path], index: Mapping[str, Any] | None, folder: Path | None) -> None:
    """Give complete files their names, and remove what they replace in a folder. See [Note: Saving straight]."""
    if folder is None:
        os.replace(_partial(files[0]), files[0])
        sync_folder(files[0].parent)
        return
    index_file = folder / INDEX_FILE
    try:
        if index is not None:
            _partial(index_file).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for stale in {index_file, folder / SINGLE_FILE}.difference(files):
            stale.unlink(missing_ok=True)
        sync_folder(folder)
        for file in files:
            os.replace(_partial(file), file)
        if index is not None:
            os.replace(_partial(index_file), index_file)
        for old in folder.iterdir():
            if _SHARD.fullmatch(old.name) and old not in files:
                old.unlink()
        sync_folder(folder)
    finally:
        _partial(index_file).unlink(missing_ok=True)
