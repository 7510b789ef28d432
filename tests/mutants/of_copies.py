"""Protections of copies, slots, weights that stream and inputs of units."""

from tests.mutants.mutant import Mutant

_ENGINE = "lightning_cxl/transfer/engine.py"
_SLOTS = "lightning_cxl/streaming/slots.py"
_PARAMS = "lightning_cxl/streaming/params.py"
_UNITS = "lightning_cxl/streaming/unit_weights.py"
_AWAITED = "lightning_cxl/streaming/awaited.py"
_INPUTS = "lightning_cxl/streaming/saved_inputs.py"
_HOST_TENSORS = "lightning_cxl/memory/host_tensors.py"
_IN_PLACE = "lightning_cxl/streaming/in_place.py"
_CALLS = "lightning_cxl/streaming/activations.py"
_PRIVATE = "lightning_cxl/torch_private.py"
_STATE = "lightning_cxl/streaming/module_state.py"
_COMPARISONS = "lightning_cxl/streaming/comparisons.py"
T_ENGINE = ("tests/unit/transfer/test_device_engine.py", "tests/contract/test_transfer_engine.py")
T_PARAMS = ("tests/unit/streaming/test_params.py",)
T_LOOKS = ("tests/unit/streaming/test_looks.py",)
T_INPUTS = ("tests/unit/streaming/test_saved_inputs.py", "tests/unit/streaming/test_activations_lifetime.py")
T_IN_PLACE = ("tests/unit/streaming/test_in_place.py",)
T_CALLS = ("tests/unit/streaming/test_activations.py", "tests/unit/streaming/test_activations_lifetime.py")
T_STATE = ("tests/unit/streaming/test_module_state.py",)
T_STEP = ("tests/integration/test_overlapped_step.py",)
T_TRACE = ("tests/integration/test_streamed_hazards.py::test_writes_that_leave_no_trace_count",)

