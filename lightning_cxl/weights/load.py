"""`load_weights`: from safetensors files straight into the memory that the weights will stay in.

[Note: Loading straight]
Headers decide everything first: what is missing, unexpected or of another shape is one error, with the model as it was.
Then tensor by tensor, in the order of the files: memory is taken where the tensor belongs (only for one on the meta
device), its bytes are read there, and it is put into the model. So memory grows by what has been loaded and nothing
else; conversion to another dtype goes through a chunk of bounded size. When reading fails in the middle, tensors that
were on the meta device are there again; of those that existed, some have been overwritten, and the error says which.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_cxl.errors import CheckpointError, UnsupportedError
from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.memory.new_weight import new_weight
from lightning_cxl.shards import is_sharded
from lightning_cxl.streaming.quantised import is_quantised_later
from lightning_cxl.weights.chunks import Staging
from lightning_cxl.weights.folder import Source, open_weights
from lightning_cxl.weights.match import Matches, Read, match_names, refuse_mismatch
from lightning_cxl.weights.quantise import quantised
from lightning_cxl.weights.saved_quantised import SavedQuantised
from lightning_cxl.weights.sources import Translate, WeightSource, reader_of, tensors_of
from lightning_cxl.weights.tied import ModelWeight
from lightning_cxl.weights.unread import UnreadWeight, are_left_in_files


class LoadReport(NamedTuple):
    """What `load_weights` did; the first two as `torch.nn.Module.load_state_dict` returns them."""

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
            weights go to the tier ``ssd``. Files must not change meanwhile. What is converted, or in another layout,
            is read as without it. None: False in one process; several that have met leave parameters in their files
            until the model is cut, also those that are converted: [Note: Left in files].

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
    return load_translated(model, source, _same, strict=strict, dtype=dtype, mapped=mapped, completes=False)


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
    """Load as `load_weights` does, with tensors of the files translated first; see `match_names`."""
    _refuse_cut(model)
    with open_weights(source) as files:
        matches = match_names(model, tensors_of(files), translate, completes=completes)
        if strict:
            refuse_mismatch(matches, model)
        nbytes = _read_all(matches, dtype, mapped)
    return LoadReport(matches.missing, matches.unexpected, len(matches.reads), nbytes)


def _refuse_cut(model: nn.Module) -> None:
    name = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if name is not None:
        raise UnsupportedError(
            f"`{name}` is cut over processes already, and files are loaded into a model that is not: load first (under "
            "Lightning in `configure_model`), then cut"
        )


def _same(tensors: Sequence[WeightSource]) -> list[tuple[str, WeightSource]]:
    return [(tensor.name, tensor) for tensor in tensors]


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
                _check_tied(first, read)
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
        _note_overwritten(error, [read.weight for read in sources.values() if id(read.weight) not in put_back])
        raise
    return nbytes


def _materialise(read: Read, dtype: torch.dtype | None, mapped: bool | None, staging: Staging) -> None:
    """Give a weight without memory its values: memory with them, pages of the file, or what reads them later."""
    weight, meta = read.weight, read.weight.tensor
    wanted = dtype if dtype is not None and weight.is_parameter and meta.is_floating_point() else meta.dtype
    if isinstance(meta, nn.Parameter) and isinstance(read.source, SavedQuantised):
        weight.put(read.source.parameter(meta, weight.spec, staging, mapped=bool(mapped)))
        return
    if isinstance(meta, nn.Parameter) and is_quantised_later(meta):
        weight.put(quantised(read.source, meta, wanted, weight.spec))
        return
    left = mapped is None and weight.is_parameter and are_left_in_files()
    tensor = _pages_like(meta, wanted, read) if mapped or left else None
    if tensor is None and left:
        tensor = _unread(meta, wanted, read)
    if tensor is None:
        tensor = new_weight(meta, wanted, weight.spec)
        with ordinary_memory():
            read.source.read_into(tensor, staging)
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    tensor.__dict__.update(meta.__dict__)
    weight.put(tensor)


def _pages_like(meta: Tensor, dtype: torch.dtype, read: Read) -> Tensor | None:
    """Return the pages of the file, if they are what new memory would be filled with."""
    if read.source.dtype != dtype or not _is_shown(meta):
        return None
    return read.source.mapped()


def _unread(meta: Tensor, dtype: torch.dtype, read: Read) -> Tensor | None:
    """Return a weight that is read when it is used, if its files can be mapped."""
    reader = reader_of(read.source) if _is_shown(meta) else None
    return None if reader is None else UnreadWeight(meta, dtype, reader)


def _is_shown(meta: Tensor) -> bool:
    """Whether pages of files may stand for new memory: it would have their layout, and be on the host."""
    return meta.is_contiguous() and torch.get_default_device().type == "cpu"


def _check_tied(first: Read, read: Read) -> None:
    """Raise where the files hold two different tensors for weights that are one in the model."""
    with ordinary_memory():
        if not read.source.holds(read.weight.tensor):
            raise CheckpointError(
                f"`{first.source.name}` and `{read.source.name}` are tied in the model and differ in the files. Build "
                "the model untied (of a transformers model: tie_word_embeddings=False in its config)."
            )


def _note_overwritten(error: BaseException, overwritten: list[ModelWeight]) -> None:
    if overwritten:
        error.add_note(
            f"{len(overwritten)} weights of the model have been overwritten, the last of them perhaps in part: "
            f"`{overwritten[0].names[0]}` to `{overwritten[-1].names[0]}`. Load again before you use it."
        )
