"""Protections of optimizer state on SSD: visits to host memory, and checkpoints that refer to it."""

from tests.mutants.mutant import Mutant

_RECORDS = "lightning_cxl/optim/state_records.py"
_VISITS = "lightning_cxl/optim/state_visits.py"
_LOADING = "lightning_cxl/optim/state_loading.py"
_STATE = "lightning_cxl/optim/parameter_state.py"
_TABLE = "lightning_cxl/optim/kernel_table.py"
_T_RANKS = "tests/distributed/test_state_on_ssd.py"
_CHECKPOINT = "lightning_cxl/run/ssd_checkpoint.py"
T_VISITS = ("tests/unit/optim/test_state_visits.py",)
_ON_SSD = "lightning_cxl/run/state_on_ssd.py"
_FILE = "lightning_cxl/run/checkpoint_file.py"
T_COPIED = ("tests/unit/run/test_copied_state.py",)
T_RUN = ("tests/integration/test_state_on_ssd.py",)
T_FAULTY = ("tests/integration/test_faulty_runs.py",)
T_KILLS = ("tests/integration/test_killed_runs.py",)
_PARTIAL = "lightning_cxl/run/partial_file.py"
T_PARTIAL = ("tests/unit/run/test_partial_file.py",)
T_BESIDE = ("tests/unit/run/test_ssd_checkpoint.py",)

