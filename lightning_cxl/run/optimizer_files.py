"""`state_dict` and `load_state_dict` of adopted optimizers, for frameworks that write a file for each optimizer.

[Note: Optimizer files]
Accelerate, Fabric and the Hugging Face Trainer save what ``optimizer.state_dict()`` returns, in files of their own. So
our entry of a checkpoint (`run/checkpoint.py`) lies in that dict, beside ``state`` and ``param_groups``. A plain torch
optimizer ignores it, so these files load without us; and files that plain torch optimizers have written load with us.
The model's weights must be loaded before the optimizer: master weights that no file has are made from them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_cxl.gradients.guard import ReplacedMethod
from lightning_cxl.run.checkpoint import entry_of, load_optimizers, own_entry, restore_masters
from lightning_cxl.run.run import Run
from lightning_cxl.run.saved_generation import KEY


class _FileMethod(ReplacedMethod):
    """A method of one adopted optimizer that finds it, and its run, as they are after the last step.

    Args:
        plain: the optimizer's own method.
        optimizer: of `run`.
        run: that has adopted it.
    """

    def __init__(self, plain: Callable[..., Any], optimizer: Optimizer, run: Run) -> None:
        super().__init__(plain)
        self._optimizer = optimizer
        self._run = run

    def _settled_run(self) -> Run:
        self._run.wait_for_updates()
        self._run.adopt_joined()
        return self._run


class _StateDict(_FileMethod):
    """`state_dict`. See [Note: Optimizer files]."""

    def __call__(self) -> dict[str, Any]:
        """Return torch's state dict with our entry in it; its tensors are those of the optimizer, not copies.

        Raises:
            StorageError: state on SSD could not be written, so that nobody can read it.
        """
        run = self._settled_run()
        if run.on_ssd is not None:
            run.on_ssd.check_weights()
        own = entry_of([self._optimizer], run.masters, run.num_received)
        mine = {run.masters.name_of(p) for group in self._optimizer.param_groups for p in group["params"]}
        masters = {name: master for name, master in own["master_weights"].items() if name in mine}
        return {**self._plain(), KEY: {**own, "master_weights": masters}}


class _LoadStateDict(_FileMethod):
    """`load_state_dict`. See [Note: Optimizer files]."""

    def __call__(self, state_dict: Mapping[str, Any]) -> None:
        """Load into the memory that the state has already, by parameter name where names are known.

        Raises:
            CheckpointError: it is of other parameters, or refers to state on SSD, which only Lightning's strategy does.
        """
        run, own = self._settled_run(), own_entry(state_dict)
        plain = {key: value for key, value in state_dict.items() if key != KEY}
        with self._set_aside():
            load_optimizers([self._optimizer], [plain], own, run.masters.name_of, run.on_ssd)
        run.rehome_state(self._optimizer)
        run.num_received = own.get("num_gradients", 0)
        restore_masters(own.get("master_weights"), run.masters, [self._optimizer])

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Return a region in which the optimizer has its own method: what loads it knows nothing of this one."""
        del self._optimizer.load_state_dict
        try:
            yield
        finally:
            self._optimizer.load_state_dict = self  # type: ignore[method-assign]


def attach_files(optimizer: Optimizer, run: Run) -> None:
    """Let the file of an adopted optimizer hold all that its run needs, until `detach_files`."""
    optimizer.state_dict, optimizer.load_state_dict = (  # type: ignore[method-assign]
        _StateDict(optimizer.state_dict, optimizer, run),
        _LoadStateDict(optimizer.load_state_dict, optimizer, run),
    )


def detach_files(optimizer: Optimizer) -> None:
    """Undo `attach_files`."""
    for name in ("state_dict", "load_state_dict"):
        vars(optimizer).pop(name, None)
