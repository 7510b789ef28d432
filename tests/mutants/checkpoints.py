"""Shards of several processes, checkpoints that are complete, and resumes."""

from tests.mutants.mutation import ALWAYS, ARGUMENT, DELETE, NEVER, VALUE, Mutation

MUTATIONS = {
    "distributed/test_agreement.py::test_copies_of_a_shard_begin_equal_whatever_the_seeds": (
        Mutation("replicas of a shard begin equal", "sharding: cut", DELETE, "_agree_on_values"),
    ),
    "distributed/test_fabric.py::test_skipped_reductions_are_not_made": (
        Mutation(
            "skipped reductions are not made", "sharding: without_reducing", DELETE, "set_requires_gradient_sync", nth=0
        ),
    ),
    "distributed/test_parity.py::test_as_fsdp_alone_and_as_one_process": (
        Mutation(
            "a tied weight is gathered for each use",
            "sharding: _num_uses",
            ARGUMENT,
            "sum.0",
            "(1 for _ in module.named_parameters())",
        ),
    ),
    "unit/optim/test_resharded.py": (
        Mutation(
            "8-bit state of other shards is decoded with its scales",
            "optim: of_this_shard",
            VALUE,
            "arange",
            "torch.arange(high - low) // BLOCK_SIZE",
        ),
    ),
    "unit/sharding/test_host_shard.py": (
        Mutation("the device waits for its shard", "sharding: _Bytes.to_device", DELETE, "wait"),
        Mutation("all ranks give as many rows to a gather", "sharding: HostShard.fsdp_pre_all_gather", DELETE, "size"),
        Mutation("an asynchronous save has the shard's values", "sharding: HostShard.data_ptr", VALUE, "return", "0"),
    ),
    "unit/sharding/test_host_shard_tensor.py": (
        Mutation("a write to a shard waits for copies that read it", "sharding: _Bytes.settle", DELETE, "wait_host"),
    ),
    "distributed/test_weights_on_ssd.py::test_damaged_weights_are_not_saved": (
        Mutation(
            "weights of all ranks are verified before they are saved", "run: check_together", DELETE, "check_weights"
        ),
    ),
    "integration/test_killed_runs.py": (
        Mutation("the folder is synced after the rename of a checkpoint", "run: save_file", DELETE, "sync_folder"),
    ),
    "unit/run/test_large_checkpoint.py": (
        Mutation("flipped bits of a checkpoint are found", "run: load_file", DELETE, "_check"),
    ),
    "unit/run/test_partial_file.py": (
        Mutation("a file that is being written is not removed", "run: _locked", DELETE, "flock", nth=0),
        Mutation("a file that was removed is not written", "run: _locked", NEVER, "samestat"),
    ),
    "unit/run/test_sharded_checkpoint.py": (
        Mutation("a checkpoint gets its name when it is complete", "run: unfinished", VALUE, "token_hex", "target"),
    ),
    "unit/run/test_checkpoint_folder.py::test_a_kill_at_any_step_leaves_a_checkpoint_that_is_found": (
        Mutation(
            "a kill during a rename leaves a checkpoint that is found", "run: lying_at", VALUE, "return lexists", "path"
        ),
    ),
    "distributed/test_folders.py::test_a_checkpoint_is_removed_at_once": (
        Mutation("a checkpoint that is being removed is not found", "run: remove", ARGUMENT, "_remove.0", "path"),
    ),
    "distributed/test_lightning.py::test_one_process_saves_where_several_have_saved": (
        Mutation("a file replaces the folder of several ranks", "run: _take_place", NEVER, "is_file"),
    ),
    "distributed/test_accelerate.py::test_a_state_is_what_was_saved_last_whatever_lay_in_its_folder": (
        Mutation(
            "a save of one process removes folders of several",
            "integrations: CXLAccelerator.save_state",
            DELETE,
            "remove",
            nth=0,
        ),
    ),
    "integration/test_checkpoint.py::test_a_full_disk_leaves_no_partial_file": (
        Mutation("a failed save leaves no file", "run: save_file", DELETE, "unlink"),
    ),
    "distributed/test_async_saves.py::test_training_goes_on_and_a_resume_is_exact": (
        Mutation("an asynchronous save has tensors of its step", "run: _copied", ARGUMENT, "to.copy"),
    ),
    "distributed/test_async_saves.py::test_the_last_checkpoint_stays_until_the_next_one_is_complete": (
        Mutation(
            "the last checkpoint stays until the next one is complete",
            "run: AsyncSaves.then",
            DELETE,
            "submit",
            "step()",
        ),
    ),
    "distributed/test_async_saves.py::test_who_raises_waits": (
        Mutation(
            "an exception waits for an asynchronous save",
            "integrations: CXLOffloadStrategy.teardown",
            DELETE,
            "_close_saves",
        ),
    ),
    "integration/test_state_on_ssd.py::test_what_is_damaged_is_not_copied_into_a_checkpoint": (
        Mutation(
            "weights are verified before a checkpoint copies them",
            "integrations: CXLOffloadStrategy.save_checkpoint",
            DELETE,
            "check_weights",
        ),
    ),
    "integration/test_checkpoint.py::test_optimizer_state_finds_its_parameter_by_name": (
        Mutation("state is matched to its parameter by name", "run: by_name", NEVER, "saved"),
    ),
    "integration/test_exported_masters.py": (
        Mutation(
            "tied weights have one master in a checkpoint",
            "run: _with_tied",
            VALUE,
            "return get",
            "{name: changed.get(name, value) for name, value in saved.items()}",
        ),
    ),
    "integration/test_loops_overlap.py": (
        Mutation("a save waits for updates in flight", "run: _FileMethod._settled_run", DELETE, "wait_for_updates"),
    ),
    "integration/test_fabric.py": (
        Mutation("a file has the masters of its own optimizer", "run: _StateDict.__call__", ALWAYS, "mine"),
    ),
    "integration/test_front_ends.py::test_a_run_resumes_exactly": (
        Mutation("masters are restored", "run: _LoadStateDict.__call__", DELETE, "restore_masters"),
        Mutation("random rounding continues after a resume", "run: _LoadStateDict.__call__", DELETE, "num_received"),
    ),
    "integration/test_accelerate.py::test_loaded_state_lies_on_its_tier": (
        Mutation("restored state is on its tier", "run: _LoadStateDict.__call__", DELETE, "place_state"),
    ),
    "distributed/test_loading.py::test_a_model_can_be_used_before_it_is_cut": (
        Mutation(
            "a weight that was not read yet has its assigned value",
            "weights/files: UnreadWeight.data=",
            DELETE,
            "_read",
            nth=1,
        ),
    ),
}
