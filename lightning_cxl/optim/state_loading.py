"""`StateLoading`: how `CPUAdam` takes saved state into the memory that it has for it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.optim.moment import in_shape
from lightning_cxl.optim.parameter_state import ParameterStates
from lightning_cxl.optim.saved_state import checked_entries, match_groups, merged_groups
from lightning_cxl.optim.state_visits import read_states
from lightning_cxl.optim.tensor_checks import check_parameter
from lightning_cxl.shards import local
from lightning_cxl.torch_private import loading_hooks


class StateLoading:
    """Loads whole state dicts, or the state of one parameter after another."""

    param_groups: list[dict[str, Any]]
    plain_state: defaultdict[torch.Tensor, Any]
    kept: ParameterStates
    wait: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; its tensors are not copies.

        Of state on tier `ssd` tensors show what the drives have now, in pages of the page cache and not in memory of
        the process; checksums have been compared. What is written to them changes no state, and the next step may
        change what they show: clone what is to be kept.

        Raises:
            StorageError: a drive has failed, or has damaged state.
        """
        found = super().state_dict()  # type: ignore[misc]
        return {**found, "state": read_states(found["state"])}

    def unread_state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with `OnSsd` for tensors on tier `ssd`, which are not read."""
        unread: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return unread

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
        together: dict[Any, list[tuple[torch.Tensor, Mapping[str, Any]]]] = {}  # a record is read and written once
        for parameter, entry in found:
            if entry is None:
                self.plain_state.pop(parameter, None)
            else:
                together.setdefault(self.kept.of(parameter).record or parameter, []).append((parameter, entry))
        with torch.no_grad():
            for several in together.values():
                states = {parameter: dict(entry) for parameter, entry in several}
                with self.kept.of(several[0][0]).reached() as at:
                    for parameter, state in states.items():
                        self.kept.of(parameter).bind(parameter, state, at)  # copies what was saved into our memory
                self.plain_state.update(states)

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

    @torch.no_grad()
    def load_remainder(self, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
        """Copy what a bfloat16 parameter lacks of its float32 master weights into the state of the parameter.

        Args:
            parameter: of this optimizer, which has state.
            remainder: int16, shaped as the shard of the parameter that this process has.
        """
        self.wait()
        own = self.kept.of(parameter)
        assert own.remainder is not None, "only split weights have a remainder"
        with own.reached() as at:
            in_shape(own.remainder, at).copy_(remainder)
