"""Protections of runs with several processes."""

from tests.mutants.mutant import Mutant

_WATCH = "lightning_cxl/sharding/watch.py"
_FAILURES = "lightning_cxl/sharding/failures.py"
_FOLDERS = "lightning_cxl/run/sharded_checkpoint.py"
_T_FOLDERS = "tests/distributed/test_folders.py"
_TEST = "tests/unit/sharding/test_watch.py"

MUTANTS = (
    Mutant(
        "an error in a collective waits for what explains it",
        _WATCH,
        "            self._decides_at = time.monotonic() + _SETTLE\n",
        "            self._decide()\n",
        (f"{_TEST}::test_a_rank_that_dies_explains_errors_that_came_before",),
    ),
    Mutant(
        "an error in a collective is known as such",
        _FAILURES,
        "any(sign in str(error) for sign in _SIGNS)",
        "False",
        ("tests/unit/sharding/test_failures.py::test_errors_of_collectives_are_known",),
    ),
    Mutant(
        "rank 0 may end before the others",
        _WATCH,
        "                    self._tell_all(_BYE)\n",
        "                    pass\n",
        (f"{_TEST}::test_ranks_that_are_done_are_no_failure",),
    ),
    Mutant(
        "a child of a rank hangs up",
        _WATCH,
        "        line.socket.close()\n\n\nos.register",
        "        pass\n\n\nos.register",
        (f"{_TEST}::test_a_child_does_not_hide_that_its_parent_was_killed",),
    ),
    Mutant(
        "a rank that waits for ever ends",
        _WATCH,
        "            os._exit(1)\n",
        "            pass\n",
        (f"{_TEST}::test_a_rank_that_waits_for_ever_ends_and_says_why",),
    ),
    Mutant(
        "a stranger says nothing to the ranks",
        _WATCH,
        'if not secrets.compare_digest(str(message.get("token")), self.token):',
        "if False:",
        (f"{_TEST}::test_strangers_are_sent_away",),
    ),
    Mutant(
        "folders of users stay that are called as unfinished ones are",
        _FOLDERS,
        "left.is_dir() and all(_IS_OURS(each.name) for each in left.iterdir())",
        "left.is_dir()",
        (f"{_T_FOLDERS}::test_what_killed_runs_have_left_is_removed_and_nothing_else",),
    ),
    Mutant(
        "what another run is writing stays",
        _FOLDERS,
        "with contextlib.suppress(OSError), _locked(left):",
        "with contextlib.suppress(OSError):",
        (f"{_T_FOLDERS}::test_what_killed_runs_have_left_is_removed_and_nothing_else",),
    ),
    Mutant(
        "an error that one process has in a save is ours on all",
        _FOLDERS,
        "except (Exception, CheckpointException) as error:",
        "except Exception as error:",
        (f"{_T_FOLDERS}::test_an_error_of_one_process_is_raised_by_all",),
    ),
    Mutant(
        "nobody finds a part of a checkpoint that is being removed",
        _FOLDERS,
        "    os.rename(path, partial)\n    _remove(partial)\n",
        "    _remove(path)\n",
        (f"{_T_FOLDERS}::test_a_checkpoint_is_removed_at_once",),
    ),
)
