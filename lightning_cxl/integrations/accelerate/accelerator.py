"""`CXLAccelerator`: Accelerate's accelerator, with models and optimizers on host memory tiers.

An Accelerate loop stays as it is: `prepare` places the model and adopts its optimizers, `backward` collects gradients,
clipping finds them where they are. Several processes have a model that `prepare` cuts, with its optimizers, as
Accelerate's FSDP2 does: see `processes.py`. Everything else is Accelerate's own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn, tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_cxl.errors import ConfigError
from lightning_cxl.integrations.accelerate.processes import ShardedAccelerator, with_gloo
from lightning_cxl.integrations.options_file import Options, read_options
from lightning_cxl.inventory.workload import Loop
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.updates.adoption import repoint_scheduler


class CXLAccelerator(ShardedAccelerator):
    """Train with weights, gradients, optimizer state and activations on host memory tiers.

    Args:
        *args: of `accelerate.Accelerator`.
        offload: an `OffloadConfig`, its fields, or the path of a YAML file with them; None: what the environment says
            (``LIGHTNING_CXL_TIERS`` and so on), else the defaults.
        **kwargs: of `accelerate.Accelerator`.

    Raises:
        ConfigError: an option with an impossible value.
        UnsupportedError: several processes without gloo for host memory, or a plugin that places models itself
            (DeepSpeed, FSDP, Megatron-LM).

    Example::

        accelerator = CXLAccelerator(offload={"tiers": {"dram": "48GiB"}})
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    """

    def __init__(self, *args: Any, offload: Options = None, **kwargs: Any) -> None:
        super().__init__(*args, **with_gloo(kwargs))
        self._attach(offload, None)

    @classmethod
    def attach(
        cls,
        accelerator: Accelerator,
        offload: Options = None,
        loop: Loop | None = None,
    ) -> "CXLAccelerator":
        """Make an accelerator that exists, and has prepared no model yet, one of this class.

        Args:
            accelerator: its class changes; everyone who has it has ours.
            offload: as for the constructor.
            loop: what is known of the training loop; None: nothing.

        Raises:
            ConfigError: it has prepared a model or an optimizer.
            UnsupportedError: as for the constructor.
        """
        if accelerator._models or accelerator._optimizers:
            raise ConfigError(
                f"this accelerator has prepared {len(accelerator._models)} models and {len(accelerator._optimizers)} "
                "optimizers already: offload them before `prepare`"
            )
        accelerator.__class__ = cls
        ours: CXLAccelerator = accelerator
        ours._attach(offload, loop)
        return ours

    def _attach(self, offload: Options, loop: Loop | None) -> None:
        self._check_processes()
        loop = loop or Loop(accumulates=self.gradient_accumulation_steps > 1, writes_unseen=True)
        self.offload = UserLoop(Session(**read_options(offload)), self.device, loop)
        """Models and optimizers in host memory; its `session` has the report."""
        self._meet()
        self._replaced: list[tuple[Optimizer, Optimizer]] = []  # what schedulers have, and what they are to step with
        if self.scaler is not None:
            self.offload.attach_scaler(self.scaler)

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does; models and optimizers stay where their tiers are.

        A model and all its optimizers must come in the same call, or the model first.

        Raises:
            ConfigError: an optimizer whose model was not prepared, or a model without values.
            TierFullError: a model or its training does not fit.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        for model in args:
            if isinstance(model, nn.Module):
                self._cut(model, [_inner(each) for each in optimizers])
        adopted = self._adopt([each for each in args if isinstance(each, nn.Module)], optimizers)
        new_of = dict(zip(map(id, optimizers), adopted, strict=True))
        asked = [None] * len(args) if device_placement is None else device_placement
        places = [
            False if isinstance(each, (nn.Module, Optimizer)) else place
            for each, place in zip(args, asked, strict=True)
        ]
        return super().prepare(*(new_of.get(id(each), each) for each in args), device_placement=places)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model, which is placed on its tiers; see Accelerate's `prepare_model`."""
        self._cut(model, [])
        self.offload.prepare(model)
        plain = evaluation_mode or self.num_processes > 1  # else Accelerate wraps it in DDP
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=plain)
        if prepared is not model:  # a wrapper, of torch.compile: its own `zero_grad` knows no masters
            prepared.__dict__["zero_grad"] = _ZeroGradOf(model)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare an optimizer of a model that is prepared; see Accelerate's `prepare_optimizer`."""
        if not self._is_adopted(optimizer):
            (optimizer,) = self._adopt([], [optimizer])
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare a scheduler, perhaps of an optimizer whose place ours has taken; see Accelerate's own."""
        for old, new in self._replaced:
            repoint_scheduler(scheduler, old, new)
        return super().prepare_scheduler(scheduler)

    def _adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return what takes the place of optimizers; one that Accelerate has wrapped before keeps its wrapper."""
        new: dict[int, Optimizer] = {id(each): each for each in optimizers}
        rest = [each for each in optimizers if not self._is_adopted(each)]
        owners = {id(each): self.offload.model_of(_inner(each), models) for each in rest}
        for model in dict.fromkeys([*models, *owners.values()]):
            mine = [each for each in rest if owners[id(each)] is model]
            adopted = self.offload.prepare(model, [_inner(each) for each in mine])
            for each, result in zip(mine, adopted, strict=True):
                self._replaced.append((_inner(each), result))
                if isinstance(each, AcceleratedOptimizer):
                    AcceleratedOptimizer.__init__(each, result, device_placement=False, scaler=each.scaler)
                else:
                    new[id(each)] = result
        return [new[id(each)] for each in optimizers]

    def _is_adopted(self, optimizer: Optimizer) -> bool:
        return any(_inner(optimizer) is each for run in self.offload.session.runs for each in run.optimizers)

    # -- a step ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass; afterwards gradients are on the host, complete. See Accelerate's `backward`."""
        with self.offload.backward(is_last=self.sync_gradients):
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip gradients of a model's parameters where they are: on the host. See Accelerate's `clip_grad_norm_`."""
        self.offload.look()
        holders = self.offload.holders(parameters)
        optimizer = self.offload.clipping_in_step(holders) if norm_type == 2 else None
        if optimizer is None:
            norm = super().clip_grad_norm_(holders, max_norm, norm_type)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.unscale_gradients()
        return tensor(optimizer.clip_grad_norm_(max_norm))

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip gradients of a model's parameters where they are: on the host. See Accelerate's `clip_grad_value_`."""
        self.offload.look()
        super().clip_grad_value_(self.offload.holders(parameters), clip_value)

    # -- the end -----------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all that was prepared; models are plain again, on the host. See Accelerate's `free_memory`."""
        self.offload.close()
        self._replaced.clear()
        if self.scaler is not None:
            self.offload.attach_scaler(self.scaler)
        return super().free_memory(*objects)

    def report(self) -> dict[str, Any]:
        """Return bytes planned, used and at the peak, per tier and role; see `Session.report`."""
        return self.offload.session.report(self.offload.device)


class _ZeroGradOf:
    """`zero_grad` of a wrapper: that of the model in it, as it is when it is called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none)


def _inner(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
