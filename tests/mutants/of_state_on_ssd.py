"""Protections of optimizer state on SSD: visits to host memory, and checkpoints that refer to it."""

from tests.mutants.mutant import Mutant

_RECORDS = "lightning_cxl/optim/state_records.py"
_VISITS = "lightning_cxl/optim/state_visits.py"
_STATE = "lightning_cxl/optim/parameter_state.py"
_ADAM = "lightning_cxl/optim/cpu_adam.py"
_TABLE = "lightning_cxl/optim/kernel_table.py"
_CHECKPOINT = "lightning_cxl/run/ssd_checkpoint.py"
T_VISITS = ("tests/unit/optim/test_state_visits.py",)
_ON_SSD = "lightning_cxl/run/state_on_ssd.py"
_FILE = "lightning_cxl/run/checkpoint.py"
T_RUN = ("tests/integration/test_state_on_ssd.py",)
T_FAULTY = ("tests/integration/test_faulty_runs.py",)
T_KILLS = ("tests/integration/test_killed_runs.py",)

MUTANTS = (
    Mutant(
        "the kernel works on the slot",
        _TABLE,
        "self._rows[start + field] = self._visit.moved(self._rows[start + field])",
        "pass",
        T_VISITS,
    ),
    Mutant(
        "what a user wrote to state counts", _RECORDS, "        if self.is_dirty():\n", "        if False:\n", T_VISITS
    ),
    Mutant("new state is zero", _RECORDS, "            blank(at_slot)\n", "            pass\n", T_VISITS),
    Mutant("state is zero once", _RECORDS, "        self.blanks.clear()\n", "", T_VISITS),
    Mutant(
        "who looks at state waits for writes",
        _ADAM,
        "        self.wait()\n        self.kept.visits.wait()\n",
        "        self.wait()\n",
        T_VISITS,
    ),
    Mutant(
        "loading waits for writes",
        _VISITS,
        "            self.wait()  # the end of a write",
        "            self._write_touched()  # the end of a write",
        T_VISITS,
    ),
    Mutant(
        "a visit that fails writes nothing",
        _VISITS,
        "        is_written = False\n        try:\n",
        "        is_written = False\n        self._store.write(records[0].record, fetched[0].slot)\n        try:\n",
        T_VISITS,
    ),
    Mutant(
        "a visit that fails gives its slot back",
        _VISITS,
        "                    self._slots.give_back(each.slot)\n",
        "                    pass\n",
        T_VISITS,
    ),
    Mutant("a read waits for the write in its slot", _VISITS, "slot, after=[write])", "slot)", T_VISITS),
    Mutant(
        "a slot is taken from what was read ahead",
        _VISITS,
        "            if others:\n",
        "            if False:\n",
        T_VISITS,
    ),
    Mutant(
        "who waits for a slot is told",
        _VISITS,
        "                self._changed.notify_all()\n",
        "",
        T_VISITS,
    ),
    Mutant("state after a run is memory", _STATE, "            state.record = None\n", "            pass\n", T_VISITS),
    Mutant(
        "a file that was not written does not count",
        _CHECKPOINT,
        "            store.settle(before[-1].number)\n",
        "            pass\n",
        T_RUN,
    ),
    Mutant("a generation is let go of after the file is there", _CHECKPOINT, "    store.settle(number)\n", "", T_RUN),
    Mutant("a reference fits the tensor", _CHECKPOINT, "or _reference(own, record) != value", "", T_RUN),
    Mutant(
        "a run that begins anew can write where one was killed while it saved",
        _ON_SSD,
        "            self.store.settle(stays.number)\n",
        "            pass\n",
        T_KILLS,
    ),
    Mutant(
        "it keeps the state of the checkpoint that is there",
        _ON_SSD,
        'if os.path.exists(kept[1].details["checkpoint"]) else kept[0]',
        "if True else kept[0]",
        T_KILLS,
    ),
    Mutant(
        "the name of a checkpoint lies on the disk before state is let go of",
        _FILE,
        "            os.fsync(folder)",
        "            pass",
        T_KILLS,
    ),
    Mutant(
        "what a generation has is not written to",
        "lightning_cxl/storage/generations.py",
        "            if version not in committed:\n",
        "            if True:\n",
        T_KILLS,
    ),
    Mutant(
        "both generations stay until the file is there",
        _CHECKPOINT,
        "    on_ssd.owns_generations = True\n    try:\n",
        "    on_ssd.owns_generations = True\n    store.settle(number)\n    try:\n",
        T_KILLS,
    ),
    Mutant(
        "users see the error that ended a run",
        "lightning_cxl/run/run.py",
        "            if not self._ended_by_error:\n",
        "            if True:\n",
        T_FAULTY,
    ),
)
