"""`ShardedCheckpoint`: reads folders that several processes have written. See [Note: Sharded checkpoints]."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_each
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.parameter_state import MOMENT_KEYS
from lightning_cxl.optim.resharded import of_this_shard
from lightning_cxl.run.saved_generation import KEY
from lightning_cxl.run.sharded_checkpoint import META, SCALES
from lightning_cxl.shards import is_sharded, local, sharded_like

_MASTERS = f"{KEY}.master_weights"
_IS_OPTIMIZER = re.compile(r"optimizer_\d+\.").match


class ShardedCheckpoint:
    """A checkpoint folder. Each process reads by itself what it needs.

    Args:
        path: of the folder.

    Raises:
        CheckpointError: it is no checkpoint, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            metadata = FileSystemReader(path).read_metadata()
        except Exception as error:
            raise self._damaged(error) from error
        self._metadata: Metadata = metadata
        self._reader = _KnownReader(path, metadata)

    @property
    def num_optimizers(self) -> int:
        """Of how many optimizers there is state."""
        return len({name.partition(".")[0] for name in self._metadata.state_dict_metadata if _IS_OPTIMIZER(name)})

    def masters(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return master weights by name, of those wanted that there are: new tensors, cut as those wanted."""
        found = {}
        for name in self.names(_MASTERS):
            if name in wanted:
                own = torch.empty_like(local(wanted[name].detach()), dtype=torch.float32, device="cpu")
                found[name] = sharded_like(own, wanted[name])
        self.read({f"{_MASTERS}.{name}": value for name, value in found.items()})
        return found

    def rest(self, *, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what is no tensor."""
        try:
            loaded: dict[str, Any] = torch.load(self._path / META, map_location="cpu", weights_only=weights_only)
        except (OSError, EOFError, RuntimeError) as error:
            raise self._damaged(error) from error
        return loaded

    def names(self, prefix: str) -> list[str]:
        """Return the rest of all names that begin with `prefix` and a dot."""
        start = f"{prefix}."
        return [name[len(start) :] for name in self._metadata.state_dict_metadata if name.startswith(start)]

    def read(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Read into tensors, of any cut and floating point type; return them, and what is no tensor anew.

        Args:
            tensors: by full name. INOUT.

        Raises:
            CheckpointError: a name is not in the checkpoint, a shape is another one, or a file is damaged.
        """
        wanted = dict(tensors)
        for name, value in wanted.items():
            known = self._metadata.state_dict_metadata.get(name)
            if known is None:
                raise CheckpointError(f"checkpoint `{self._path}` has no `{name}`; it has {self._some()}")
            shape = tuple(known.size) if isinstance(known, TensorStorageMetadata) else None
            if shape is not None and isinstance(value, torch.Tensor) and shape != tuple(value.shape):
                raise CheckpointError(
                    f"`{name}` in checkpoint `{self._path}` has shape {shape}, and {tuple(value.shape)} here"
                )
        if wanted:
            try:
                with warnings.catch_warnings():  # without a process group torch says so, for every tensor
                    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
                    load_each(wanted, storage_reader=self._reader, no_dist=True)
            except Exception as error:
                raise self._damaged(error) from error
        return wanted

    def read_weights(self, model: nn.Module, *, strict: bool) -> list[str]:
        """Read the weights and buffers of a model into the memory they have; return what the checkpoint lacks.

        Raises:
            CheckpointError: `strict`, and the names here and there are not the same; or see `read`.
        """
        own, saved = model.state_dict(), set(self.names("state_dict"))
        missing, unknown = sorted(own.keys() - saved), sorted(saved - own.keys())
        if strict and (missing or unknown):
            raise CheckpointError(
                f"checkpoint `{self._path}` is of another model: it lacks {missing[:3] or 'nothing'} ({len(missing)}), "
                f"and the model lacks {unknown[:3] or 'nothing'} ({len(unknown)})"
            )
        tensors = {f"state_dict.{name}": value for name, value in own.items() if name in saved}
        self.read(tensors)
        torch.autograd.graph.increment_version([p for p in model.parameters() if is_sharded(p)])
        return missing

    def optimizer(self, index: int, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str]) -> None:
        """Read the state of one optimizer, parameter by parameter.

        Args:
            index: of the optimizer in the checkpoint.
            optimizer: INOUT.
            name_of: names of its parameters.

        Raises:
            CheckpointError: it is of other parameters, or see `read`.
        """
        prefix = f"optimizer_{index}"
        if not self.names(prefix):
            raise CheckpointError(f"checkpoint `{self._path}` has no state of optimizer {index}; it has {self._some()}")
        keys_of: dict[str, list[str]] = {}
        for rest in self.names(f"{prefix}.state"):
            name, key = _split_key(rest)
            keys_of.setdefault(name, []).append(key)
        entries: dict[int, dict[str, Any]] = {}
        number = 0
        groups = self._groups(prefix, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = name_of(parameter)
                entry = self._entry(f"{prefix}.state.{name}", keys_of.pop(name, []), parameter)
                if isinstance(optimizer, CPUAdam):
                    optimizer.load_parameter(parameter, name, entry)
                elif entry:
                    entries[number] = entry
                number += 1
        if keys_of:
            raise CheckpointError(
                f"checkpoint `{self._path}` has optimizer state of {next(iter(keys_of))!r} ({len(keys_of)} in all), "
                "which this optimizer does not have: configure it as it was when the checkpoint was saved"
            )
        if isinstance(optimizer, CPUAdam):
            optimizer.load_options(groups)
        else:
            optimizer.load_state_dict({"state": entries, "param_groups": _numbered(groups, optimizer)})

    def _groups(self, prefix: str, optimizer: Optimizer) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        values = self.read({f"{prefix}.param_groups.{rest}": None for rest in self.names(f"{prefix}.param_groups")})
        for name, value in values.items():
            index, _, option = name.removeprefix(f"{prefix}.param_groups.").partition(".")
            option, _, place = option.partition(".")
            if place:  # a list of tensors, such as betas
                found.setdefault(int(index), {}).setdefault(option, {})[int(place)] = value
            else:
                found.setdefault(int(index), {})[option] = value
        if len(found) != len(optimizer.param_groups):
            raise CheckpointError(
                f"checkpoint `{self._path}` has {len(found)} parameter groups of `{prefix}`, this optimizer has "
                f"{len(optimizer.param_groups)}: configure it as it was when the checkpoint was saved"
            )
        return [
            {k: tuple(v[i] for i in sorted(v)) if isinstance(v, dict) else v for k, v in found[index].items()}
            for index in sorted(found)
        ]

    def _entry(self, prefix: str, keys: Iterable[str], parameter: torch.Tensor) -> dict[str, Any]:
        """Return the saved state of one parameter, of which this process's part is read; empty if there is none."""
        wanted: dict[str, Any] = {}
        for key in keys:
            known = self._metadata.state_dict_metadata[f"{prefix}.{key}"]
            if not isinstance(known, TensorStorageMetadata):
                wanted[f"{prefix}.{key}"] = None
                continue
            dtype: torch.dtype = known.properties.dtype
            if known.size == parameter.shape and parameter.shape:
                shard = torch.empty_like(local(parameter.detach()), dtype=dtype, device="cpu")
                wanted[f"{prefix}.{key}"] = sharded_like(shard, parameter)
            else:
                wanted[f"{prefix}.{key}"] = _whole(torch.empty(known.size, dtype=dtype), parameter)
        entry = {name.removeprefix(f"{prefix}."): value for name, value in self.read(wanted).items()}
        return of_this_shard(entry, parameter) if MOMENT_KEYS[0].codes in entry else entry

    def _damaged(self, error: Exception) -> CheckpointError:
        text = str(error).strip().splitlines()
        return CheckpointError(
            f"cannot read checkpoint `{self._path}`: {type(error).__name__}: {text[0] if text else 'no reason given'}. "
            "It is damaged or not a checkpoint: resume from another one."
        )

    def _some(self) -> str:
        names = list(self._metadata.state_dict_metadata)
        return ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _split_key(rest: str) -> tuple[str, str]:
    """Return the parameter's name and the key of its state: the last part, or the last two of scales."""
    name, _, key = rest.rpartition(".")
    if key.isdigit() and name.rpartition(".")[2] in SCALES:
        name, _, scales = name.rpartition(".")
        return name, f"{scales}.{key}"
    return name, key


def _numbered(groups: list[dict[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
    numbered, start = [], 0
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        stop = start + len(own["params"])
        numbered.append({**group, "params": list(range(start, stop))})
        start = stop
    return numbered


def _whole(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return state of another shape than its parameter, such as means of rows, as what every process has whole."""
    if not isinstance(parameter, DTensor) or not tensor.shape or tensor.dtype is torch.uint8:
        return tensor
    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _KnownReader(FileSystemReader):
    """Reads the list of what there is once, not for every parameter."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is known."""
        return self._known
