"""Streams, events and copies; slots, versions and stale weights; inputs of units."""

from tests.mutants.mutation import ALWAYS, ARGUMENT, DELETE, NEVER, VALUE, WITHOUT, Mutation

MUTATIONS = {
    "unit/transfer/test_device_engine.py contract/test_transfer_engine.py": (
        Mutation("a copy waits for what its device has queued", "devices: DeviceEngine._start", DELETE, "wait_stream"),
        Mutation("a copy waits for the copies that it follows", "devices: DeviceEngine._start", DELETE, "wait_event"),
        Mutation("the device waits for a copy", "devices: DeviceTransfer.wait", DELETE, "wait_event"),
        Mutation("the host waits for a copy", "devices: DeviceTransfer.wait_host", NEVER, "done"),
        Mutation("a copy is done when its event has passed", "devices: DeviceTransfer.done", NEVER, "query"),
        Mutation("host memory is held during its copy", "devices: DeviceTransfer.__init__", VALUE, "_on_host", "()"),
        Mutation(
            "device memory is held during its copy", "devices: DeviceTransfer.__init__", VALUE, "_on_device", "()"
        ),
        Mutation(
            "only the stream that started a copy lets its memory go",
            "devices: DeviceTransfer.wait",
            WITHOUT,
            "_origin",
        ),
        Mutation(
            "memory of another stream is held until its copy is done",
            "devices: DeviceTransfer.wait",
            WITHOUT,
            "_from_here",
        ),
        Mutation("the engine holds copies in flight", "devices: DeviceEngine._start", DELETE, "append"),
        Mutation(
            "the event of a copy is recorded after the copy",
            "devices: DeviceEngine._start",
            ARGUMENT,
            "DeviceTransfer.0",
            "origin.record_event()",
        ),
    ),
    "unit/gradients/test_grad_sums.py::test_gradients_that_machines_reduce_are_of_another_stream": (
        Mutation(
            "gradients that are reduced over machines count as memory of another stream",
            "gradients: GradientOffload._copy_group",
            ARGUMENT,
            "_start.from_here",
            "True",
        ),
    ),
    "unit/streaming/test_params.py": (
        Mutation(
            "a copy into a slot waits for kernels that read it", "streaming: Slot.fetch", VALUE, "drop", "self.drop()"
        ),
        Mutation("a unit that is released records its kernels in the slot", "streaming: Slot.exit", DELETE, "mark"),
        Mutation("the device waits for a slot's copy", "streaming: Slot.wait", DELETE, "wait"),
        Mutation("a slot with stale weights is not used", "streaming: Slot.is_image_of", WITHOUT, "versions"),
        Mutation("busy slots are not evicted", "streaming: ParamStreamer._fetch", ALWAYS, "keep"),
        Mutation(
            "weights written by a unit on its device are refused",
            "streaming: ParamStreamer.exit",
            NEVER,
            "is_unchanged",
        ),
        Mutation(
            "a recompute for several backwards has its own weights",
            "streaming: _UnitCall.begin_recompute",
            WITHOUT,
            "in_exec_group",
        ),
        Mutation("a graph of gradients has its own weights", "streaming: ParamStreamer.enter", NEVER, "phase"),
        Mutation(
            "a write is a new version", "streaming: UnitWeights.versions", VALUE, "return", "(self._num_accesses,)"
        ),
        Mutation(
            "a unit's forward has no gradients of the host",
            "streaming: UnitWeights.gradients_hidden",
            DELETE,
            "set_plain_grad",
            nth=0,
        ),
    ),
    "unit/streaming/test_looks.py": (
        Mutation("a unit knows the copies that read its host weights", "streaming: Slot.fetch", DELETE, "readers"),
        Mutation(
            "a unit whose weights were accessed is not prefetched",
            "streaming: ParamStreamer.fetch_ahead",
            WITHOUT,
            "is_accessed",
        ),
        Mutation(
            "an access waits for copies that read the weights",
            "streaming: UnitWeights.wait_for_readers",
            DELETE,
            "wait_host",
        ),
        Mutation(
            "an access is a new version",
            "streaming: UnitWeights.versions",
            VALUE,
            "return",
            "tuple((place.parameter._version for place in self.places))",
        ),
        Mutation("replaced data is copied into the host weights", "streaming: UnitWeights.take_in", DELETE, "copy_"),
    ),
    "unit/streaming/test_weights_on_ssd.py": (
        Mutation("the copy of an evicted unit is dropped", "streaming: Slot.drop", DELETE, "drop"),
        Mutation("a slot whose copy failed is fetched again", "streaming: Slot.wait", DELETE, "unit"),
    ),
    "integration/test_overlapped_step.py": (
        Mutation(
            "a unit waits for its update before it is used", "streaming: ParamStreamer.enter", DELETE, "wait", nth=0
        ),
        Mutation(
            "a unit that is being updated is not prefetched",
            "streaming: ParamStreamer.fetch_ahead",
            WITHOUT,
            "is_updating",
        ),
        Mutation(
            "access to a unit that is being updated is watched", "streaming: UnitWeights.begin_update", DELETE, "watch"
        ),
        Mutation("waiting for an update waits", "streaming: UnitWeights.wait", DELETE, "result"),
        Mutation("an access waits for the update", "streaming: UnitWeights._begin_access", DELETE, "settle"),
        Mutation(
            "a parameter that is looked up is awaited",
            "streaming: AwaitedParameters.settled",
            DELETE,
            "_settle",
        ),
    ),
    "integration/test_streamed_hazards.py::test_writes_that_leave_no_trace_count": (
        Mutation(
            "data that a unit's forward has replaced is copied back",
            "streaming: ParamStreamer.enter",
            DELETE,
            "take_in",
        ),
    ),
    "unit/streaming/test_activations.py": (
        Mutation(
            "a recompute uses the tensors that were swapped in for its forward",
            "streaming: ModuleState.replay",
            DELETE,
            "name",
            nth=1,
        ),
    ),
    "integration/test_accelerate.py": (
        Mutation(
            "memory that a user holds is not overwritten", "streaming: UnitWeights.take_in", NEVER, "is_only_holder"
        ),
    ),
    "integration/test_separate_masters.py": (
        Mutation("a tensor handed out by `.data` may be written", "optim: WeightPair.gives_out", DELETE, "version"),
        Mutation(
            "a tensor handed out by `.data` may be written until it is gone",
            "optim: WeightPair.agree",
            VALUE,
            "any",
            "self.compute._version",
        ),
    ),
    "integration/test_device_gradients.py integration/test_streamed_training.py": (
        Mutation(
            "a backward inside of a unit's backward does not end it",
            "streaming: ParamStreamer.enter",
            DELETE,
            "recompute_begins",
        ),
    ),
    "unit/streaming/test_activations.py unit/streaming/test_activations_lifetime.py": (
        Mutation("a device waits until an input is stored", "streaming: UnitInput.release", DELETE, "wait"),
        Mutation(
            "a unit that changes its input waits until it is stored", "streaming: UnitInput.__init__", DELETE, "wait"
        ),
        Mutation(
            "an input is fetched into memory that no kernel uses",
            "streaming: StoredInput.fetch",
            ARGUMENT,
            "h2d.after",
            "(self.transfer,)",
        ),
        Mutation("a recompute waits for its input", "streaming: UnitInput._values", DELETE, "wait"),
        Mutation(
            "the newest input is used only while it is unchanged", "streaming: UnitInput._values", WITHOUT, "version_of"
        ),
        Mutation("a recompute changes a copy of its input", "streaming: UnitInput.load", VALUE, "return", "tensor"),
        Mutation(
            "a recompute gets lists as they were",
            "streaming: is_container",
            VALUE,
            "return is_dataclass",
            "isinstance(value, tuple)",
        ),
        Mutation("a recompute gets a cache in a dict as it was", "streaming: _UnitCall._keep", NEVER, "is_cache"),
        Mutation("each recompute has its own copy of a cache", "streaming: _UnitCall._loaded", NEVER, "is_cache"),
        Mutation("a recompute draws the random numbers of its forward", "streaming: _Draws.replay", DELETE, "_start"),
    ),
    "unit/streaming/test_saved_inputs.py unit/streaming/test_activations_lifetime.py": (
        Mutation(
            "an input is fetched after it was stored",
            "streaming: StoredInput.fetch",
            ARGUMENT,
            "h2d.after",
            "(engine.mark(),)",
        ),
        Mutation("a held input that has changed is an error", "streaming: HeldInput.get", NEVER, "_version"),
        Mutation(
            "a stored input that has changed is stored again",
            "streaming: StoredInput.is_image_of",
            WITHOUT,
            "version_of",
        ),
    ),
    "unit/streaming/test_module_state.py": (
        Mutation(
            "a parameter that has changed before its recompute is an error",
            "streaming: ModuleState._check_parameters",
            NEVER,
            "version_of",
        ),
        Mutation("a kept buffer that has changed is an error", "streaming: _Kept.fresh", NEVER, "version_of"),
    ),
    "integration/test_qlora.py::test_is_the_run_without_us": (
        Mutation(
            "the backward of a 4-bit layer reads the weight of its forward",
            "streaming: _prepare_backward",
            DELETE,
            "_BytesOfThen",
        ),
    ),
    "integration/test_qlora_models.py::test_is_the_run_without_us": (
        Mutation(
            "a unit is recomputed before the backward of its last layer",
            "streaming: _prepare_backward",
            DELETE,
            "partial",
        ),
    ),
    "unit/weights/test_hf_quantised.py::test_what_is_quantised_is_saved_and_loads": (
        Mutation("quantised codes are saved as they are", "weights: named_tensors", WITHOUT, "parts"),
    ),
}
