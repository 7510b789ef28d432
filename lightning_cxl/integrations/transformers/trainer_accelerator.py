"""`TrainerAccelerator`: the accelerator inside of a Trainer of transformers."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from lightning_cxl.integrations.accelerate.accelerator import CXLAccelerator


class TrainerAccelerator(CXLAccelerator):
    """An accelerator whose `free_memory` lets go of what its Trainer trains, and of nothing else.

    A Trainer calls that when `train` begins. A reference model, which was prepared before, is still needed then.
    """

    WITH_GLOO = 'TrainingArguments(ddp_backend="cpu:gloo,cuda:nccl")'
    _trainer: "weakref.ref[Trainer]"
    _others: list[nn.Module]
    """Models besides the Trainer's own that were prepared, in the order in which they were."""

    @classmethod
    def of(cls, trainer: Trainer, offload: Any) -> "TrainerAccelerator":
        """Turn the accelerator of a Trainer into ours; models that only compute are prepared again.

        Args:
            trainer: whose accelerator has prepared no optimizer.
            offload: options, see `CXLAccelerator`.

        Raises:
            ConfigError: it has prepared an optimizer, or an option has an impossible value.
            UnsupportedError: several processes without gloo for host memory, or a plugin that places models itself.
        """
        accelerator = trainer.accelerator
        frozen = [] if accelerator._optimizers else list(accelerator._models)
        for model in frozen:
            accelerator._models.remove(model)
        ours = cls.attach(accelerator, offload)
        assert isinstance(ours, cls)
        ours._trainer, ours._others = weakref.ref(trainer), []
        for model in frozen:
            ours.prepare_model(model, evaluation_mode=True)
        return ours

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model; see `CXLAccelerator.prepare_model`."""
        trainer = self._trainer()
        if trainer is not None and model is not trainer.model and not any(model is each for each in self._others):
            self._others.append(model)
        return super().prepare_model(model, *args, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a region that changes nothing: the Trainer asks for it in every micro-batch but the last one.

        Gradients of the whole model would have to stay on every device until then.
        """
        return nullcontext()

    def place(self, model: nn.Module) -> None:
        """Let a model compute, without optimizers: it is cut, if there are several processes, and placed."""
        self._cut(model, [])
        self.offload.prepare(model)

    def _adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        trainer = self._trainer()
        if optimizers and not models and trainer is not None:  # its model is compiled, and prepared once only
            models = [trainer.model]
        return super()._adopt(models, optimizers)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of the model that the Trainer trains; others, which only compute, stay or are prepared anew."""
        trainer = self._trainer()
        trains = any(run.optimizers for run in self.offload.session.runs)
        if trains or trainer is None or self.offload.knows(trainer.model):
            objects = super().free_memory(*objects)
        else:
            objects = super(CXLAccelerator, self).free_memory(*objects)  # keeps all runs
            if self.scaler is not None:  # an error has ended the run before, or another Trainer has
                self.offload.attach_scaler(self.scaler)
        for model in self._others:
            self.prepare_model(model, evaluation_mode=True)
        return objects
