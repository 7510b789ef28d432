"""Protections of the accelerator for Hugging Face Accelerate."""

from tests.mutants.mutant import Mutant

_OURS = "lightning_cxl/integrations/accelerate/accelerator.py"
_LOOP = "lightning_cxl/run/user_loop.py"
_RUN = "tests/integration/test_accelerate.py"
_LOOPS = "tests/integration/test_accelerate_loops.py"
_MODELS = "tests/integration/test_accelerate_models.py"
_FILES = "tests/integration/test_accelerate_files.py"
_UNCLOSED = "tests/integration/test_unclosed.py"

MUTANTS = (
    Mutant(
        "processes meet with gloo beside NCCL",
        _OURS,
        "**with_gloo(kwargs)",
        "**kwargs",
        ("tests/unit/integrations/test_accelerate_group.py",),
    ),
    Mutant(
        "gradients are clipped where they are",
        _OURS,
        "        holders = self.offload.holders(parameters)\n",
        "        holders = list(parameters)\n",
        (f"{_LOOPS}::test_what_is_clipped",),
    ),
    Mutant(
        "gradients are clipped by value where they are",
        _OURS,
        "self.offload.holders(parameters), clip_value",
        "parameters, clip_value",
        (f"{_LOOPS}::test_what_is_clipped",),
    ),
    Mutant(
        "a parameter that is given twice is clipped twice",
        _LOOP,
        "return [self._holder(parameter) for parameter in given]",
        "return list(dict.fromkeys(self._holder(parameter) for parameter in given))",
        (f"{_LOOPS}::test_what_is_clipped",),
    ),
    Mutant(
        "the bad gradient is looked for before Accelerate clips",
        _OURS,
        "        self.offload.look()\n        holders",
        "        holders",
        (f"{_LOOPS}::test_the_warning_names_the_gradient_that_was_bad_before_clipping",),
    ),
    Mutant(
        "a model stays where its tiers are",
        _OURS,
        "super().prepare_model(model, device_placement=False,",
        "super().prepare_model(model, device_placement=None,",
        (f"{_LOOPS}::test_objects_prepared_apart",),
    ),
    Mutant(
        "a scheduler belongs to the optimizer that is stepped",
        _OURS,
        "            repoint_scheduler(scheduler, old, new)\n",
        "            pass\n",
        (f"{_LOOPS}::test_the_schedule_of_one_optimizer_does_not_wait_for_another",),
    ),
    Mutant(
        "a scheduler that stays with the user's optimizer does not warn",
        _LOOP,
        "                mark_as_called(given)",
        "                pass",
        (f"{_LOOPS}::test_a_scheduler",),
    ),
    Mutant(
        "an optimizer that Accelerate has wrapped keeps its wrapper",
        _OURS,
        "                if isinstance(each, AcceleratedOptimizer):\n",
        "                if False:\n",
        (f"{_LOOPS}::test_the_same_objects_again_after_free_memory",),
    ),
    Mutant(
        "a loss scaler works on host gradients also in the next training",
        _OURS,
        "            self.offload.attach_scaler(self.scaler)\n        return super().free",
        "            pass\n        return super().free",
        (f"{_LOOPS}::test_a_second_training_after_the_first",),
    ),
    Mutant(
        "free_memory ends the run",
        _OURS,
        "        self.offload.close()\n",
        "",
        (f"{_MODELS}::test_nothing_is_left_after_free_memory",),
    ),
    Mutant(
        "who forgets free_memory leaves nothing",
        _LOOP,
        "            note_garbage(self)\n",
        "            pass\n",
        (f"{_MODELS}::test_nothing_is_left_where_nobody_frees",),
    ),
    Mutant(
        "hooks do not reach the model",
        "lightning_cxl/run/run.py",
        "                _nothing if streamer is None",
        "                self._residence.bring_home if streamer is None",
        (_UNCLOSED,),
    ),
    Mutant(
        "a finaliser closes nothing",
        _LOOP,
        "            note_garbage(self)\n",
        "            self.close()\n",
        (_UNCLOSED,),
    ),
    Mutant(
        "what is garbage is closed before memory is taken",
        "lightning_cxl/run/session.py",
        "        close_garbage()  # its memory is needed\n",
        "",
        (_UNCLOSED,),
    ),
    Mutant(
        "what is garbage is closed when a model computes",
        _LOOP,
        "        close_garbage()\n        num_steps",
        "        num_steps",
        (_UNCLOSED,),
    ),
    Mutant(
        "a forked child ends nothing of its parent's",
        "lightning_cxl/run/unclosed.py",
        "            if loop.pid == os.getpid():\n                cleanup",
        "            if True:\n                cleanup",
        (_UNCLOSED,),
    ),
    Mutant(
        "errors of a loop that is garbage are logged",
        "lightning_cxl/run/unclosed.py",
        "        except Exception as error:\n",
        "        except KeyError as error:\n",
        (_UNCLOSED,),
    ),
    Mutant(
        "memory that is closed is in use nowhere",
        "lightning_cxl/memory/scope.py",
        " and not scope.memory.is_closed]",
        "]",
        (_UNCLOSED,),
    ),
    Mutant(
        "a copy of an accelerator has no run",
        _LOOP,
        "        return UserLoop, (self.session, self.device, self.loop)\n",
        "        return super().__reduce__()  # type: ignore[return-value]\n",
        (f"{_MODELS}::test_copies_are_in_no_run",),
    ),
    Mutant(
        "a copy of a model is in no run",
        _LOOP,
        "        return _NoHook, ()\n",
        "        return super().__reduce__()  # type: ignore[return-value]\n",
        (f"{_MODELS}::test_copies_are_in_no_run",),
    ),
    Mutant(
        "a compiled model is not compiled anew in each step",
        _LOOP,
        "        leave_to_python(_Forward.__call__,",
        "        print(",
        (f"{_MODELS}::test_a_model_that_accelerate_compiles",),
    ),
    Mutant(
        "no plugin that places models itself",
        "lightning_cxl/integrations/accelerate/processes.py",
        'if kind not in ("MULTI_CPU", "MULTI_GPU") and (several or kind != "NO"):',
        "if False:",
        (f"{_MODELS}::test_several_processes_and_other_plugins",),
    ),
    Mutant(
        "what has been prepared is not attached to",
        _OURS,
        "if accelerator._models or accelerator._optimizers:",
        "if False:",
        (f"{_MODELS}::test_an_accelerator_that_has_prepared_a_model",),
    ),
    Mutant(
        "zero_grad of a model clears masters that joined later",
        "lightning_cxl/run/run.py",
        "        if self.optimizers:  # also",
        "        if self.masters.has_separate:  # also",
        (f"{_LOOPS}::test_optimizers_of_other_shapes",),
    ),
    Mutant(
        "state that a file has lies on its tier",
        "lightning_cxl/run/optimizer_files.py",
        "        run.rehome_state(self._optimizer)\n",
        "",
        (f"{_FILES}::test_loaded_state_lies_on_its_tier",),
    ),
)
