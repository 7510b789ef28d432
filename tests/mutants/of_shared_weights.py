"""Protections of weights that the ranks of a machine share."""

from tests.mutants.mutant import Mutant

_SHARED = "lightning_cxl/memory/shared.py"
_NUMA = "cython_ext/_numa.pyx"
_TURNS = "lightning_cxl/sharding/turns.py"
_GATHER = "lightning_cxl/sharding/shared_gather.py"
_WEIGHTS = "lightning_cxl/sharding/shared_memory.py"
_AGREEMENT = "lightning_cxl/sharding/agreement.py"
T_TURNS = ("tests/unit/sharding/test_turns.py",)
T_LATE = ("tests/integration/test_shared_host_turns.py",)
T_WRITES = ("tests/distributed/test_shared_weights.py::test_what_users_write_on_late_ranks",)
T_CHILDREN = ("tests/distributed/test_shared_weights.py::test_forked_children_change_nothing",)
T_UNDONE = ("tests/distributed/test_shared_weights.py::test_an_error_after_sharing_leaves_nothing_of_it",)
T_SEGMENTS = ("tests/unit/memory/test_shared.py",)
T_ERRORS = ("tests/integration/test_shared_host_errors.py",)
T_ANEW = ("tests/integration/test_shared_host.py::test_what_a_forward_shards_anew_over_fewer_ranks_is_gathered",)

T_FULL = ("tests/distributed/test_shared_weights.py::test_where_one_rank_has_no_room_the_weights_of_all_stay_unshared",)

MUTANTS = (
    # -- turns
    Mutant(
        "a gather reads when all ranks have come to it",
        _GATHER,
        "            self._turns.come(self._unit)\n",
        "            self._turns._own.come[self._unit] += 1\n",
        T_LATE,
    ),
    Mutant(
        "a rank leaves a gather when all ranks have read",
        _TURNS,
        '            self._wait(peer, peer.counters.left, unit, "finish reading")\n\n    def close',
        "            pass\n\n    def close",
        (*T_TURNS, *T_LATE),
    ),
    Mutant(
        "a rank has come before it waits for the others",
        _TURNS,
        "        self._own.come[unit] += 1\n        for peer in self._peers:\n",
        "        self._own.come[unit] += 1\n        for peer in ():\n",
        T_TURNS,
    ),
    Mutant(
        "the host does not write what a device of another rank still reads",
        "lightning_cxl/sharding/host_shard.py",
        "            self.wait_for_others()\n",
        "            pass\n",
        T_WRITES,
    ),
    Mutant(
        "who fails in a gather lets the others go on",
        _TURNS,
        "            self._own.left[unit] = self._own.come[unit]\n            return\n        number",
        "            return\n        number",
        T_TURNS,
    ),
    Mutant(
        "a process that has ended is noticed at once",
        _TURNS,
        "            if peer.has_ended and counters[unit] < goal:\n",
        "            if False:\n",
        T_TURNS,
    ),
    Mutant(
        "a rank that does not come is given up",
        _TURNS,
        "            if now - begin > self._timeout_s:\n",
        "            if False:\n",
        T_TURNS,
    ),
    Mutant(
        "CPUs that may show a counter before what it counts do not share",
        "lightning_cxl/sharding/same_machine.py",
        "    if platform.machine() not in _ORDERED_STORES:\n",
        "    if False:\n",
        ("tests/unit/sharding/test_same_machine.py",),
    ),
    Mutant(
        "a forked child gathers nothing",
        _GATHER,
        "        if self._turns.is_inherited:\n",
        "        if False:\n",
        T_CHILDREN,
    ),
    # -- segments
    Mutant(
        "a forked child cannot write weights of its parent",
        "lightning_cxl/memory/split_stacks.py",
        "            return _FilePages(self._sources[False], fd)\n",
        '            return _FilePages(self._sources[kind == "inherited"], fd)\n',
        ("tests/unit/memory/test_stacks.py::test_forked_children_see_weights_and_nothing_else", *T_CHILDREN),
    ),
    Mutant(
        "pages that page-locking has moved are noticed",
        "lightning_cxl/sharding/segments.py",
        "                segment.check_nodes(where)\n",
        "                pass\n",
        T_ERRORS,
    ),
    Mutant(
        "a segment is known by its mark",
        _SHARED,
        "        if bytes(Range(self.address, _MARK_BYTES, self._mapping)) != name.mark:\n",
        "        if False:\n",
        T_SEGMENTS,
    ),
    Mutant(
        "a segment keeps its size under those who map it",
        _SHARED,
        "fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
        "fcntl.F_SEAL_GROW",
        T_SEGMENTS,
    ),
    Mutant(
        "pages of a shared mapping go back to the kernel",
        _NUMA,
        "advice = MADV_REMOVE if self._shared else MADV_DONTNEED",
        "advice = MADV_DONTNEED",
        T_SEGMENTS,
    ),
    Mutant(
        "what was handed out of a segment does not overlap",
        _SHARED,
        "        self._used = begin + nbytes\n",
        "",
        T_SEGMENTS,
    ),
    # -- weights
    Mutant(
        "segments are not page-locked any more after an error",
        _WEIGHTS,
        "        undo.callback(segments.close)\n",
        "",
        T_ERRORS,
    ),
    Mutant(
        "FSDP2 gathers by itself after an error in a run",
        "lightning_cxl/run/residence.py",
        "            undo.callback(self._sharing.close)\n",
        "",
        T_UNDONE,
    ),
    Mutant(
        "a shard that was replaced is noticed",
        _GATHER,
        "            if not shard.is_in_place():\n",
        "            if False:\n",
        T_ERRORS,
    ),
    Mutant(
        "what was sharded anew after a forward is gathered by FSDP2",
        _GATHER,
        "        if group is not self._group:\n",
        "        if False:\n",
        T_ANEW,
    ),
    Mutant(
        "an error of one rank is an error of all",
        _AGREEMENT,
        "        if answer.text is not None:\n",
        "        if answer.text is not None and error is not None:\n",
        T_ERRORS,
    ),
    Mutant(
        "ranks on several machines do not share",
        _WEIGHTS,
        "    if reason is not None:\n",
        "    if False:\n",
        T_ERRORS,
    ),
    Mutant(
        "no shard moves before all ranks have room for theirs",
        _WEIGHTS,
        "        return segments\n\n    def fill",
        "        self.fill()\n        return segments\n\n    def fill",
        T_FULL,
    ),
)
