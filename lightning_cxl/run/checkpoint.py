"""What checkpoints hold beside the usual entries.

A checkpoint is an ordinary Lightning file: `state_dict` and `optimizer_states` are what plain Lightning writes, reads.
Under the key ``lightning_cxl`` lies what only we need: parameter names of the optimizers, so that state finds its
parameter when their order changed, and master weights where they are not the model's weights themselves.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.optim.number_formats import split
from lightning_cxl.optim.parameter_state import REMAINDER
from lightning_cxl.optim.saved_state import decoded, joined, without_remainder
from lightning_cxl.run import state_on_ssd as ssd_checkpoint
from lightning_cxl.run.state_on_ssd import KEY, SSD, StateOnSsd
from lightning_cxl.shards import local, shard_of, sharded_like

if TYPE_CHECKING:  # it imports torch's checkpoints, which one device does without
    from lightning_cxl.run.sharded_reading import ShardedCheckpoint

log = logging.getLogger(__name__)


class LoadedCheckpoint(dict[str, Any]):
    """A checkpoint as plain Lightning reads it, for hooks that look at it; our entry is beside it.

    A copy or a pickle is without our entry, in a class that ``torch.load`` trusts.

    Args:
        folder: where tensors are read from when their memory is there; None where `loaded` has them.
    """

    def __init__(self, loaded: Mapping[str, Any], folder: "ShardedCheckpoint | None" = None) -> None:
        super().__init__(loaded)
        self.own: dict[str, Any] = self.pop(KEY, None) or {}
        self.folder = folder
        if folder is not None and folder.num_optimizers:
            self["optimizer_states"] = [None] * folder.num_optimizers  # Lightning asks whether there are some

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[dict[str, Any]]]:
        """Copy and pickle as a dict of Python's own."""
        return OrderedDict, ({**self},)