MUTANTS = (
    # -- the engine
    Mutant(
        "a copy waits for what the device has queued",
        _ENGINE,
        "            stream.wait_stream(origin)\n",
        "            pass\n",
        T_ENGINE,
    ),
    Mutant(
        "a copy waits for its `after`",
        _ENGINE,
        "                stream.wait_event(transfer.event)\n",
        "                pass\n",
        T_ENGINE,
    ),
    Mutant("the device waits for a copy", _ENGINE, "        stream.wait_event(self.event)\n", "", T_ENGINE),
    Mutant("the host waits for a copy", _ENGINE, "        while not self.done():", "        while False:", T_ENGINE),
    Mutant(
        "a copy is done when its event has passed",
        _ENGINE,
        "        if not self.event.query():",
        "        if False:",
        T_ENGINE,
    ),
    Mutant(
        "host memory is held during its copy",
        _ENGINE,
        "        self._on_host = on_host\n",
        "        self._on_host = ()\n",
        T_ENGINE,
    ),
    Mutant(
        "device memory is held during its copy",
        _ENGINE,
        "        self._on_device = on_device\n",
        "        self._on_device = ()\n",
        T_ENGINE,
    ),
    Mutant(
        "only the stream that started a copy lets its memory go",
        _ENGINE,
        "        if stream == self._origin:",
        "        if True:",
        T_ENGINE,
    ),
    Mutant(
        "the engine holds copies that are under way",
        _ENGINE,
        "            self._in_flight.append(transfer)",
        "            pass",
        T_ENGINE,
    ),
    Mutant(
        "a copy's event is behind the copy",
        _ENGINE,
        "DeviceTransfer(stream.record_event(), origin, on_device",
        "DeviceTransfer(origin.record_event(), origin, on_device",
        T_ENGINE,
    ),
    Mutant(
        "synchronize waits",
        _ENGINE,
        "        for transfer in in_flight:\n            transfer.wait_host()\n",
        "",
        T_ENGINE,
    ),
    Mutant(
        "a thread uses the engine's device",
        _ENGINE,
        "        torch.accelerator.set_device_index(self.device.index)",
        "        pass",
        T_ENGINE,
    ),
    Mutant(
        "copies between wrong sides are refused",
        _ENGINE,
        "    if source.device != from_device or destination.device != to_device:",
        "    if False:",
        T_ENGINE,
    ),
    # -- slots
    Mutant(
        "a copy into a slot waits for who reads it",
        _SLOTS,
        "before = [self._users, *self.drop()]",
        "before = self.drop()",
        T_PARAMS,
    ),
    Mutant(
        "a unit that leaves marks its slot",
        _SLOTS,
        "        self._users = self._engine.mark()",
        "        pass",
        T_PARAMS,
    ),
    Mutant("the device waits for a slot's copy", _SLOTS, "            transfer.wait()", "            pass", T_PARAMS),
    Mutant(
        "a slot with old weights is not used",
        _SLOTS,
        "self.unit is unit and self._versions == unit.versions()",
        "self.unit is unit",
        T_PARAMS,
    ),
    Mutant(
        "busy slots are kept",
        _SLOTS,
        "for slot in self._slots if slot not in keep), None)",
        "for slot in self._slots), None)",
        T_PARAMS,
    ),
    Mutant("a unit knows who reads its homes", _SLOTS, "        unit.readers = self._transfers\n", "", T_LOOKS),
    Mutant(
        "copies are forgotten when weights may have changed unseen",
        _SLOTS,
        "            if slot not in keep:\n                slot.unit = None",
        "            pass",
        T_TRACE,
    ),
    # -- units
    Mutant("who enters a unit waits for its update", _PARAMS, "        unit.wait()\n", "", T_STEP),
    Mutant(
        "a unit that is being updated is not fetched",
        _PARAMS,
        "if unit.is_updating() or unit.is_seen:",
        "if unit.is_seen:",
        T_STEP,
    ),
    Mutant(
        "a unit that someone has looked at is not fetched",
        _PARAMS,
        "if unit.is_updating() or unit.is_seen:",
        "if unit.is_updating():",
        T_LOOKS,
    ),
    Mutant(
        "a unit that has left is watched",
        _PARAMS,
        "        finally:\n            unit.watch()\n",
        "        finally:\n            pass\n",
        T_LOOKS,
    ),
    Mutant(
        "weights that a unit wrote are refused",
        _PARAMS,
        "        if not is_unchanged:",
        "        if False:",
        T_PARAMS,
    ),
    Mutant(
        "a recompute lets the unit before go",
        _PARAMS,
        "            self.release(keep=unit)",
        "            pass",
        T_PARAMS,
    ),
    Mutant("what units wrote to replaced data is brought home", _PARAMS, "            unit.take_in()\n", "", T_TRACE),
    Mutant("casts of weights end with the unit", _PARAMS, "            torch.clear_autocast_cache()\n", "", T_PARAMS),
    Mutant(
        "views of a slot that stay in a graph are refused",
        _PARAMS,
        "        if phase is None and any(",
        "        if False and any(",
        T_PARAMS,
    ),
    Mutant(
        "a graph of gradients has weights of its own",
        _PARAMS,
        '        if phase == "recompute in a graph":',
        "        if False:",
        T_PARAMS,
    ),
    Mutant(
        "weights in transforms of torch.func do not stream",
        _PARAMS,
        "or (torch.is_grad_enabled() and is_in_transform())",
        "or False",
        T_PARAMS,
    ),
    Mutant(
        "weights that are kept for several uses do not stream",
        _PARAMS,
        "        if caches_weights(unit.module) or",
        "        if False or",
        T_PARAMS,
    ),
    Mutant(
        "a recompute has the weights that were exchanged for its forward",
        "lightning_cxl/streaming/module_state.py",
        "                own[name] = then\n",
        "                pass\n",
        ("tests/unit/streaming/test_activations.py",),
    ),
    Mutant(
        "a gradient with a graph does not lose it unseen",
        "lightning_cxl/gradients/sink.py",
        "    if grad is not None and grad.requires_grad:",
        "    if False:",
        ("tests/integration/test_loop_habits.py",),
    ),
    Mutant(
        "a unit that is being updated is watched",
        _UNITS,
        "        self._update = update\n        self.watch()\n",
        "        self._update = update\n",
        T_STEP,
    ),
    Mutant("a wait for an update waits", _UNITS, "            update.result()\n", "            pass\n", T_STEP),
    Mutant(
        "who looks waits for an update",
        _UNITS,
        "        try:\n            self.settle()\n        finally:\n            self.unwatch()",
        "        try:\n            pass\n        finally:\n            self.unwatch()",
        T_STEP,
    ),
    Mutant(
        "a gradient that no optimizer waits for is refused",
        _UNITS,
        "parameter.grad.device != home.device:",
        "parameter.grad.device != parameter.grad.device:",
        ("tests/integration/test_streamed_hazards.py::test_a_gradient_that_no_optimizer_waits_for_is_refused",),
    ),
    Mutant("who looks waits for copies", _UNITS, "            transfer.wait_host()\n", "            pass\n", T_LOOKS),
    Mutant(
        "a look is a new version",
        _UNITS,
        "return (self._num_looks, *(place.parameter._version for place in self.places))",
        "return tuple(place.parameter._version for place in self.places)",
        T_LOOKS,
    ),
    Mutant(
        "a write is a new version",
        _UNITS,
        "return (self._num_looks, *(place.parameter._version for place in self.places))",
        "return (self._num_looks,)",
        T_PARAMS,
    ),
    Mutant(
        "replaced data is copied home", _UNITS, "            parameter.copy_(data)\n", "            pass\n", T_LOOKS
    ),
    Mutant(
        "a unit's forward does not see gradients on the host",
        _UNITS,
        "            place.parameter.grad = None\n",
        "            pass\n",
        T_PARAMS,
    ),
    Mutant(
        "a value that is looked up is awaited",
        _AWAITED,
        "        return self._settled()[name]\n",
        "        return self.plain[name]\n",
        T_STEP,
    ),
    Mutant(
        "all values that are looked up are awaited",
        _AWAITED,
        "        return self._settled().items()\n",
        "        return self.plain.items()\n",
        T_STEP,
    ),
    # -- inputs of units
    Mutant(
        "the device waits until an input is stored",
        _INPUTS,
        "            self._kept.transfer.wait()\n",
        "            pass\n",
        T_CALLS,
    ),
    Mutant(
        "a unit that changes its input waits until it is stored",
        _INPUTS,
        "                kept.transfer.wait()\n",
        "                pass\n",
        T_CALLS,
    ),
    Mutant(
        "an input that is not stored yet is not brought back",
        _INPUTS,
        "after=(self.transfer, engine.mark())",
        "after=(engine.mark(),)",
        T_INPUTS,
    ),
    Mutant(
        "an input comes back to memory that nobody uses",
        _INPUTS,
        "after=(self.transfer, engine.mark())",
        "after=(self.transfer,)",
        T_CALLS,
    ),
    Mutant(
        "a recompute waits for its input",
        _INPUTS,
        "        transfer.wait()\n        return self._kept.shape_like",
        "        return self._kept.shape_like",
        T_CALLS,
    ),
    Mutant(
        "a held input that has changed is an error",
        _INPUTS,
        "        if version != self._version:\n",
        "        if False:\n",
        T_INPUTS,
    ),
    Mutant(
        "a stored input that has changed is stored again",
        _INPUTS,
        "self.source() is tensor and self.version == version_of(tensor)",
        "self.source() is tensor",
        T_INPUTS,
    ),
    Mutant(
        "the newest input is used only while it is unchanged",
        _INPUTS,
        "        if near is not None and version_of(near) == self._version:\n            return near",
        "        if near is not None:\n            return near",
        T_CALLS,
    ),
    Mutant(
        "an input that changed before it was safe is an error",
        _INPUTS,
        "        if self._is_changed and not self._is_safe:\n",
        "        if False:\n",
        T_INPUTS,
    ),
    Mutant(
        "a recompute changes a copy of its input",
        _INPUTS,
        "return tensor.clone() if self._is_changed else tensor",
        "return tensor",
        T_CALLS,
    ),
    Mutant(
        "changed views of one storage are refused",
        _CALLS,
        "            if one.shares_memory_with(other):",
        "            if False:",
        T_INPUTS,
    ),
    Mutant(
        "only inputs that were seen to last stay in place",
        _CALLS,
        "History(position, times) if times and not cautious",
        "History(position, times or 0) if not cautious",
        T_IN_PLACE,
    ),
    Mutant(
        "an input that has changed once is copied for good",
        _CALLS,
        "if has_lasted and before != 0 else 0",
        "if has_lasted else 0",
        T_IN_PLACE,
    ),
    Mutant(
        "values are compared before an input stays in place",
        _INPUTS,
        "return version_of(tensor) == self.version and self.has_bits_of(tensor)",
        "return version_of(tensor) == self.version",
        T_IN_PLACE,
    ),
    Mutant(
        "a source is compared before it is freed",
        _INPUTS,
        "            self.has_lasted()\n            self._watched = None",
        "            self._watched = None",
        T_IN_PLACE,
    ),
    Mutant(
        "a source is freed only where nobody else can write to it",
        _INPUTS,
        "self._watched is not None and is_only_holder(self._watched)",
        "self._watched is not None",
        T_IN_PLACE,
    ),
    Mutant(
        "sources that nobody else holds are freed before the next unit",
        _CALLS,
        "        unit.offload.end_watches()  #",
        "        #",
        T_IN_PLACE,
    ),
    Mutant(
        "who holds torch's object for a storage counts",
        _PRIVATE,
        "return count + sys.getrefcount(storage)",
        "return count",
        T_IN_PLACE,
    ),
    Mutant(
        "an image is found again only where the memory has the same values",
        _CALLS,
        "not self.engine.computes_on_host or stored.has_bits_of(tensor)",
        "True",
        T_IN_PLACE,
    ),
    Mutant(
        "an image is found again only for the same memory",
        _INPUTS,
        "        return is_known and self._address == tensor.data_ptr()",
        "        return is_known",
        T_INPUTS,
    ),
    Mutant(
        "an input in place is found again only for the same memory",
        _IN_PLACE,
        "        return is_known and self._address == tensor.data_ptr()",
        "        return is_known",
        T_IN_PLACE,
    ),
    Mutant(
        "an input in place that was never completed dies quietly",
        _IN_PLACE,
        "        if saved is not None:\n",
        "        if True:\n",
        T_IN_PLACE,
    ),
    Mutant(
        "an input that its unit changes does not stay in place",
        _CALLS,
        "if times and not cautious",
        "if times",
        T_IN_PLACE,
    ),
    Mutant(
        "an input in place is found again only with the same values",
        _IN_PLACE,
        "self._source() is tensor and self._version == version_of(tensor)",
        "self._source() is tensor",
        T_IN_PLACE,
    ),
    Mutant(
        "small views of a large storage are copied",
        _HOST_TENSORS,
        "storage.nbytes() <= storage_extent(tensor) * tensor.element_size() and storage.resizable()",
        "storage.resizable()",
        T_IN_PLACE,
    ),
    Mutant(
        "memory of others is copied",
        _HOST_TENSORS,
        "storage.nbytes() <= storage_extent(tensor) * tensor.element_size() and storage.resizable()",
        "storage.nbytes() <= storage_extent(tensor) * tensor.element_size()",
        T_IN_PLACE,
    ),
    Mutant(
        "a device apart gets no inputs in place",
        _CALLS,
        "keep_in_place if engine.computes_on_host else None",
        "keep_in_place",
        T_IN_PLACE,
    ),
    Mutant(
        "a parameter that has changed is an error",
        _STATE,
        "            if version_of(parameter) != version:\n",
        "            if False:\n",
        T_STATE,
    ),
    Mutant(
        "a kept buffer that has changed is an error",
        _STATE,
        "        if version_of(self._original) != self._version:\n",
        "        if False:\n",
        T_STATE,
    ),
    Mutant(
        "modules are after a recompute as they were before",
        _STATE,
        "            for module, attributes, buffers in present:\n                _bind(module, attributes, buffers)\n",
        "            pass\n",
        T_STATE,
    ),
    Mutant(
        "answers of the device are waited for", _COMPARISONS, "            pending.transfer.wait_host()\n", "", T_STATE
    ),
)
