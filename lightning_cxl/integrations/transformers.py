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

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.integrations.accelerate import CXLAccelerator, Options
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.checkpoint import is_sharded_checkpoint, load_file, remove
from lightning_cxl.run.session import taking_whole, whole_state
from lightning_cxl.run.user_loop import methods_of_others
from lightning_cxl.sharding.fsdp import is_cut
from lightning_cxl.streaming.unit_weights import peek
from lightning_cxl.timing import timed


class TrainerAccelerator(CXLAccelerator):
    """An accelerator whose `free_memory` lets go of what its Trainer trains, and of nothing else.

    A Trainer calls that when `train` begins. A reference model, which was prepared before, is still needed then.
    """

    _trainer: "weakref.ref[Trainer]"
    _others: list[nn.Module]  # prepared besides the Trainer's own, in this order

    @classmethod
    def of(cls, trainer: Trainer, offload: Any) -> "TrainerAccelerator":
        """Turn the accelerator of a Trainer into ours; models that only compute are prepared again."""
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
        trainer = self._trainer()
        if trainer is not None and model is not trainer.model and not any(model is each for each in self._others):
            self._others.append(model)
        return super().prepare_model(model, *args, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        # the Trainer asks for it in all micro-batches but the last: gradients of the whole model would stay on devices
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


def _folder(checkpoint: str) -> Path:
    return Path(checkpoint) / "sharded_optimizer"


_KNOWN = ("transformers", "trl", "lightning_cxl")
"""Packages whose trainers neither read nor write gradients, but through the accelerator."""
_STEP = ("training_step", "_clip_grad_norm", "_get_grad_norm", "_run_epoch", "_inner_training_loop")
"""Methods that run with gradients at hand."""
_BETWEEN_STEPS = ("log", "_maybe_log_save_evaluate", "evaluate", "_save_checkpoint", *_STEP)
_GRADIENT_EVENTS = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")


def loop_of(trainer: Trainer) -> Loop:
    """Return what is known of the loop of a Trainer as it is now.

    `compute_loss` is the user's own in most subclasses, and taken for what it is for: it reads no gradients.
    """
    uses_gradients = bool(methods_of_others(trainer, _STEP, _KNOWN)) or _listens(trainer, _GRADIENT_EVENTS)
    return Loop(
        accumulates=trainer.args.gradient_accumulation_steps > 1,
        needs_whole_step="the Trainer takes the norm of all gradients before a step",
        reads_gradients=uses_gradients,
        edits_gradients=uses_gradients,
        writes_unseen=bool(methods_of_others(trainer, _BETWEEN_STEPS, _KNOWN)) or _listens(trainer),
    )


def _listens(trainer: Trainer, events: Sequence[str] = ()) -> bool:
    """Return whether a callback that is not transformers' own has a method for one of these events; without: for any.

    Those of trl count: one of them writes weights of the reference model.
    """
    return any(
        methods_of_others(each, events or [n for n in dir(each) if n.startswith("on_")], ("transformers",))
        for each in trainer.callback_handler.callbacks
    )


_STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
_GENERATE_APART = ("use_vllm", "use_transformers_continuous_batching")
"""Arguments of TRL that let weights be read outside of the model's calls, by each process when it likes."""


class CXLTrainerMixin:
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

    accelerator: TrainerAccelerator
    model: nn.Module
    args: Any
    optimizer: Any
    lr_scheduler: Any
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

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does; where something is named in `report_to`, also what steps took and moved."""
        if "loss" in logs and self.args.report_to:
            logs = {**logs, **self.accelerator.offload.session.metrics()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

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
        return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Let a model compute when TRL's preference trainers are made: without its adapters it is the reference."""
        if self.ref_model is None:
            self.accelerator.place(self.model)
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

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
            return plain(inputs)
        if self._num_parameters is None:
            count = getattr(self.model, "num_parameters", None)
            self._num_parameters = 0 if count is None else count(exclude_embeddings=True)
        return 6 * int(inputs[name].numel()) * self._num_parameters

    # -- checkpoints of a model that is cut over several processes -----------------------------------------------------
    #
    # A folder ``checkpoint-N`` has whole weights, as transformers writes them, and beside them ``sharded_optimizer``,
    # to which each process writes its part. Any number of processes goes on from it. See [Note: Sharded checkpoints].

    @timed("save_s", "save")
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Gather weights on the first process, which writes them; every process calls this."""
        if state_dict is None and is_cut(self.model):
            model: Any = self.model
            names, adapters = set(model.state_dict()), getattr(model, "peft_config", None)
            if adapters is not None:
                # what peft chooses from: adapters, what else is trained, and embeddings, which may have grown
                ends = (model.get_input_embeddings(), model.get_output_embeddings())
                kept = {id(p) for end in ends if end is not None for p in end.parameters()}
                named = model.named_parameters(remove_duplicate=False)
                chosen = {name for name, p in named if p.requires_grad or id(p) in kept}
                names = {n for n in names if n in chosen or not adapters.keys().isdisjoint(n.split("."))}
            state_dict = whole_state(model, names.__contains__)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_cut(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            if self.args.should_save and is_sharded_checkpoint(_folder(output_dir)):
                remove(_folder(output_dir))  # of several processes, which have written here before
            return
        offload = self.accelerator.offload
        path = _folder(output_dir)
        offload.save_folder(path, self.model, offload.optimizers_of(self.model), weights=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if is_sharded_checkpoint(_folder(checkpoint)):
            offload = self.accelerator.offload
            numbered = dict(enumerate(offload.optimizers_of(self.model)))
            offload.load_folder(_folder(checkpoint), self.model, numbered, strict=True, weights=False)
        elif is_cut(self.model) and os.path.isfile(path := os.path.join(checkpoint, OPTIMIZER_NAME)):
            # transformers would read the state of the whole model onto every device; a mapped file has its pages once
            self.optimizer.load_state_dict(load_file(Path(path), "cpu", True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with taking_whole(self.model):
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with taking_whole(self.model):
            super()._load_best_model()  # type: ignore[misc]

    def end(self) -> None:
        """End the Trainer, and free everything but weights and optimizer state."""
        with ExitStack() as cleanup:  # both, whatever fails
            end: Any = getattr(super(), "end", self.accelerator.end_training)  # transformers 5.17 has none
            cleanup.callback(end)
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
            f"TrainingArguments(save_on_each_node=True) writes the files of each machine, and {args.world_size} "
            "processes write one checkpoint together: leave it out, with `output_dir` on a drive that all see"
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
