"""`CXLTrainerMixin`, `CXLTrainer` and `offload`: the Trainer of transformers on host memory tiers.

[Note: Call order under the Trainer]
``__init__``: the accelerator becomes ours, the model stays where it is -> ``train``: ``free_memory`` ends the run
before, weights of a checkpoint are loaded, ``accelerator.prepare`` builds the run and adopts the optimizer, whose state
is loaded after it -> per step: ``training_step`` calls the model and ``accelerator.backward``; the norm is taken, and
clipping left to the optimizer's own sweep where nobody reads gradients; ``optimizer.step``, the scheduler's, and
``model.zero_grad`` -> the run goes on after ``train``, so that the model computes, until ``train`` is called again,
``end``, or the end of the program. An error ends it at once. ``evaluate`` and ``predict`` without ``train`` build a run
without optimizers.
"""

from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.integrations.options_file import Options
from lightning_cxl.integrations.transformers.processes import ShardedTrainer
from lightning_cxl.integrations.transformers.trainer_accelerator import TrainerAccelerator
from lightning_cxl.integrations.transformers.trainer_loop import loop_of
from lightning_cxl.streaming.awaited import peek

_STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
_GENERATE_APART = ("use_vllm", "use_transformers_continuous_batching")
"""Arguments of TRL that let weights be read outside of the model's calls, by each process when it likes."""


class CXLTrainerMixin(ShardedTrainer):
    """Before a Trainer in the bases of a class: ``class MyTrainer(CXLTrainerMixin, SFTTrainer)``.

    Args:
        *args: of the Trainer.
        offload: an `OffloadConfig`, its fields, or the path of a YAML file with them; None: what the environment says
            (``LIGHTNING_CXL_TIERS`` and so on), else the defaults.
        **kwargs: of the Trainer.

    Raises:
        ConfigError: an option with an impossible value; of a subclass, when it is made: its Trainer comes first.
        UnsupportedError: several processes without gloo for host memory, a plugin that places models itself, or
            arguments that move whole models to the device, update weights in the backward, or let several processes
            generate with vLLM or in continuous batches.
    """

    ref_model: Any
    _num_parameters: int | None = None  # outside of embeddings

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__[: cls.__mro__.index(CXLTrainerMixin)]:  # its methods would be called, not ours
            ours = [base for base in cls.__bases__ if issubclass(base, CXLTrainerMixin)]
            bases = ", ".join(base.__name__ for base in dict.fromkeys((*ours, *cls.__bases__)))
            raise ConfigError(
                f"{cls.__name__} would train without offloading: a Trainer stands before CXLTrainerMixin in its bases. "
                f"Write `class {cls.__name__}({bases})`"
            )

    def __init__(self, *args: Any, offload: Options = None, **kwargs: Any) -> None:
        self._offload_options = offload
        super().__init__(*args, **kwargs)

    def report(self) -> dict[str, Any]:
        """Return bytes planned, used and at the peak, per tier and role; see `Session.report`."""
        return self.accelerator.report()

    # -- set-up ------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, and make it ours; a search for hyper-parameters does so for each trial."""
        before = getattr(self, "accelerator", None)
        if before is not None:
            before.offload.close()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _take_over(self, self._offload_options)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model where it is: its weights go to their tiers when it is prepared."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:  # an evaluation, perhaps before any training
            self.accelerator.place(self.model)
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        return wrapped

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Let a model compute when TRL's preference trainers are made: without its adapters it is the reference."""
        if self.ref_model is None:
            self.accelerator.place(self.model)
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    # -- training ----------------------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.accelerator, TrainerAccelerator):
            raise ConfigError(
                f"{type(self).__name__} would train without offloading: its `accelerator` is a plain "
                f"{type(self.accelerator).__name__}. Leave the one that the Trainer has made in its place"
            )
        self.accelerator.offload.loop = loop_of(self)
        self._num_parameters = None
        try:
            result = super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.accelerator.offload.close(after_error=True)
            raise
        self.accelerator.offload.only_computes(
            self.model,
            f"the training of {type(self.model).__name__} by {type(self).__name__} is over, and its gradients would go "
            "to an optimizer that does not step any more: call `trainer.end()` before something else trains the model",
        )
        return result

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip without a look at the model's parameters, which would cost the copies of weights on the device."""
        plain = super()._clip_grad_norm  # type: ignore[misc]
        if plain.__func__ is not Trainer._clip_grad_norm:
            return plain(model)
        return self.accelerator.clip_grad_norm_(peek(model), self.args.max_grad_norm)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a forward and backward, without a walk over all parameters at every call."""
        plain = super().floating_point_ops  # type: ignore[misc]
        name = getattr(self.model, "main_input_name", "input_ids")
        if plain.__func__ is not Trainer.floating_point_ops or name not in inputs:  # those of TRL may give a list
            return plain(inputs)  # type: ignore[no-any-return]
        if self._num_parameters is None:
            count = getattr(self.model, "num_parameters", None)
            self._num_parameters = 0 if count is None else count(exclude_embeddings=True)
        return 6 * int(inputs[name].numel()) * self._num_parameters

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the Trainer, and free everything but weights and optimizer state."""
        with ExitStack() as cleanup:  # both, whatever fails
            cleanup.callback(super().end)  # type: ignore[misc]
            self.accelerator.offload.close()


