"""Protections of optimizer state on SSD: visits to host memory, and checkpoints that refer to it."""

from tests.mutants.mutant import Mutant

_RECORDS = "lightning_cxl/optim/state_records.py"
_VISITS = "lightning_cxl/optim/state_visits.py"
_STATE = "lightning_cxl/optim/parameter_state.py"
_ADAM = "lightning_cxl/optim/cpu_adam.py"
_EIGHT = "lightning_cxl/optim/eight_bit.py"
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
        "the kernel works on the slot", _TABLE, "self._rows[start + field] = address + visit.distance", "pass", T_VISITS
    ),
    Mutant(
        "what a user wrote to state counts", _RECORDS, "        if self.is_dirty:\n", "        if False:\n", T_VISITS
    ),
    Mutant("what a kernel codes counts", _EIGHT, "    torch.autograd.graph.increment_version", "    str", T_VISITS),
    Mutant("new state is zero", _RECORDS, "            blank(visit.at_slot)\n", "            pass\n", T_VISITS),
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
        "            self._write_dirty()  # the end of a write",
        T_VISITS,
    ),
    Mutant(
        "a visit that fails gives its slot back",
        _VISITS,
        "self._leave_slot(slot, read)\n\n    @",
        "pass\n\n    @",
        T_VISITS,
    ),
    Mutant("a slot that is read into is kept", _VISITS, "if read is None or read.done():", "if True:", T_VISITS),
    Mutant("a read waits for the write in its slot", _VISITS, "slot, after=[write]))", "slot))", T_VISITS),
    Mutant(
        "a slot is taken from what was read ahead",
        _VISITS,
        "            if self._fetched:\n",
        "            if False:\n",
        T_VISITS,
    ),
    Mutant(
        "what is visited is not read ahead",
        _VISITS,
        "if record in self._fetched or record in self._visited:",
        "if record in self._fetched:",
        T_VISITS,
    ),
    Mutant(
        "a record is visited by one thread at a time",
        _VISITS,
        "            while record in self._visited:\n                self._changed.wait()\n",
        "",
        T_VISITS,
    ),
    Mutant("a write that failed is not forgotten", _VISITS, "if not record.record.is_whole:", "if False:", T_VISITS),
    Mutant("lost state is refused", _STATE, "        if self.lost:\n", "        if False:\n", T_VISITS),
    Mutant("state after a run is memory", _STATE, "            state.record = None\n", "            pass\n", T_VISITS),
    Mutant("a generation is let go of after the file is there", _CHECKPOINT, "    store.settle(number)\n", "", T_RUN),
    Mutant("a reference fits the tensor", _CHECKPOINT, "or _reference(own, record) != value", "", T_RUN),
    Mutant("a generation has what users wrote", _CHECKPOINT, "    on_ssd.visits.wait()  # what", "    # what", T_RUN),
    Mutant(
        "state is checked before it is copied",
        "lightning_cxl/run/checkpoint.py",
        "            on_ssd.visits.check()\n",
        "            pass\n",
        T_RUN,
    ),
    Mutant(
        "state of an earlier run is not overwritten",
        "lightning_cxl/run/run.py",
        "            self.on_ssd.refuse_state_of_earlier_run(optimizers)\n",
        "            pass\n",
        T_RUN,
    ),
)
