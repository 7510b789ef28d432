"""Gradients on their way to the host, steps that are skipped, updates behind the device."""

from tests.mutants.mutation import DELETE, NEVER, VALUE, WITHOUT, Mutation

MUTATIONS = {
    "integration/test_separate_masters.py": (
        Mutation(
            "the model's parameter shows the gradient of its separate master",
            "gradients: GradientOffload.watch",
            DELETE,
            "put_front",
        ),
        Mutation(
            "gradients in flight are awaited when a parameter's gradient is read",
            "optim/masters: _Front.grad",
            DELETE,
            "on_access",
        ),
        Mutation(
            "an assigned gradient replaces the one of the master",
            "optim/masters: _Front.grad=",
            DELETE,
            "grad",
            "torch_private.set_plain_grad(self, value)",
        ),
    ),
    "integration/test_device_gradients.py": (
        Mutation(
            "a failed backward has ended in all threads before weights are read",
            "gradients: GradientOffload.release_units",
            DELETE,
            "wait_for_failed_backward",
        ),
    ),
    "integration/test_device_gradients.py integration/test_streamed_training.py": (
        Mutation(
            "a gradient is accumulated after its copy", "gradients: GradientOffload._accumulate", DELETE, "wait_host"
        ),
        Mutation(
            "a second gradient of a weight is copied after the first",
            "gradients: GradientOffload._receive_from_device",
            WITHOUT,
            "_group",
        ),
        Mutation("a gradient after its update is an error", "gradients: GradientOffload._check", NEVER, "_given"),
        Mutation(
            "gradients are complete when a backward returns",
            "gradients: GradientOffload.finish_at_the_end",
            DELETE,
            "at_end_of_backward",
        ),
        Mutation(
            "gradients of a failed backward are dropped",
            "gradients: GradientOffload.start_backward",
            NEVER,
            "_backward",
        ),
        Mutation(
            "gradients can be read between micro-batches",
            "gradients: GradientOffload.complete_for_access",
            NEVER,
            "is_on_host _backward",
        ),
    ),
    "unit/gradients/test_grad_sums.py": (
        Mutation(
            "a gradient of ours is recognised by identity",
            "gradients: GradientOffload.is_ours",
            VALUE,
            "return",
            "own is not None and own().data_ptr() == grad.data_ptr()",
        ),
    ),
    "integration/test_streamed_hazards.py::test_the_real_error_of_a_gradient_is_raised": (
        Mutation("an error of accumulation reaches the update", "gradients: GradientOffload.take", DELETE, "wait"),
    ),
    "integration/test_device_gradients.py integration/test_streamed_training.py integration/test_overlapped_step.py": (
        Mutation("masters are written after their copies", "optim: MasterWeights.wait", DELETE, "wait_host"),
        Mutation(
            "an error of a resident weight's update is raised",
            "gradients: Updates._end_residents",
            VALUE,
            "exception",
            "[None for _ in updated]",
        ),
        Mutation("a step waits for copies that read masters", "gradients: Updates.prepare", DELETE, "wait"),
    ),
    "integration/test_loop_habits.py": (
        Mutation("a gradient with a graph is not detached silently", "gradients: _taken_from", NEVER, "requires_grad"),
    ),
    "integration/test_foreign_optimizers.py": (
        Mutation(
            "a closure that is evaluated after a write has new weights",
            "gradients: HostStep._evaluate",
            DELETE,
            "write_back",
        ),
    ),
    "distributed/test_agreement.py::test_a_bad_gradient_of_one_rank_lets_all_leave_the_step_out": (
        Mutation(
            "all ranks skip a step together",
            "gradients: OverflowGuard.first_bad",
            VALUE,
            "first_over_processes",
            "here",
        ),
    ),
    "distributed/test_agreement.py::test_cpu_adam_alone_updates_parameters_of_fsdp": (
        Mutation(
            "the gradient norm is that of all ranks",
            "optim: CPUAdam._whole_sums",
            VALUE,
            "return",
            "self._sums(parameters)",
        ),
    ),
    "integration/test_hf_trainer.py": (
        Mutation(
            "device copies become stale when a fused optimizer has written",
            "gradients: HostStep._step_of_any_other",
            DELETE,
            "_is_written",
        ),
    ),
    "integration/test_hf_trainer.py::test_a_backward_after_the_training_is_told_so": (
        Mutation(
            "a model whose training has ended takes no gradients",
            "run: UserLoop.only_computes",
            DELETE,
            "UnsupportedError",
        ),
    ),
    "integration/test_overlapped_step.py integration/test_streamed_hazards.py": (
        Mutation(
            "a unit used twice is updated after the backward",
            "gradients: Updates.unit_is_over",
            WITHOUT,
            "num_forwards",
        ),
    ),
    "integration/test_overlapped_step.py integration/test_device_gradients.py integration/test_streamed_training.py": (
        Mutation(
            "updates wait for the last micro-batch", "gradients: Updates.unit_is_over", WITHOUT, "_is_last_backward"
        ),
    ),
    "integration/test_overlapped_step.py": (
        Mutation("an update makes device copies stale", "gradients: Updates.start", DELETE, "increment_version"),
        Mutation("a unit knows that it is being updated", "gradients: Updates.start", DELETE, "begin_update"),
    ),
    "integration/test_streamed_hazards.py::test_a_step_does_not_write_what_is_being_fetched": (
        Mutation("a step waits for copies that read weights", "gradients: Updates.prepare", DELETE, "wait_for_readers"),
    ),
    "integration/test_overlapped_step.py::test_an_update_does_not_write_what_was_fetched_when_the_one_before_ended": (
        Mutation(
            "an update waits for copies that began before it", "gradients: Updates.start", DELETE, "wait_for_readers"
        ),
    ),
}