class CXLTrainer(CXLTrainerMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with weights, gradients, optimizer state and activations on host memory tiers.

    Args:
        *args: of the Trainer.
        offload: as for `CXLTrainerMixin`.
        **kwargs: of the Trainer.

    Example::

        trainer = CXLTrainer(model, args, train_dataset=data, offload={"tiers": {"dram": "48GiB"}})
        trainer.train()
    """


def offload(trainer: Trainer, options: OffloadConfig | str | PathLike[str] | None = None, **fields: Any) -> Trainer:
    """Let a Trainer that exists, and has not trained yet, train on host memory tiers from now on.

    The Trainer has moved its model to the device when it was made, unless its arguments say
    ``place_model_on_device=False``; the model comes back. Where the model does not fit there, use `CXLTrainerMixin`.

    Args:
        trainer: its class becomes one with `CXLTrainerMixin`.
        options: an `OffloadConfig`, or the path of a YAML file with its fields.
        **fields: of `OffloadConfig`, in the place of a file.

    Returns:
        The same Trainer.

    Raises:
        ConfigError: it has trained, or has a `CXLTrainerMixin` already, or there are both a file and fields.
        UnsupportedError: as for `CXLTrainerMixin`.
    """
    if isinstance(trainer, CXLTrainerMixin):
        raise ConfigError(f"this {type(trainer).__name__} offloads already")
    if options is not None and fields:
        raise ConfigError(f"both a file with options (`{options}`) and options ({', '.join(fields)}): give one of them")
    for model in (trainer.model, *trainer.accelerator._models):
        if not getattr(model, "quantization_method", None):
            model.to("cpu")
    chosen = fields if options is None else options
    _take_over(trainer, chosen)
    trainer.__class__ = type(type(trainer).__name__, (CXLTrainerMixin, type(trainer)), {"__module__": __name__})
    trainer._offload_options = chosen
    return trainer


def _take_over(trainer: Any, options: Options) -> None:
    """Make the accelerator of a Trainer ours, or say why that cannot be."""
    args = trainer.args
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise UnsupportedError(
                f"TrainingArguments({name}=True) makes an evaluation cast the model and move all of it to the device. "
                "Load the model in that type (`dtype=`), or evaluate with `bf16=True`."
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if any(word in optim for word in _STEPS_IN_BACKWARD):
        raise UnsupportedError(
            f"TrainingArguments(optim={optim!r}) updates weights inside the backward, before gradients are on the "
            "host. Use optim='adamw_torch', whose update runs on the host."
        )
    if args.save_on_each_node and args.world_size > 1:
        raise UnsupportedError(
            "TrainingArguments(save_on_each_node=True) writes the files of each machine, and "
            f"{args.world_size} processes write one checkpoint together: leave it out, and give `output_dir` on a "
            "drive that all machines see"
        )
    for name in _GENERATE_APART:
        if getattr(args, name, False) and args.world_size > 1:
            raise UnsupportedError(
                f"{type(args).__name__}({name}=True) reads whole weights outside of the model's calls, and each of "
                f"{args.world_size} processes has only its part of them, which they gather together in every call. "
                "Leave it out: `model.generate` then does the work on all processes"
            )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"a Trainer uses {args.n_gpu} devices from one process here, and {type(trainer).__name__} drives one: set "
            "CUDA_VISIBLE_DEVICES=0, or start the program with `accelerate launch --num_processes 1`."
        )
    TrainerAccelerator.of(trainer, options)
