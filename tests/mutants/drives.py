"""Records on drives, commits and checksums; state, weights and inputs on SSD."""

from tests.mutants.mutation import ALWAYS, ARGUMENT, DELETE, NEVER, VALUE, WITHOUT, Mutation

MUTATIONS = {
    "unit/storage/test_store.py": (
        Mutation("a read waits for the write before it", "storage: Store.read", ARGUMENT, "read.after"),
        Mutation("a write waits for transfers before it", "storage: Store.write", ARGUMENT, "write.after"),
        Mutation("a checksum that differs is an error", "storage: Store.read", NEVER, "checksum"),
        Mutation("a damaged manifest is found", "storage: decode", VALUE, "crc32", "False"),
        Mutation("a folder is locked", "storage: Folder.__init__", DELETE, "lock LOCK_EX"),
        Mutation("a committed version is not overwritten", "storage: Store._free_version", ALWAYS, "committed"),
        Mutation(
            "the earlier generation stays until it is settled",
            "storage: Store.commit",
            ARGUMENT,
            "_replace.0",
            "(new,)",
        ),
    ),
    "unit/storage/test_faults.py": (
        Mutation("a record whose last write failed is not read", "storage: Store.read", NEVER, "last_whole"),
        Mutation("a record whose last write failed is not committed", "storage: Store.commit", NEVER, "is_whole"),
        Mutation(
            "a generation whose manifest may be on the drive is protected",
            "storage: Store._replace",
            DELETE,
            "append",
        ),
        Mutation("after a failed sync no write counts", "storage: Store._sync_drives", DELETE, "last_whole"),
    ),
    "unit/storage/test_engine.py": (
        Mutation("a short transfer continues where it stopped", "storage: Drive._move", VALUE, "_after", "()"),
    ),
    "unit/storage/test_faults.py::test_after_a_power_loss_at_any_time_a_committed_generation_is_there": (
        Mutation("drives are synced before the manifest", "storage: Store._sync_drives", DELETE, "sync"),
        Mutation("the manifest is synced before its rename", "storage: Folder.write_new", DELETE, "sync"),
        Mutation("the folder is synced after the rename of the manifest", "storage: Folder.publish", DELETE, "sync"),
        Mutation("new data files are synced into their folder", "storage: Store.__init__", DELETE, "sync"),
    ),
    "unit/storage/test_places.py": (
        Mutation("a new folder is synced into its parent", "storage: Folder.__init__", DELETE, "sync_folder"),
    ),
    "unit/optim/test_swapped_state.py": (
        Mutation("the kernel works on the buffer", "optim: KernelTable.add", DELETE, "moved"),
        Mutation("new state is zero", "optim: StateRecord.fill", DELETE, "blank"),
        Mutation("state is zeroed once", "optim: StateRecord.clean", DELETE, "clear"),
        Mutation("a buffer is kept until its transfer is done", "storage: Swapper._free_after", ALWAYS, "None", nth=0),
        Mutation("a read waits for its bytes", "storage: _Use.take", NEVER, "read"),
        Mutation("a record in use is not prefetched", "storage: Swapper._prefetch", WITHOUT, "_in_use"),
        Mutation("a record is used by one thread at a time", "storage: _Use.take", NEVER, "isdisjoint"),
        Mutation("buffers of a use are taken together", "storage: BufferPool.take", NEVER, "None address"),
        Mutation("a failed write of state is an error", "optim: StateSwapper.wait", NEVER, "is_whole"),
        Mutation("lost state is refused", "optim: ParameterStates.check_not_lost", NEVER, "lost"),
    ),
    "integration/test_weights_on_ssd.py::test_what_a_user_writes_between_steps_counts": (
        Mutation(
            "state that was written after its prefetch is read again", "storage: Swapper._take_for", NEVER, "num_begun"
        ),
    ),
    "integration/test_weights_on_ssd.py::test_weights_are_read_for_forward_backward_and_update_and_written_once": (
        Mutation("an update has all records that it needs", "optim: _parts", DELETE, "append", nth=0),
    ),
    "integration/test_state_on_ssd.py": (
        Mutation("state is verified before it is copied", "optim: read_states", DELETE, "verify"),
    ),
    "integration/test_killed_runs.py": (
        Mutation("the first save after a kill can write", "run: StateOnSsd.make_room", DELETE, "settle number"),
    ),
    "unit/streaming/test_weights_on_ssd.py": (
        Mutation("a dropped read is not copied", "streaming: Fetch.drop", DELETE, "_is_dropped"),
        Mutation("a buffer is free when its copy is done", "streaming: Fetch.run", DELETE, "_copy wait_host"),
        Mutation("a copy waits for its read", "streaming: Fetch.run", DELETE, "read wait_host"),
        Mutation("an error returns the buffer", "storage: Swapper._run_next", DELETE, "_free"),
        Mutation("a window is written back behind the update", "streaming: WeightRecord.end_access", DELETE, "settle"),
    ),
    "integration/test_weights_on_ssd.py::test_damaged_weights_are_not_saved": (
        Mutation("weights are verified before they are copied", "run: StateOnSsd.check_weights", DELETE, "verify"),
    ),
    "unit/streaming/test_inputs_on_ssd.py": (
        Mutation("an input is written after its copy from the device", "streaming: _Offload.run", DELETE, "wait_host"),
        Mutation("a buffer is free when its write is done", "streaming: _Offload.run", DELETE, "wait_done"),
        Mutation(
            "an input is read behind its write", "streaming: InputOnSsd.wait_until_readable", DELETE, "write_has_begun"
        ),
    ),
}