def own_entry(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return our entry of a checkpoint; empty where another strategy wrote it."""
    return checkpoint.own if isinstance(checkpoint, LoadedCheckpoint) else checkpoint.get(KEY) or {}


def entry_of(optimizers: Iterable[Optimizer], masters: MasterWeights, num_received: int) -> dict[str, Any]:
    """Return our own entry for a checkpoint."""
    masters.absorb_changes()
    names = [[[masters.name_of(p) for p in group["params"]] for group in opt.param_groups] for opt in optimizers]
    usable = [own if _are_different(own) else None for own in names]
    return {
        "optimizer_param_names": usable,
        "master_weights": masters.named_masters(),
        "num_gradients": num_received,
    }


@contextmanager
def refer_to_ssd(
    checkpoint: dict[str, Any], own: dict[str, Any], on_ssd: StateOnSsd | None, path: str
) -> Iterator[dict[str, Any]]:
    """Return a region in which a checkpoint is written; yields what to write.

    See [Note: Referring checkpoints].
    """
    if on_ssd is None or not on_ssd.refers:
        yield {**checkpoint, KEY: own}
        return
    states = ssd_checkpoint.refer(checkpoint["optimizer_states"])
    with ssd_checkpoint.commit_beside(on_ssd, path) as entry:
        yield {**checkpoint, "optimizer_states": states, KEY: {**own, SSD: entry}}


def _are_different(groups: list[list[str]]) -> bool:
    names = [name for group in groups for name in group]
    return len(names) == len(set(names))


def load_optimizers(
    optimizers: Sequence[Optimizer],
    states: Collection[Mapping[str, Any]],
    own: Mapping[str, Any],
    name_of: Callable[[torch.Tensor], str],
    on_ssd: StateOnSsd | None,
) -> None:
    """Load states into optimizers, by parameter name where names are known.

    Args:
        states: of as many optimizers in torch's format; empty where a checkpoint was written without them, which leaves
            the optimizers as they are.
    """
    if not states:
        log.info("the checkpoint has no optimizer states: the optimizers go on with what they have")
        return
    if len(states) != len(optimizers):
        raise CheckpointError(f"the checkpoint has state of {len(states)} optimizers, this run has {len(optimizers)}")
    if SSD in own:
        ssd_checkpoint.restore(on_ssd, own[SSD])
    saved_names = own.get("optimizer_param_names") or [None] * len(states)
    for optimizer, state, names in zip(optimizers, states, saved_names, strict=True):
        current = [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        ordered = by_name(state, names, current)
        if isinstance(optimizer, CPUAdam):
            if on_ssd is not None:
                ordered = ssd_checkpoint.resolve(ordered, optimizer)
            optimizer.load_state_dict(ordered)
        else:
            load_plain(optimizer, ordered, current)


def load_folder(
    folder: "ShardedCheckpoint",
    optimizers: Sequence[Optimizer],
    masters: MasterWeights | None,
    name_of: Callable[[torch.Tensor], str],
) -> None:
    """Load the state of optimizers, and master weights, from a folder. See [Note: Sharded checkpoints]."""
    if folder.num_optimizers not in (0, len(optimizers)):
        raise CheckpointError(
            f"the checkpoint has state of {folder.num_optimizers} optimizers, this run has {len(optimizers)}"
        )
    for index, optimizer in enumerate(optimizers if folder.num_optimizers else []):
        folder.optimizer(index, optimizer, name_of)
    if masters is not None:
        restore_masters(folder.masters({pair.name: pair.master for pair in masters}), masters, optimizers)


def by_name(state: Mapping[str, Any], saved: list[list[str]] | None, current: list[list[str]]) -> dict[str, Any]:
    """Return an optimizer's state dict with its indices brought into the order that the parameters have now.

    Args:
        state: torch's format, indices counting through the groups as they were when saved.
        saved: parameter names by group when saved; None where they were not known, so that the order is kept.
    """
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group) for group in current]:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, this one has {[len(g) for g in current]}. "
            "Configure the optimizer as it was when the checkpoint was saved."
        )
    if saved is None:
        return dict(state)
    groups = []
    for saved_names, names, group in zip(saved, current, state["param_groups"], strict=True):
        index_of = dict(zip(saved_names, group["params"], strict=True))
        missing = [name for name in names if name not in index_of]
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer has no state for parameter `{missing[0]}` ({len(missing)} in all); it has "
                f"{', '.join(f'`{name}`' for name in list(index_of)[:3])}, ... "
                "Configure the optimizer as it was when saved."
            )
        kept = {key: value for key, value in group.items() if key != "param_names"}  # those are in the saved order
        groups.append({**kept, "params": [index_of[name] for name in names]})
    return {**state, "param_groups": groups}


def load_plain(optimizer: Optimizer, state: Mapping[str, Any], names: list[list[str]]) -> None:
    """Load an optimizer's state dict into an optimizer that is not CPUAdam, which may have written it.

    8-bit momentum and variance are decoded, and the remainders of split master weights go into the masters.
    """
    entries: dict[Any, Any] = dict(state["state"])
    for group, saved, group_names in zip(optimizer.param_groups, state["param_groups"], names, strict=True):
        for parameter, key, name in zip(group["params"], saved["params"], group_names, strict=True):
            if key not in entries:
                continue
            entries[key], remainder = without_remainder(decoded(entries[key], f"`{name}`"))
            if remainder is not None:
                with torch.no_grad():
                    own, lower = local(parameter).detach(), shard_of(remainder, parameter)
                    own.copy_(joined(own, lower))
            entries[key] = {each: _cut_like(value, parameter) for each, value in entries[key].items()}
    optimizer.load_state_dict({**state, "state": entries})


def _cut_like(value: Any, parameter: torch.Tensor) -> Any:
    """Return state of a parameter cut as that is, where it has its shape."""
    is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
    return sharded_like(shard_of(value, parameter), parameter) if is_like else value


def plain_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that needs nothing of this package, for plain Lightning with torch's optimizers.

    Momentum and variance become float32, also where they were 8 bit, which torch's Adam cannot read; weights whose
    float32 master weights are in the file become those. Takes 8 more bytes of memory per parameter. State on SSD that
    the checkpoint refers to is read from there, and its checksums are compared.

    Example::

        plain = lightning_cxl.plain_checkpoint(torch.load("offloaded.ckpt"))
        torch.save(plain, "plain.ckpt")

    Args:
        checkpoint: as `torch.load` returns it; is left as it is.

    Raises:
        CheckpointError: 8-bit state of another format than bitsandbytes' dynamic one; or state on SSD, to which the
            checkpoint refers, that is not there any more.
        StorageError: a drive cannot read that state, or has damaged it.
    """
    own = own_entry(checkpoint)
    saved = checkpoint["state_dict"]
    weights = {name: value for name, value in (own.get("master_weights") or {}).items() if name in saved}
    states = checkpoint.get("optimizer_states", [])
    if SSD in own:
        states = ssd_checkpoint.whole(states, own[SSD])
    all_names = own.get("optimizer_param_names") or [None] * len(states)
    plain_states = []
    for state, names in zip(states, all_names, strict=True):
        entries = {}
        name_of = names_by_key(state, names)
        for key, entry in state["state"].items():
            name = name_of.get(key)
            plain, remainder = without_remainder(decoded(entry, f"`{name or key}`"))
            entries[key] = {k: _widened(v) for k, v in plain.items()}
            if remainder is not None and name in saved:
                weights[name] = joined(saved[name], remainder)
        plain_states.append({**state, "state": entries})
    rest = {key: value for key, value in checkpoint.items() if key != KEY}
    return {**rest, "state_dict": _with_tied(saved, weights), **({"optimizer_states": plain_states} if states else {})}


def _with_tied(saved: Mapping[str, Any], changed: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state dict with changed weights; what is tied to one changes with it."""

    def memory(value: Any) -> object:
        return (value.data_ptr(), value.shape, value.stride()) if isinstance(value, torch.Tensor) else id(value)

    by_memory = {memory(saved[name]): value for name, value in changed.items()}
    return {name: by_memory.get(memory(value), value) for name, value in saved.items()}


def names_by_key(state: Mapping[str, Any], names: list[list[str]] | None) -> dict[Any, str]:
    """Return the parameters' names by the keys that an optimizer's state dict has for them.

    Args:
        names: by group, as our entry has them; None where they are not known.
    """
    groups = zip(state["param_groups"], names or [], strict=names is not None)
    return {key: name for group, own in groups for key, name in zip(group["params"], own, strict=True)}


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def restore_masters(
    saved: Mapping[str, torch.Tensor] | None, masters: MasterWeights, optimizers: Iterable[Optimizer]
) -> None:
    """Bring master weights back from a checkpoint, or take the loaded compute weights where it has none.

    Float32 masters of a checkpoint also become split ones; split ones are in the optimizer's state and load with it.
    """
    masters.absorb_changes()
    optimizers = list(optimizers)
    states = {id(p): (state, optimizer) for optimizer in optimizers for p, state in optimizer.state.items()}
    for pair in masters:
        value = (saved or {}).get(pair.name)
        if value is None:
            continue
        if value.shape != pair.master.shape:
            raise CheckpointError(
                f"the checkpoint's master weight `{pair.name}` has shape {tuple(value.shape)}, "
                f"the model's {tuple(pair.master.shape)}"
            )
        with torch.no_grad():
            state, owner = states.get(id(pair.master), (None, None))
            remainder = (state or {}).get(REMAINDER)
            value = shard_of(value, pair.master)
            if remainder is not None:
                upper, lower = split(value.float().contiguous())
                local(pair.master).copy_(upper)
                if isinstance(owner, CPUAdam):
                    owner.load_remainder(pair.master, lower)
                else:
                    local(remainder).copy_(lower)
            elif not pair.is_shared:
                local(pair.master).copy_(value)
