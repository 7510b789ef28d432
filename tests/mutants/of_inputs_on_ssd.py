"""Protections of inputs of units on SSD: their way there and back, their places on drives, and their memory."""

from tests.mutants.mutant import Mutant

_INPUTS = "lightning_cxl/streaming/inputs_on_ssd.py"
_FETCH = "lightning_cxl/streaming/fetch.py"
_HOP = "lightning_cxl/streaming/hop.py"
_AREA = "lightning_cxl/storage/area.py"
_STORE = "lightning_cxl/storage/store.py"
_BLOCKS = "lightning_cxl/memory/blocks.py"
_RECORDS = "lightning_cxl/inventory/tensors.py"
_INVENTORY = "lightning_cxl/inventory/inventory.py"
_ROOM = "lightning_cxl/planning/settle_state.py"
_PLACED = "lightning_cxl/run/placed_memory.py"
_USE = "lightning_cxl/run/ssd_use.py"
T_INPUTS = ("tests/unit/streaming/test_inputs_on_ssd.py",)
T_AREA = ("tests/unit/storage/test_area.py",)
T_SETTLE = ("tests/unit/planning/test_settle_state.py",)
T_JOB = ("tests/unit/planning/jobs/test_model_job.py",)
_RUN = "tests/integration/test_inputs_on_ssd.py"
T_LARGER = (f"{_RUN}::test_larger_batches_than_planned_take_more_and_stay_in_memory_where_there_is_no_more",)
T_REPORT = (f"{_RUN}::test_the_report_says_what_a_step_moves",)

MUTANTS = (
    Mutant(
        "an image is written when its copy from the device is done",
        _INPUTS,
        "            self.copy.wait_host()\n",
        "            pass\n",
        T_INPUTS,
    ),
    Mutant(
        "an image is read when its write has begun",
        _HOP,
        "            if not fetch.home.can_be_read:\n                return\n",
        "",
        T_INPUTS,
    ),
    Mutant(
        "whoever needs the slot of a write waits for it",
        _INPUTS,
        '"""Block until the write has ended."""\n        self._write.wait_done()\n',
        '"""Block until the write has ended."""\n',
        T_INPUTS,
    ),
    Mutant(
        "a slot is not free before its write is done",
        _INPUTS,
        "        if not self._write.done():\n            return False\n        self._write.wait_done()  #",
        "        if self._write.done():\n            self._write.wait_done()  #",
        T_INPUTS,
    ),
    Mutant(
        "errors of writes are for whoever reads",
        _INPUTS,
        "        self._write.wait_done()  #",
        "        pass  #",
        T_INPUTS,
    ),
    Mutant(
        "errors of writes are raised for nobody but whoever reads",
        _INPUTS,
        "        self._write.wait_done()  #",
        "        self._write.wait_host()  #",
        T_INPUTS,
    ),
    Mutant(
        "a place does not wait for what a forked child has not",
        _INPUTS,
        "        self.hop.check_process()  #",
        "        pass  #",
        T_INPUTS,
    ),
    Mutant(
        "an image that nobody holds is not written",
        _INPUTS,
        "        self._image = weakref.ref(image)\n",
        "        self._image = lambda: image\n",
        T_INPUTS,
    ),
    Mutant(
        "an image gives its place back",
        _INPUTS,
        "        self._inputs.area.give_back(self.record)\n",
        "        pass\n",
        T_INPUTS,
    ),
    Mutant(
        "a copy that cannot be started leaves the thread free",
        _INPUTS,
        "        finally:\n            beginning.leave()\n",
        "        finally:\n            beginning.leave = lambda: None\n",
        T_INPUTS,
    ),
    Mutant(
        "what is over has no finaliser in which Ctrl-C would be lost",
        "lightning_cxl/storage/slots.py",
        "        self.__class__ = _Left",
        "        _ = _Left",
        ("tests/unit/streaming/test_ctrl_c.py",),
    ),
    Mutant(
        "a trip that fails keeps nothing",
        _HOP,
        "error = caught.with_traceback(None)  #",
        "error = caught  #",
        T_INPUTS,
    ),
    Mutant(
        "inputs are in memory where nothing is trained",
        _PLACED,
        "        if placement.tiers[0] != SSD or self.on_ssd is None:  # no",
        "        assert self.on_ssd is not None\n        if placement.tiers[0] != SSD:  # no",
        (f"{_RUN}::test_evaluation_with_gradients_has_its_inputs_in_memory",),
    ),
    Mutant(
        "the hop does not work on after the run",
        _INPUTS,
        "        if self._inputs.is_closed:\n",
        "        if False:\n",
        T_INPUTS,
    ),
    Mutant(
        "slots are two where sizes are not known",
        _INPUTS,
        "= NUM_INPUT_SLOTS * record.padded_nbytes",
        "= 99 * record.padded_nbytes",
        T_INPUTS,
    ),
    Mutant(
        "a read that cannot be started is told to whoever waits",
        _FETCH,
        "        if self.refused is not None:\n            raise self.refused\n",
        "",
        T_INPUTS,
    ),
    Mutant(
        "inputs on drives are read ahead",
        "lightning_cxl/streaming/activations.py",
        "            before.prefetch()\n",
        "            pass\n",
        T_INPUTS,
    ),
    Mutant(
        "a place is free when its transfers are done",
        _AREA,
        "if all(transfer.done() for transfer in transfers)",
        "if True",
        T_AREA,
    ),
    Mutant(
        "a write that failed keeps no place",
        _AREA,
        "transfer.wait_done()  # nobody",
        "transfer.wait_host()  # nobody",
        T_AREA,
    ),
    Mutant(
        "more space is taken only where waiting does not help",
        _AREA,
        "            if self._left:  # more",
        "            if False:  # more",
        T_AREA,
    ),
    Mutant(
        "space that is added is one with what is there",
        _AREA,
        "        if begin == self._end:\n",
        "        if False:\n",
        T_AREA,
    ),
    Mutant(
        "space is taken when the run begins",
        _AREA,
        "        if nbytes:\n            self._grow(nbytes)\n",
        "",
        T_AREA,
    ),
    Mutant("records that are gone are gone", _STORE, "= weakref.WeakSet()", "= set()", T_AREA),
    Mutant(
        "inputs are in no generation",
        _ROOM,
        "self.versions if record.is_state else 1",
        "self.versions if not record.is_weights else 1",
        T_SETTLE,
    ),
    Mutant(
        "inputs of an unknown size are in the inventory",
        _INVENTORY,
        "        stored = {name: 0 for name, _ in units if asked.tier(name, role) == SSD}\n",
        "        pass\n",
        T_SETTLE,
    ),
    Mutant(
        "slots for inputs are planned",
        _RECORDS,
        "once + num_devices * input_slot_bytes(records, num_drives)",
        "once",
        T_SETTLE,
    ),
    Mutant(
        "every device has inputs of its own",
        "lightning_cxl/planning/job.py",
        "            on_drives = nbytes * inventory.copies_of(role)\n",
        "            on_drives = nbytes\n",
        T_JOB,
    ),
    Mutant(
        "an input without room stays in memory",
        _PLACED,
        "            placement = self.placements.in_memory(unit, nbytes)\n",
        "            pass\n",
        T_LARGER,
    ),
    Mutant(
        "a full tier is refused where that is asked for",
        _PLACED,
        '            if self.memory.on_tier_full == "error":\n                raise\n',
        "",
        T_LARGER,
    ),
    Mutant(
        "what micro-batches move counts for their step",
        _USE,
        "            return  # between",
        "            pass  # between",
        T_REPORT,
    ),
)
