"""Protections of weights on SSD: on their way to the device, when users write to them, and in updates."""

from tests.mutants.mutant import Mutant

_HOP = "lightning_cxl/streaming/hop.py"
_FETCH = "lightning_cxl/streaming/fetch.py"
_SLOTS = "lightning_cxl/streaming/slots.py"
_PARAMS = "lightning_cxl/streaming/params.py"
_UNIT = "lightning_cxl/streaming/unit_weights.py"
_VISITS = "lightning_cxl/optim/state_visits.py"
_ADAM = "lightning_cxl/optim/adam_step.py"
_ENGINE = "lightning_cxl/storage/engine.py"
_STORE = "lightning_cxl/storage/store.py"
_ON_SSD = "lightning_cxl/run/state_on_ssd.py"
_CPU_ADAM = "lightning_cxl/optim/cpu_adam.py"
_RECORDS = "lightning_cxl/inventory/records.py"
T_CTRL_C = ("tests/unit/streaming/test_ctrl_c.py",)
T_HOP = ("tests/unit/streaming/test_hop.py",)
_RUN = "tests/integration/test_weights_on_ssd.py"
T_WAYS = (f"{_RUN}::test_every_way_to_train_gives_the_same",)
T_FAULTS = (f"{_RUN}::test_a_drive_that_fails_ends_the_run_with_its_error",)
T_LOOKS = (f"{_RUN}::test_whoever_looks_between_steps_sees_the_weights_of_now",)
T_WRITES = (f"{_RUN}::test_what_a_user_writes_between_steps_counts",)
T_FROZEN = (f"{_RUN}::test_what_a_user_wrote_to_frozen_weights_is_written_once",)
T_MOVED = (f"{_RUN}::test_weights_are_read_for_forward_backward_and_update_and_written_once",)
T_PLANNED = (f"{_RUN}::test_a_run_takes_the_bytes_that_were_planned",)
T_EVALUATED = (f"{_RUN}::test_a_model_is_evaluated_without_an_optimizer",)
T_RESUMED = (f"{_RUN}::test_a_run_resumes_exactly",)
T_HOOKS = (f"{_RUN}::test_what_hooks_of_a_step_see_and_write_counts",)
T_OPTIMIZER = (f"{_RUN}::test_whoever_looks_through_the_optimizer_sees_the_weights_of_now",)
T_EARLIER = (f"{_RUN}::test_weights_of_an_earlier_run_are_not_overwritten_before_they_have_moved",)
T_CHECKED = (f"{_RUN}::test_damaged_weights_are_not_saved",)
_SEVERAL = "tests/distributed/test_weights_on_ssd.py"
T_STORE = ("tests/unit/storage/test_store.py",)
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
        "while self._copying and self._copying[0][1].done():",
        "while self._copying:",
        T_HOP,
    ),
    Mutant("a slot that is still written is not given away", _HOP, "and not self._use.done():", "and False:", T_HOP),
    Mutant(
        "who asks for a copy does not wait for another one",
        _HOP,
        "        self._changed.release()\n"
        "        try:\n"
        "            with suppress(Exception):  # for whoever waits for that copy\n"
        "                copy.wait_host()\n"
        "        finally:\n"
        "            self._changed.acquire()\n",
        "        try:\n"
        "            with suppress(Exception):  # for whoever waits for that copy\n"
        "                copy.wait_host()\n"
        "        finally:\n",
        T_HOP,
    ),
    Mutant("a copy that fails is another one's trouble", _HOP, "with suppress(Exception):", "if True:", T_HOP),
    Mutant(
        "a read that cannot begin ends its copy alone",
        _HOP,
        "except Exception as error:",
        "except ZeroDivisionError as error:",
        T_HOP,
    ),
    Mutant(
        "an interrupted request copies nothing",
        _HOP,
        "            fetch.drop()  #",
        "            pass  #",
        T_HOP,
    ),
    Mutant(
        "Ctrl-C does not reach slots",
        "lightning_cxl/storage/slots.py",
        "        if threading.current_thread() is not threading.main_thread():\n",
        "        if True:\n",
        T_CTRL_C,
    ),
    Mutant(
        "an end that Ctrl-C interrupts is made up for",
        "lightning_cxl/storage/slots.py",
        "        _requests.put(self.leave)\n",
        "        pass\n",
        T_CTRL_C,
    ),
    Mutant("a forked child is told", _HOP, "if os.getpid() != self._pid:", "if False:", T_HOP),
    Mutant("weights are checked before they are copied", _ON_SSD, "self._hop.check(home.record)", "pass", T_CHECKED),
    Mutant(
        "hooks of a step find what it has made of weights",
        _CPU_ADAM,
        "        self.kept.visits.show_weights()  # step",
        "        pass  # step",
        T_HOOKS,
    ),
    Mutant(
        "who looks through the optimizer waits for writes",
        "lightning_cxl/updates/unit_updates.py",
        "            unit.settle()\n        wait(",
        "            pass\n        wait(",
        T_OPTIMIZER,
    ),
    Mutant(
        "a slot has no unit until all copies are asked for",
        _SLOTS,
        "        self.unit, self._transfers = None, []\n",
        "        self.unit, self._versions, self._transfers = unit, versions, []\n",
        T_HOP,
    ),
    Mutant(
        "weights of an earlier run are not overwritten",
        _STORE,
        "self._end = next_unseen(self._drives, self._end, count * part)",
        "pass",
        (*T_STORE, *T_EARLIER),
    ),
    Mutant(
        "slots have no padding",
        "lightning_cxl/storage/record.py",
        "-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES\n        self.v",
        "self.part_nbytes * num_drives\n        self.v",
        T_STORE,
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
        "                self._slots.give_back(trip.slot)\n            self._start",
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
        _FETCH,
        "raise self._error.anew() if isinstance(self._error, StorageError) else self._error",
        "raise self._error",
        T_FAULTS,
    ),
    Mutant(
        "what an error of a transfer came through is let go of",
        _ENGINE,
        "raise self.error.anew() if isinstance(self.error, StorageError) else self.error",
        "raise self.error",
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
        T_PLANNED,
    ),
    Mutant(
        "frozen weights have a record of their own",
        "lightning_cxl/inventory/inventory.py",
        "ssd is not None and is_updated(parameter)",
        "ssd is not None",
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
    Mutant(
        "no update visits weights that no optimizer has",
        "lightning_cxl/inventory/inventory.py",
        "return parameter.requires_grad and id(parameter) in held",
        "return parameter.requires_grad",
        T_SETTLE,
    ),
    Mutant(
        "slots hold records that are cut over several drives",
        _RECORDS,
        "of_owner.get(record.owner, 0) + record.nbytes_on(num_drives)",
        "of_owner.get(record.owner, 0) + record.nbytes",
        T_SETTLE,
    ),
    Mutant(
        "frozen weights go first",
        "lightning_cxl/planning/settle_state.py",
        "frozen = [record for record in movable.weights if not record.is_updated]",
        "frozen = list(movable.weights)",
        T_SETTLE,
    ),
    Mutant(
        "what is updated together is one visit",
        "lightning_cxl/planning/jobs/model_job.py",
        "len({each.owner for each in inventory.ssd_records if each.is_updated})",
        "len(inventory.ssd_records)",
        T_SETTLE,
    ),
    Mutant(
        "a plan counts weights once",
        "lightning_cxl/planning/jobs/job.py",
        "(1 if each.role in others else versions)",
        "versions",
        T_SETTLE,
    ),
    Mutant(
        "a rule that puts no weights there is not silent",
        "lightning_cxl/run/host.py",
        "            _warn_of_weights_that_stay(inventory)\n",
        "            pass\n",
        T_WAYS,
    ),
    Mutant(
        "damaged weights are not copied into a checkpoint",
        "lightning_cxl/integrations/lightning/strategy.py",
        "            self._on_ssd.check_weights()\n",
        "            pass\n",
        ("tests/integration/test_state_on_ssd.py::test_what_is_damaged_is_not_copied_into_a_checkpoint",),
    ),
    Mutant(
        "damaged weights are not copied where weights alone are saved",
        "lightning_cxl/integrations/lightning/strategy.py",
        "        if self._on_ssd is not None and self._root is None:",
        "        if self._on_ssd is not None and self._root is None and checkpoint.get('optimizer_states'):",
        (
            "tests/integration/test_state_on_ssd.py"
            "::test_damaged_weights_are_not_copied_into_a_checkpoint_of_weights_alone",
        ),
    ),
    Mutant(
        "weights of several processes are checked before they are saved",
        _ON_SSD,
        "            on_ssd.check_weights()\n",
        "            pass\n",
        (f"{_SEVERAL}::test_damaged_weights_are_not_saved",),
    ),
    Mutant(
        "weights that a CPU gathers stay in memory",
        "lightning_cxl/inventory/inventory.py",
        "    if workload.computes_on_host:\n        return (",
        "    if False:\n        return (",
        ("tests/distributed/test_state_on_ssd.py::test_what_needs_one_process_is_refused",),
    ),
    Mutant(
        "weights that ranks share stay in memory",
        "lightning_cxl/inventory/inventory.py",
        "if config.share_weights or workload.mesh.shares_weights:",
        "if workload.mesh.shares_weights:",
        (f"{_SEVERAL}::test_shared_weights_stay_in_memory",),
    ),
    Mutant(
        "a closed run reads no drives",
        "lightning_cxl/streaming/shards_on_ssd.py",
        "            shard.leave(self)\n",
        "            pass\n",
        (f"{_SEVERAL}::test_who_looks_and_writes_between_steps_sees_the_weights_of_now",),
    ),
    Mutant(
        "forked children have mapped weights",
        "lightning_cxl/memory/file_pages.py",
        "inherit=True",
        "inherit=False",
        ("tests/unit/weights/test_mapped.py",),
    ),
)
