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
T_SEGMENTS = ("tests/unit/memory/test_shared.py",)
T_ERRORS = ("tests/integration/test_shared_host_errors.py",)
T_ANEW = ("tests/integration/test_shared_host.py::test_what_a_forward_shards_anew_over_fewer_ranks_is_gathered",)

MUTANTS = (
    # -- turns
    Mutant(
        "a gather waits until all ranks have written",
        _GATHER,
        "        self._turns.wait_written(self._unit)\n",
        "",
        T_LATE,
    ),
    Mutant(
        "a rank that updates waits until all ranks have read",
        _TURNS,
        '                    self._wait(peer, peer.counters.arrived, unit, "stop reading")\n',
        "                    pass\n",
        T_TURNS,
    ),
    Mutant(
        "a rank has written when its update is over, not when it begins",
        _TURNS,
        "            own.arrived[unit] += 1\n",
        "            own.arrived[unit] += 1\n            own.written[unit] += 1\n",
        T_TURNS,
    ),
    Mutant(
        "reads of the device are over before others write",
        _TURNS,
        "        self._finish_reads()\n        for unit in numbers:\n",
        "        for unit in numbers:\n",
        T_TURNS,
    ),
    Mutant(
        "who fails in an update lets the others go on",
        _TURNS,
        "            yield\n        finally:\n            for unit in numbers:\n",
        "            yield\n        finally:\n            for unit in ():\n",
        T_TURNS,
    ),
    Mutant(
        "nobody reads what it is writing itself",
        _TURNS,
        '        self._check_not_writing(unit, "read")\n',
        "",
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
        "reads of the device are over before memory is let go of",
        _TURNS,
        '        """Wait until nothing is read any more, and let go of the other processes. Idempotent."""\n'
        "        self._finish_reads()\n",
        "",
        T_ERRORS,
    ),
    # -- segments
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
)
