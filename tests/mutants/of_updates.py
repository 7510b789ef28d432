"""Protections of gradients on their way to the host, and of updates behind the device."""

from tests.mutants.mutant import Mutant

_RUN = "lightning_cxl/run/run.py"
_GRADS = "lightning_cxl/gradients/sink.py"
_ARRIVED = "lightning_cxl/gradients/arrived.py"
_LEAVING = "lightning_cxl/gradients/leaving.py"
_SUMS = "lightning_cxl/gradients/sums.py"
_MASTERS = "lightning_cxl/optim/masters.py"
_UPDATES = "lightning_cxl/updates/unit_updates.py"
T_STEP = ("tests/integration/test_overlapped_step.py",)
T_HAZARDS = ("tests/integration/test_streamed_hazards.py",)
T_GRADS = ("tests/integration/test_device_gradients.py", "tests/integration/test_streamed_training.py")
T_BITSANDBYTES = (
    "tests/integration/test_hf_trainer.py::"
    "test_embeddings_have_32_bit_state_also_where_an_optimizer_of_bitsandbytes_has_masters",
)
T_ERRORS = ("tests/integration/test_streamed_hazards.py::test_the_real_error_of_a_gradient_is_raised",)

T_SEPARATE = ("tests/integration/test_separate_masters.py",)
T_LOOPS = ("tests/integration/test_accelerate_loops.py",)

