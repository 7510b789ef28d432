"""Protections of weights on SSD: on their way to the device, when users write to them, and in updates."""

from tests.mutants.mutant import Mutant

_HOP = "lightning_cxl/streaming/hop.py"
_FETCH = "lightning_cxl/streaming/fetch.py"
_SLOTS = "lightning_cxl/streaming/slots.py"
_PARAMS = "lightning_cxl/streaming/params.py"
_UNIT = "lightning_cxl/streaming/unit_weights.py"
_VISITS = "lightning_cxl/optim/state_visits.py"
_ADAM = "lightning_cxl/optim/adam_step.py"
_STORE = "lightning_cxl/storage/store.py"
_ENGINE = "lightning_cxl/storage/engine.py"
_RECORDS = "lightning_cxl/inventory/records.py"
T_HOP = ("tests/unit/streaming/test_hop.py",)
T_VISITS = ("tests/unit/optim/test_state_visits.py",)
_RUN = "tests/integration/test_weights_on_ssd.py"
T_WAYS = (f"{_RUN}::test_every_way_to_train_gives_the_same",)
T_FAULTS = (f"{_RUN}::test_a_drive_that_fails_ends_the_run_with_its_error",)
T_LOOKS = (f"{_RUN}::test_whoever_looks_between_steps_sees_the_weights_of_now",)
T_WRITES = (f"{_RUN}::test_what_a_user_writes_between_steps_counts",)
T_FROZEN = (f"{_RUN}::test_what_a_user_wrote_to_frozen_weights_is_written_once",)
T_MOVED = (f"{_RUN}::test_weights_are_read_for_forward_backward_and_update_and_written_once",)
T_RESUMED = (f"{_RUN}::test_a_run_resumes_exactly",)
T_SETTLE = ("tests/unit/planning/test_settle_state.py",)

MUTANTS = (
    Mutant(
        "what was dropped is not copied", _FETCH, "            self._is_dropped = True\n", "            pass\n", T_HOP
    ),
    Mutant(
        "a copy that is being started ends first",
        _FETCH,
        "        with self._lock:\n            self._is_dropped = True\n",
        "        self._is_dropped = True\n",
        T_HOP,
    ),
    Mutant(
        "a slot is free when its copy is done",
        _HOP,
        "                copy.wait_host()\n",
        "                pass\n",
        T_WAYS,
    ),
    Mutant("a copy waits for its read", _FETCH, "        self.read.wait_host()\n", "        pass\n", T_HOP),
    Mutant(
        "what a user wrote is copied",
        _HOP,
        "        if self.is_dirty():\n            copy_bytes(self.window, slot)\n",
        "        pass\n",
        T_HOP,
    ),
    Mutant(
        "a write back comes after an update's write",
        _HOP,
        "        home.settle()  # the end",
        "        pass  # the end",
        T_HOP,
    ),
    Mutant(
        "what an update brings is not written back",
        _HOP,
        "        self._hop.forget_looks(self)\n",
        "        pass\n",
        T_HOP,
    ),
    Mutant(
        "an error gives the slot back",
        _HOP,
        "                self._slots.give_back(slot)\n            self._start",
        "                pass\n            self._start",
        T_HOP,
    ),
    Mutant(
        "windows that were written are not kept in memory",
        _HOP,
        "                self.write_back(each)\n",
        "                pass\n",
        T_HOP,
    ),
    Mutant(
        "what an error came through is let go of",
        _ENGINE,
        "raise self._error.anew() if isinstance(self._error, StorageError) else self._error",
        "raise self._error",
        T_FAULTS,
    ),
    Mutant(
        "a slot that failed is fetched again",
        _PARAMS,
        "                    del self._entered[id(unit)]\n",
        "                    pass\n",
        T_FAULTS,
    ),
    Mutant(
        "a slot's copy is dropped when it gets another unit",
        _SLOTS,
        "                transfer.drop()\n",
        "                pass\n",
        T_HOP,
    ),
    Mutant(
        "what could not be read is fetched again",
        _SLOTS,
        "            self.unit = None  # it has to be fetched again\n",
        "            pass\n",
        T_HOP,
    ),
    Mutant(
        "looks are over before windows are written",
        _UNIT,
        "                piece.home.looks_are_over()\n",
        "                pass\n",
        T_FROZEN,
    ),
    Mutant("who looks waits for the write", _UNIT, "            piece.home.settle()\n", "            pass\n", T_LOOKS),
    Mutant(
        "what was read ahead and written otherwise is read again",
        _VISITS,
        "                    self._drop_fetched(record)\n            missing",
        "                    pass\n            missing",
        T_WRITES,
    ),
    Mutant(
        "a record that is visited is not read ahead",
        _VISITS,
        "if record not in self._fetched and record not in self._visited and not",
        "if record not in self._fetched and not",
        T_VISITS,
    ),
    Mutant(
        "a part has all records that it needs",
        _ADAM,
        "                records.append(record)\n        if not",
        "                pass\n        if not",
        T_MOVED,
    ),
    Mutant(
        "weights are in no generation",
        _HOP,
        "self._store.reserve(name, nbytes, keeps=False)",
        "self._store.reserve(name, nbytes)",
        T_RESUMED,
    ),
    Mutant(
        "frozen weights have a record of their own",
        "lightning_cxl/inventory/inventory.py",
        "has_ssd and parameter.requires_grad",
        "has_ssd",
        T_SETTLE,
    ),
    Mutant(
        "no update visits frozen weights", _RECORDS, "        if record.is_updated:\n", "        if True:\n", T_SETTLE
    ),
    Mutant(
        "only weights that stream leave",
        "lightning_cxl/inventory/asked.py",
        'self.names.get(id(owner), "") in self._may_leave',
        "True",
        T_SETTLE,
    ),
)
