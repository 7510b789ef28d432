"""Protections of the Trainer of transformers on host memory."""

from tests.mutants.mutant import Mutant

_TRAINER = "lightning_cxl/integrations/transformers/trainer.py"
_ACCELERATOR = "lightning_cxl/integrations/transformers/trainer_accelerator.py"
_LOOP = "lightning_cxl/integrations/transformers/trainer_loop.py"
_USER_LOOP = "lightning_cxl/run/user_loop.py"
_HABITS = "tests/integration/test_hf_trainer_habits.py"
_ARGUMENTS = "tests/integration/test_hf_trainer_arguments.py"
_LIFE = "tests/integration/test_hf_trainer_life.py"
T_PARITY = ("tests/integration/test_hf_trainer.py",)

MUTANTS = (
    Mutant(
        "a mixin behind the Trainer is refused",
        _TRAINER,
        "        if Trainer in cls.__mro__[: cls.__mro__.index(CXLTrainerMixin)]:",
        "        if False:",
        (f"{_LIFE}::test_a_mixin_behind_the_trainer_is_refused_when_the_class_is_made",),
    ),
    Mutant(
        "an accelerator in the place of ours is refused",
        _TRAINER,
        "        if not isinstance(self.accelerator, TrainerAccelerator):\n",
        "        if False:\n",
        (f"{_LIFE}::test_an_accelerator_in_the_place_of_ours_is_refused",),
    ),
    Mutant(
        "a Trainer leaves its model on the host",
        _TRAINER,
        '        """Leave a model where it is: its weights go to their tiers when it is prepared."""\n',
        "        model.to(device)\n",
        (f"{_HABITS}::test_the_model_stays_on_the_host_until_it_is_trained",),
    ),
    Mutant(
        "an evaluation without a training places the model",
        _TRAINER,
        "            self.accelerator.place(self.model)\n        wrapped",
        "            pass\n        wrapped",
        (f"{_HABITS}::test_evaluates_beside_a_model_that_is_prepared",),
    ),
    Mutant(
        "an error ends the run",
        _TRAINER,
        "            self.accelerator.offload.close(after_error=True)\n",
        "            pass\n",
        (f"{_HABITS}::test_an_error_ends_the_run_and_the_next_training_begins_anew",),
    ),
    Mutant(
        "clipping leaves copies of weights on the device",
        _TRAINER,
        "self.accelerator.clip_grad_norm_(peek(model), ",
        "self.accelerator.clip_grad_norm_(model.parameters(), ",
        (f"{_HABITS}::test_clipping_keeps_the_copies_on_the_device",),
    ),
    Mutant(
        "operations are counted without a look at parameters",
        _TRAINER,
        "        if self._num_parameters is None:\n",
        "        if True:\n",
        (f"{_HABITS}::test_counting_operations_does_not_look_at_parameters",),
    ),
    Mutant(
        "a model besides the trained one stays prepared",
        _ACCELERATOR,
        "            self._others.append(model)\n",
        "            pass\n",
        (f"{_HABITS}::test_a_model_besides_the_trained_one_stays_prepared",),
    ),
    Mutant(
        "a callback that looks gets clipped gradients",
        _LOOP,
        '"on_pre_optimizer_step", "on_optimizer_step", "on_substep_end"',
        '"on_substep_end"',
        (f"{_HABITS}::test_who_looks_before_the_step_sees_clipped_gradients",),
    ),
    Mutant(
        "gradients that a subclass may edit are measured again",
        _LOOP,
        '_STEP = ("training_step", ',
        "_STEP = (",
        (f"{_HABITS}::test_gradients_that_a_subclass_edits_are_measured_again",),
    ),
    Mutant(
        "weights that a callback may write are copied again",
        _LOOP,
        "any(_overridden(trainer, *_BETWEEN_STEPS)) or any(_listening(trainer))",
        "False",
        (f"{_HABITS}::test_weights_that_a_callback_writes_between_steps_are_used",),
    ),
    Mutant(
        "the Trainer's clipping needs no pass",
        _USER_LOOP,
        "        return optimizer if own == {p for p in holders if p.grad is not None} else None\n",
        "        return None\n",
        (f"{_HABITS}::test_clipping_needs_no_pass_of_its_own",),
    ),
    Mutant(
        "the norm is of all gradients that were given",
        _USER_LOOP,
        "        return optimizer if own == {p for p in holders if p.grad is not None} else None\n",
        "        return optimizer\n",
        (f"{_HABITS}::test_gradients_outside_of_the_optimizer_count_for_the_norm",),
    ),
    Mutant(
        "gradients are complete after the last backward of a step",
        "lightning_cxl/run/run.py",
        "        if is_last:\n            self._grads.end_step()\n",
        "",
        T_PARITY,
    ),
    Mutant(
        "dropping gradients does not wait for updates",
        "lightning_cxl/gradients/zero_grad.py",
        "            parameters = list(self._peek(self._module))\n",
        "            parameters = list(self._module.parameters())\n",
        (f"{_HABITS}::test_the_step_returns_before_units_are_updated",),
    ),
    Mutant(
        "copies become old when a fused optimizer has written",
        "lightning_cxl/updates/host_step.py",
        "        torch.autograd.graph.increment_version([p for p in updated if not self._is_written(p)])\n",
        "",
        T_PARITY,
    ),
    Mutant(
        "a fused optimizer on the host waits for what a scaler says",
        "lightning_cxl/updates/host_step.py",
        "            setattr(optimizer, name, value.cpu())\n",
        "            pass\n",
        (f"{T_PARITY[0]}::test_a_loss_scaler",),
    ),
    Mutant(
        "tied weights count once for the norm",
        "lightning_cxl/streaming/awaited.py",
        "parameter is not None and parameter not in seen",
        "parameter is not None",
        (f"{_ARGUMENTS}::test_tied_weights_count_once_for_the_norm",),
    ),
    Mutant(
        "a compiled model drops the gradients of its masters",
        "lightning_cxl/integrations/accelerate/accelerator.py",
        "        if prepared is not model:",
        "        if False:",
        (f"{_ARGUMENTS}::test_logs_what_the_plain_trainer_logs",),
    ),
    Mutant(
        "an optimizer's other weights reach the model",
        "lightning_cxl/updates/mode_method.py",
        "        if written:\n",
        "        if False:\n",
        (f"{_ARGUMENTS}::test_optimizers_without_a_schedule_evaluate_with_other_weights",),
    ),
    Mutant(
        "a model that is compiled already is prepared with its optimizer",
        _ACCELERATOR,
        "            models = [trainer.model]\n",
        "            pass\n",
        (f"{_LIFE}::test_train_again",),
    ),
    Mutant(
        "a loss scaler finds gradients on the host after an error",
        _ACCELERATOR,
        "                self.offload.attach_scaler(self.scaler)\n",
        "                pass\n",
        (f"{_LIFE}::test_a_loss_scaler_after_an_error",),
    ),
    Mutant(
        "a Trainer that was taken over keeps its options in a search",
        _TRAINER,
        "    trainer._offload_options = chosen\n",
        "    trainer._offload_options = None\n",
        (f"{_LIFE}::test_a_search_trains_with_the_same_options",),
    ),
    Mutant(
        "a trial of a search lets go of the memory of the one before",
        _TRAINER,
        "            before.offload.close()\n",
        "            pass\n",
        (f"{_LIFE}::test_a_search_trains_with_the_same_options",),
    ),
    Mutant(
        "a model has one run that trains it",
        _USER_LOOP,
        "            other._let_go(model)\n",
        "            pass\n",
        (f"{_LIFE}::test_the_next_trainer_takes_the_model_over",),
    ),
    Mutant(
        "an evaluation leaves the run of a model alone",
        _USER_LOOP,
        "before is not None or other is not None",
        "before is not None",
        (f"{_LIFE}::test_a_second_trainer_evaluates_in_the_middle_of_a_training",),
    ),
    Mutant(
        "a patched method may edit gradients",
        _LOOP,
        "_is_known(cls) and _is_known(method)",
        "_is_known(cls)",
        (f"{_LIFE}::test_a_patched_method_may_edit_gradients",),
    ),
    Mutant(
        "trainers that generate count no operations",
        _TRAINER,
        " or name not in inputs:",
        ":",
        (f"{_ARGUMENTS}::test_inputs_in_a_list_count_no_operations",),
    ),
    Mutant(
        "a model whose training is over swallows no gradients",
        "lightning_cxl/run/over.py",
        "raise UnsupportedError(message)",
        "pass",
        (f"{_LIFE}::test_a_backward_after_the_training_is_told_so",),
    ),
    Mutant(
        "a model that has been let go of may be trained by others",
        "lightning_cxl/run/over.py",
        "            handle.remove()\n",
        "            pass\n",
        (f"{_LIFE}::test_a_backward_after_the_training_is_told_so",),
    ),
)