MUTANTS = (
    Mutant(
        "the kernel works on the slot",
        _TABLE,
        "self._rows[start + field] = self._visit.moved(self._rows[start + field])",
        "pass",
        T_VISITS,
    ),
    Mutant("new state is zero", _RECORDS, "            blank(Visit", "            str(Visit", T_VISITS),
    Mutant(
        "state that an interrupted step has not reached is zero",
        _VISITS,
        "            if own.blanks:\n",
        "            if False:\n",
        T_VISITS,
    ),
    Mutant("state is zero once", _RECORDS, "        self.blanks.clear()\n", "", T_VISITS),
    Mutant(
        "a visit that fails gives its slot back",
        _VISITS,
        "                    visits._slots.give_back(slot)\n                else:",
        "                    pass\n                else:",
        T_VISITS,
    ),
    Mutant("a slot that is read into is kept", _VISITS, "if read is None or read.done():", "if True:", T_VISITS),
    Mutant("a read waits for the write in its slot", _VISITS, "slot, after=[write])", "slot)", T_VISITS),
    Mutant(
        "a slot is taken from what was read ahead",
        _VISITS,
        "            if others:\n",
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
        "            while not visits._visited.isdisjoint(self._records):\n                visits._changed.wait()\n",
        "",
        T_VISITS,
    ),
    Mutant("a write that failed is not forgotten", _VISITS, "if not record.record.is_whole:", "if False:", T_VISITS),
    Mutant(
        "state on SSD is not used as a tensor in memory",
        _RECORDS,
        "        raise UnsupportedError(\n",
        "        str(\n",
        T_VISITS,
    ),
    Mutant(
        "a view shows what has been written",
        _VISITS,
        "        self.wait()\n        return self._store.view",
        "        return self._store.view",
        T_VISITS,
    ),
    Mutant(
        "what is copied is checked", _RECORDS, "            value.record.visits.check()\n", "            pass\n", T_RUN
    ),
    Mutant("a record is loaded once", _LOADING, ".record or parameter, [])", ".step, [])", T_VISITS),
    Mutant("lost state is refused", _STATE, "        if self.lost:\n", "        if False:\n", T_VISITS),
    Mutant(
        "state after a run is memory", _STATE, "            own.come_to_memory(shown)\n", "            pass\n", T_VISITS
    ),
    Mutant("a generation is let go of after the file is there", _CHECKPOINT, "    on_ssd.settle(number)\n", "", T_RUN),
    Mutant("a reference fits the tensor", _CHECKPOINT, " or own.reference() != value", "", T_RUN),
    Mutant(
        "state of an earlier run is not overwritten",
        "lightning_cxl/run/run.py",
        "            self.on_ssd.refuse_state_of_earlier_run(optimizers)\n",
        "            pass\n",
        T_RUN,
    ),
    Mutant(
        "a file that was not written does not count",
        _CHECKPOINT,
        "                on_ssd.settle(before[-1].number)\n",
        "                pass\n",
        T_RUN,
    ),
    Mutant(
        "a file that has its name counts, also after an error",
        _CHECKPOINT,
        "and saved_generation(path, on_ssd.folders) == number:",
        "and False:",
        T_BESIDE,
    ),
    Mutant(
        "a file is there and refers to the generation before",
        _ON_SSD,
        '(newer.details["checkpoint"], self.folders) == newer.number',
        '(newer.details["checkpoint"], self.folders) is not None',
        T_BESIDE,
    ),
    Mutant(
        "a generation that could not be let go of is tried again",
        _ON_SSD,
        "        if self._to_settle is not None:\n",
        "        if False:\n",
        T_BESIDE,
    ),
    Mutant(
        "the state of another model is refused",
        _ON_SSD,
        "            self.store.check_found(",
        "            dict(",
        T_BESIDE,
    ),
    Mutant(
        "nothing is made where state is gone",
        _CHECKPOINT,
        "    if missing:  # a store",
        "    if False:  # a store",
        T_BESIDE,
    ),
    Mutant(
        "damaged state does not become a plain checkpoint",
        _CHECKPOINT,
        "        _check(store, [records[name] for name in sorted(needed)])\n",
        "        pass\n",
        T_BESIDE,
    ),
    Mutant(
        "state of another run does not become a plain checkpoint",
        _CHECKPOINT,
        "        if not needed <= records.keys():\n",
        "        if False:\n",
        T_BESIDE,
    ),
    Mutant("two generations are one before a commit", _CHECKPOINT, "    on_ssd.make_room()\n", "", T_BESIDE),
    Mutant(
        "a run that begins anew can write where one was killed while it saved",
        _ON_SSD,
        "            self.settle(stays.number)\n",
        "            pass\n",
        T_KILLS,
    ),
    Mutant(
        "it keeps the state of the checkpoint that is there",
        _ON_SSD,
        "stays = newer if is_saved else older",
        "stays = newer",
        T_KILLS,
    ),
    Mutant(
        "the name of a checkpoint lies on the disk before state is let go of",
        _FILE,
        "            sync_folder(folder)\n",
        "            pass\n",
        T_KILLS,
    ),
    Mutant(
        "the names of new folders lie on the disk, too",
        _FILE,
        "(target.parent, *(each.parent for each in made))",
        "(target.parent,)",
        T_BESIDE,
    ),
    Mutant(
        "what a killed run left beside checkpoints is removed",
        _FILE,
        "        remove_left(target.parent)\n",
        "",
        T_PARTIAL,
    ),
    Mutant(
        "a checkpoint that is larger than memory can be read",
        _FILE,
        "        with mapping_files_with(_pages):\n",
        "        if True:\n",
        ("tests/unit/run/test_large_checkpoint.py",),
    ),
    Mutant(
        "flipped bits of a checkpoint are found",
        _FILE,
        "            _check(path)\n",
        "            pass\n",
        ("tests/unit/run/test_large_checkpoint.py",),
    ),
    Mutant(
        "a checkpoint that cannot be mapped is not called damaged",
        _FILE,
        "    except CheckpointError:\n        raise\n",
        "",
        ("tests/unit/run/test_large_checkpoint.py",),
    ),
    Mutant(
        "a long name of a checkpoint leaves room for what is added",
        _PARTIAL,
        "target.name[:_MOST_CHARS]",
        "target.name",
        T_PARTIAL,
    ),
    Mutant(
        "a file keeps its lock until it has its name",
        _FILE,
        "            _take_place(partial, target)  # while",
        "        _take_place(partial, target)  # while",
        T_PARTIAL,
    ),
    Mutant(
        "a file that is being written is locked",
        _PARTIAL,
        "        try:\n            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        try:\n            pass\n",
        T_PARTIAL,
    ),
    Mutant(
        "a file that is locked is not removed",
        _PARTIAL,
        "                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                path",
        "                path",
        T_PARTIAL,
    ),
    Mutant(
        "a file that somebody removes is not written",
        _PARTIAL,
        "            continue\n        except OSError:  # no",
        "            return file, path\n        except OSError:  # no",
        T_PARTIAL,
    ),
    Mutant(
        "a file that was removed is not written",
        _PARTIAL,
        "        if os.fstat(file.fileno()).st_nlink:\n",
        "        if True:\n",
        T_PARTIAL,
    ),
    Mutant(
        "a file without a lock has a name that nobody removes",
        _PARTIAL,
        'path.rename(target.with_name(f".{name}.{token}.partial"))',
        "path",
        T_PARTIAL,
    ),
    Mutant(
        "files of others beside checkpoints stay",
        _PARTIAL,
        "if not _LOCKED.fullmatch(path.name):",
        "if False:",
        T_PARTIAL,
    ),
    Mutant("links beside checkpoints stay", _PARTIAL, " | os.O_NOFOLLOW", "", T_PARTIAL),
    # -- copies of state in checkpoints
    Mutant(
        "a file that cannot be written says why",
        _FILE,
        "        if not isinstance(first, (OSError, KeyboardInterrupt)):\n",
        "        if True:\n",
        T_COPIED,
    ),
    Mutant(
        "an error of torch keeps no memory alive",
        _FILE,
        "            raise\n    raise first.with_traceback(None)",
        "            raise\n        raise first\n    raise first.with_traceback(None)",
        T_RUN,
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
        "        on_ssd.owns_generations = True\n",
        "        on_ssd.owns_generations = True\n        store.settle(number)\n",
        T_KILLS,
    ),
    Mutant(
        "all optimizers are given back, also where one cannot be",
        "lightning_cxl/updates/adoption.py",
        "                rest.callback(self._release, *each)\n",
        "                self._release(*each)\n",
        T_RUN,
    ),
    Mutant(
        "users see the error that ended a run when their optimizers are given back",
        "lightning_cxl/run/run.py",
        "cleanup.callback(self._end, self._adoption.release)",
        "cleanup.callback(self._adoption.release)",
        T_RUN,
    ),
    Mutant(
        "users see the error that ended a run",
        "lightning_cxl/run/run.py",
        "            if not self._ended_by_error:\n",
        "            if True:\n",
        T_FAULTY,
    ),
    Mutant(
        "no two processes store in one folder",
        "lightning_cxl/machine/ranks/ssd_share.py",
        'path / f"rank-{rank}"',
        "path",
        (f"{_T_RANKS}::test_training_is_that_of_state_in_memory",),
    ),
    Mutant(
        "all ranks check their state before one copies it",
        "lightning_cxl/integrations/lightning/sharded.py",
        "        check_together(None",
        "        (lambda _, state: None)(None",
        (f"{_T_RANKS}::test_what_one_drive_has_damaged_no_rank_saves",),
    ),
    Mutant(
        "a generation of a process is not removed as left behind",
        "lightning_cxl/storage/rank_folders.py",
        "        if folder.read(MANIFEST) is None and folder.read(PART) is None:",
        "        if True:",
        ("tests/unit/storage/test_rank_folders.py",),
    ),
)
