"""Protections of processes that share a machine: their CPUs, near memory, and share of budgets."""

from tests.mutants.mutant import Mutant

_RANKS = "lightning_cxl/machine/binding.py"
_PLACES = _RANKS
_BINDING = _RANKS
_BUDGETS = _RANKS
_VIEW = _RANKS
_STRIPED = "lightning_cxl/memory/striped.py"
_TESTS = "tests/unit/machine/ranks"
T_PLACES = (f"{_TESTS}/test_rank_places.py",)
T_BINDING = (f"{_TESTS}/test_rank_binding.py",)
T_VIEW = (f"{_TESTS}/test_rank_view.py",)

MUTANTS = (
    Mutant(
        "CPUs that a launcher has chosen stay",
        _PLACES,
        "    if _was_bound(usable, host):\n",
        "    if False:\n",
        T_PLACES,
    ),
    Mutant(
        "other CPUs for each process are a launcher's choice",
        _PLACES,
        "len(set(usable)) > 1 or ",
        "",
        T_PLACES,
    ),
    Mutant(
        "a CPU that is forbidden is not given",
        _PLACES,
        "    cores = host.cores_of(domain, usable)\n",
        "    cores = host.cores_of(domain, host.all)\n",
        T_PLACES,
    ),
    Mutant(
        "hardware threads of a core stay together",
        _RANKS,
        "by_core.setdefault(self.cores[cpu], [])",
        "by_core.setdefault(cpu, [])",
        T_PLACES,
    ),
    Mutant(
        "one process is not bound unasked",
        _PLACES,
        "(len(facts) == 1 or len(",
        "(len(",
        T_PLACES,
    ),
    Mutant(
        "a node of -1 is no node",
        _BINDING,
        " if text and int(text) >= 0 else None",
        " if text else None",
        T_BINDING,
    ),
    Mutant(
        "torchrun's one thread does not count",
        _BINDING,
        ' and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ)',
        "",
        T_BINDING,
    ),
    Mutant(
        "a quota of CPUs is divided by the processes",
        _BINDING,
        "allowed // num_local_ranks",
        "allowed",
        T_BINDING,
    ),
    Mutant(
        "threads on other CPUs on purpose stay there",
        _BINDING,
        "            if os.sched_getaffinity(int(thread)) == before:\n",
        "            if True:\n",
        (f"{_TESTS}/test_move_threads.py",),
    ),
    Mutant(
        "a budget is the machine's",
        _BUDGETS,
        "int(limit * part)",
        "limit",
        T_VIEW,
    ),
    Mutant(
        "a card at one socket is for all",
        _BUDGETS,
        "    if min(rooms) < _FAIR * even or not even:\n",
        "    if not even:\n",
        T_VIEW,
    ),
    Mutant(
        "what a control group allows is divided once",
        _BUDGETS,
        "int(free[tier.name] * fraction)",
        "free[tier.name]",
        T_VIEW,
    ),
    Mutant(
        "speeds are looked up by the CPUs they were measured with",
        _VIEW,
        ", measured_on=frozenset(cpus)",
        "",
        T_VIEW,
    ),
    Mutant(
        "the nearest nodes are filled first",
        _STRIPED,
        "self._turns[child] == turn]",
        "turn == turn]",
        ("tests/unit/memory/test_striped.py",),
    ),
)
