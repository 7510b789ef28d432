"""Protections of runs with several processes."""

from tests.mutants.mutant import Mutant

_WATCH = "lightning_cxl/sharding/watch.py"
_FAILURES = "lightning_cxl/sharding/failures.py"
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
)