MUTANTS = (
    # -- what loops over the model do
    Mutant(
        "the model's own parameter shows the gradient of a separate master",
        _GRADS,
        "            pair.put_front(self.someone_looks)\n",
        "",
        T_SEPARATE,
    ),
    Mutant(
        "gradients on their way are complete when a model's own parameter is asked",
        _MASTERS,
        "        pair.look()\n        grad: torch",
        "        grad: torch",
        T_SEPARATE,
    ),
    Mutant(
        "a compiler sees no gradient that is not beside its weight",
        _MASTERS,
        " or torch.compiler.is_compiling()",
        "",
        T_SEPARATE,
    ),
    Mutant(
        "a gradient that is assigned takes the place of the one before",
        _MASTERS,
        "        pair.master.grad = None if value is None else value.to(pair.master.device)\n",
        "        torch_private.set_plain_grad(self, value)\n",
        T_SEPARATE,
    ),
    Mutant(
        "gradients from before the run belong to the master",
        _MASTERS,
        "        torch_private.set_plain_grad(self.compute, None)\n",
        "        grad = None\n",
        T_LOOPS,
    ),
    Mutant(
        "who asks for `.data` may write to it",
        _MASTERS,
        "        self.version = -1\n",
        "",
        T_SEPARATE,
    ),
    Mutant(
        "who still has a `.data` may write to it again",
        _MASTERS,
        "-1 if any(alias() is not None for alias in self._aliases) else self.compute._version",
        "self.compute._version",
        T_SEPARATE,
    ),
    Mutant(
        "kernels write the memory that somebody has put in the place of `.data`",
        _MASTERS,
        "self.kernel_weights[pair.master] = parameter\n",
        "self.kernel_weights[pair.master] = parameter.detach()\n",
        T_SEPARATE,
    ),
    Mutant(
        "memory of a streamed weight that somebody holds is not overwritten",
        "lightning_cxl/streaming/unit_weights.py",
        "            if not is_only_holder(home):",
        "            if False:",
        T_LOOPS,
    ),
    # -- gradients
    Mutant(
        "a backward that failed in one thread is over in all before its weights are read",
        _GRADS,
        "wait_for_failed_backward(self._engine.device)",
        "pass",
        T_GRADS[:1],
    ),
    Mutant(
        "a backward that failed before anything of ours was called is over in all, too",
        _GRADS,
        "self._backward, self._may_run = None, True",
        "self._backward = None",
        T_GRADS[:1],
    ),
    Mutant(
        "a backward that failed in one thread is over in all before its run ends",
        _RUN,
        "cleanup.callback(self._end, self._grads.bring_home)",
        "pass",
        T_GRADS[:1],
    ),
    Mutant(
        "the error that ended a run is not replaced by one of its end",
        _RUN,
        "except LightningCXLError as error:",
        "except ZeroDivisionError as error:",
        T_GRADS[:1],
    ),
    Mutant("a gradient is read when it has landed", _LEAVING, "        transfer.wait_host()\n", "", T_GRADS),
    Mutant("the device holds the gradients of one group", _LEAVING, "            oldest.wait()\n", "", T_GRADS),
    Mutant(
        "gradients of two uses leave one after the other",
        _LEAVING,
        "if unit is not self._unit or key in self._waiting:",
        "if unit is not self._unit:",
        T_GRADS,
    ),
    Mutant(
        "staging memory is bounded",
        _LEAVING,
        "            self._left.popleft().fold.result()\n        memory",
        "            break\n        memory",
        T_GRADS,
    ),
    Mutant(
        "a gradient of ours is known by identity",
        _SUMS,
        "own is not None and own() is grad",
        "own is not None and own() is not None and own().data_ptr() == grad.data_ptr()",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "a gradient that is kept is no part of a larger tensor",
        _SUMS,
        " and _is_alone(grad) and",
        " and",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "a gradient that is kept is no other one's, too",
        _SUMS,
        "has_own_memory(grad) and is_only_holder(grad)",
        "has_own_memory(grad)",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "a gradient that is kept is in torch's own memory",
        "lightning_cxl/memory/host_tensors.py",
        "tensor.element_size() and storage.resizable()",
        "tensor.element_size()",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "a gradient that is kept has the type of its sum",
        _SUMS,
        " and grad.dtype is dtype and",
        " and",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "room is reserved for gradients that become wider",
        _SUMS,
        "same_type = pair.is_shared or pair.grad_dtype is pair.compute.dtype",
        "same_type = True",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "a gradient that is kept has its parameter's layout",
        _SUMS,
        " and is_flat_like(grad, pair.compute):",
        ":",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "a gradient that is kept counts while it lives",
        _SUMS,
        "weakref.ref(grad, partial(_let_go, counted))",
        "weakref.ref(grad)",
        ("tests/unit/gradients/test_sums.py",),
    ),
    Mutant(
        "no room is reserved for gradients that stay",
        _GRADS,
        "return self._leaves(pair) or not self._sums.stays(pair)",
        "return True",
        ("tests/integration/test_kept_in_place.py",),
    ),
    Mutant(
        "gradients go to a tier that was asked for by name",
        "lightning_cxl/memory/stacks.py",
        "tier.kind is TierKind.DRAM and nodes",
        "nodes",
        ("tests/integration/test_kept_in_place.py",),
    ),
    Mutant(
        "a gradient after its update is an error",
        _GRADS,
        "        if self._arrived.was_given(pair):\n",
        "        if False:\n",
        T_GRADS,
    ),
    Mutant(
        "a gradient on another device is an error",
        _GRADS,
        "        if grad.device != (device := self._engine.device):\n",
        "        if False:\n",
        T_GRADS,
    ),
    Mutant(
        "gradients are complete when a backward returns",
        _GRADS,
        "            at_end_of_backward(self.finish)\n",
        "            pass\n",
        T_GRADS,
    ),
    Mutant(
        "what autograd keeps for a moment keeps no run",
        "lightning_cxl/torch_private.py",
        "_queue_callback(lambda: calls.pop()())",
        "_queue_callback(callback)",
        ("tests/unit/test_torch_private.py",),
    ),
    Mutant(
        "what a failed backward left behind is forgotten",
        _GRADS,
        "            self._arrived.forget()\n",
        "            pass\n",
        T_GRADS,
    ),
    Mutant(
        "an error of folding gradients reaches the update",
        _ARRIVED,
        "            group.fold.result()\n",
        "            pass\n",
        T_ERRORS,
    ),
    Mutant(
        "masters are written when their copies are done",
        _MASTERS,
        "            transfer.wait_host()\n",
        "            pass\n",
        (*T_GRADS, *T_STEP),
    ),
    # -- the step
    Mutant(
        "a closure evaluated after a write finds new weights",
        "lightning_cxl/updates/host_step.py",
        "            self._updates.write_back(self._optimizer, self._parameters())\n        self._num",
        "            pass\n        self._num",
        ("tests/integration/test_step_contract.py",),
    ),
    Mutant(
        "a closure evaluated again finds what was written through `.data`",
        "lightning_cxl/updates/host_step.py",
        "        if self._num_evaluations or not self._evaluates_first:",
        "        if has_written:",
        ("tests/integration/test_foreign_optimizers.py",),
    ),
    Mutant(
        "moved state keeps its strides",
        "lightning_cxl/run/placed_memory.py",
        "        return mirror(value, value.dtype, lambda count, dtype:",
        "        return mirror(value.contiguous(), value.dtype, lambda count, dtype:",
        ("tests/integration/test_foreign_optimizers.py",),
    ),
    Mutant(
        "state that shares its storage stays",
        "lightning_cxl/run/placed_memory.py",
        " and value.untyped_storage().nbytes() == value.nbytes",
        "",
        ("tests/integration/test_foreign_optimizers.py",),
    ),
    Mutant(
        "masters of a finished run make room for the next one",
        "lightning_cxl/run/session.py",
        "            self._finished = None  # its masters are of other optimizers; they make room\n",
        "            pass\n",
        ("tests/integration/test_finished_runs.py",),
    ),
    # -- updates
    Mutant(
        "a unit that ran twice waits for the end of the backward",
        _UPDATES,
        " or unit.num_forwards != 1:",
        ":",
        (*T_STEP, *T_HAZARDS),
    ),
    Mutant(
        "updates wait for the last backward of a step",
        _UPDATES,
        "if self._optimizer is None or not self._is_last_backward or unit.num",
        "if self._optimizer is None or unit.num",
        (*T_STEP, *T_GRADS),
    ),
    Mutant(
        "an update makes copies on the device old",
        _UPDATES,
        "        torch.autograd.graph.increment_version(written)\n",
        "",
        T_STEP,
    ),
    Mutant(
        "who needs a unit knows that it is being updated",
        _UPDATES,
        "        unit.begin_update(update)",
        "        pass",
        T_STEP,
    ),
    Mutant(
        "what stays on the device waits for its update",
        _UPDATES,
        "errors = [update.exception() for _, update in updated]",
        "errors = [None for _ in updated]",
        (*T_GRADS, *T_STEP),
    ),
    Mutant(
        "a backward inside a unit's own does not end it",
        "lightning_cxl/streaming/params.py",
        "            self._listener.recompute_begins()\n",
        "",
        T_GRADS,
    ),
    Mutant(
        "who looks between micro-batches finds gradients",
        _GRADS,
        "        if self._backward is None and self._arrived.can_be_shown():",
        "        if False:",
        T_GRADS,
    ),
    Mutant(
        "a step waits for copies that read masters",
        "lightning_cxl/updates/whole_updates.py",
        "        self._masters.wait()\n        self._masters.absorb_changes()\n",
        "        self._masters.absorb_changes()\n",
        (*T_GRADS, *T_STEP),
    ),
    Mutant(
        "a step waits for copies that read homes",
        "lightning_cxl/updates/whole_updates.py",
        "            unit.wait_for_readers()\n",
        "            pass\n",
        ("tests/integration/test_streamed_hazards.py::test_a_step_does_not_write_what_is_being_fetched",),
    ),
    Mutant(
        "an update waits for copies that began before it",
        _UPDATES,
        "    unit.wait_for_readers()\n    job()\n",
        "    job()\n",
        (f"{T_STEP[0]}::test_an_update_does_not_write_what_was_fetched_when_the_one_before_ended",),
    ),
    Mutant(
        "units in flight are bounded",
        _UPDATES,
        "            wait([self._started.popleft()])",
        "            break",
        T_STEP,
    ),
    Mutant(
        "errors of updates are let go at the end",
        _UPDATES,
        "        self._started.clear()\n",
        "",
        T_ERRORS,
    ),
    Mutant(
        "settings of bitsandbytes hold for masters",
        "lightning_cxl/updates/bitsandbytes_overrides.py",
        "settings[id(pair.master)] = found",
        "pass",
        T_BITSANDBYTES,
    ),
)
