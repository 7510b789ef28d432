"""`StateLoading`: how `CPUAdam` takes saved state into the memory that it has for it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.optim.parameter_state import ParameterStates
from lightning_cxl.optim.saved_state import checked_entries, match_groups, merged_groups
from lightning_cxl.optim.tensor_checks import check_parameter
from lightning_cxl.shards import local
from lightning_cxl.torch_private import loading_hooks


class StateLoading:
    """Loads whole state dicts, or the state of one parameter after another."""

    param_groups: list[dict[str, Any]]
    plain_state: defaultdict[torch.Tensor, Any]
    kept: ParameterStates
    wait: Callable[[], None]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of CPUAdam, ``torch.optim.Adam`` or ``torch.optim.AdamW`` into the memory held already.

        Parameters are matched by name when both sides carry names, else by order. Whether weight decay is decoupled
        stays as constructed. Everything is checked before anything is written.

        Raises:
            CheckpointError: it is for other parameters, of another shape, or not the state of an Adam.
            ConfigError: a parameter has changed since the optimizer was made, see `step`.
            UnsupportedError: it was written with amsgrad, maximize, capturable or differentiable.
        """
        self.wait()
        state_dict = state_dict.copy()
        before, after = loading_hooks(cast(Optimizer, self))
        for pre_hook in before:
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        if not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError(
                f"an optimizer state dict has `state` and `param_groups`, this has {', '.join(map(str, state_dict))}"
            )
        matched = match_groups(self.param_groups, state_dict["param_groups"])
        groups = merged_groups(self.param_groups, [saved for saved, _ in matched])
        self._load_moments(
            [(g, ids) for g, (_, ids) in zip(self.param_groups, matched, strict=True)], state_dict["state"]
        )
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update(new)
        for post_hook in after:
            post_hook(self)

    def _load_moments(
        self,
        sources: list[tuple[dict[str, Any], list[Any]]],
        saved: Mapping[Any, Mapping[str, Any]],
    ) -> None:
        """Copy saved states in. `sources` has for each group the key in `saved` of each of its parameters."""
        self.kept.visits.wait()
        found = []
        for parameter, name, entry in checked_entries(sources, saved):
            if entry is not None:
                check_parameter(local(parameter), name)
                self.kept.of(parameter).check(parameter, name)
            found.append((parameter, entry))
        with torch.no_grad():
            for parameter, entry in found:
                if entry is None:
                    self.plain_state.pop(parameter, None)
                    continue
                state = dict(entry)
                self.kept.of(parameter).bind(parameter, state)  # copies the saved tensors into our memory
                self.plain_state[parameter] = state
                self.note_written(parameter)

    def load_parameter(self, parameter: torch.Tensor, name: str, entry: Mapping[str, Any]) -> None:
        """Copy the saved state of one parameter into the memory that its state has; an empty one clears it.

        Args:
            parameter: of this optimizer.
            name: of it, for messages.
            entry: its state as `load_state_dict` takes it.

        Raises:
            CheckpointError: it is not the state of an Adam, or of another shape.
        """
        self.wait()
        self._load_moments([({"params": [parameter], "param_names": [name]}, [0])], {0: entry})

    def load_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyper-parameters, group by group in their order.

        Raises:
            CheckpointError: one is out of range.
            UnsupportedError: an option that CPUAdam does not have.
        """
        for group, new in zip(self.param_groups, merged_groups(self.param_groups, groups), strict=True):
            group.update(new)

    def note_written(self, parameter: torch.Tensor) -> None:
        """Learn that all state of a parameter was written to: on SSD it then does not stay in memory for long."""
        record = self.kept.of(parameter).record
        if record is not None:
            self.kept.visits.touched(record)
