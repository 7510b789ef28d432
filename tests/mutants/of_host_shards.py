"""Protections of shards on the host."""

from tests.mutants.mutant import Mutant

_SHARD = "lightning_cxl/sharding/host_shard.py"
T_RANKS = ("tests/unit/sharding/test_host_shard.py",)
T_TENSOR = ("tests/unit/sharding/test_host_shard_tensor.py",)

MUTANTS = (
    Mutant("the device waits for a shard", _SHARD, "        self._reading.wait()\n", "        pass\n", T_RANKS),
    Mutant(
        "a write to a shard waits for copies that read it",
        _SHARD,
        "            self._reading.wait_host()",
        "            pass",
        T_TENSOR,
    ),
    Mutant(
        "all processes give as many rows to a gather",
        _SHARD,
        "            shape[0] = -(-outer_size[0] // mesh.size())\n",
        "            pass\n",
        T_RANKS,
    ),
    Mutant("a shard without rows has memory", _SHARD, "        if not memory.numel():", "        if False:", T_RANKS),
    Mutant(
        "numbers for a shard are drawn on the device",
        _SHARD,
        "    if not random and all(",
        "    if all(",
        T_TENSOR,
    ),
    Mutant(
        "a copy of a shard to the CPU does not go over the device",
        _SHARD,
        "        if func is to_copy and ",
        "        if False and ",
        T_TENSOR,
    ),
    Mutant(
        "an asynchronous save has the shard's values",
        _SHARD,
        "        return self.host.data_ptr()\n",
        "        return 0\n",
        T_RANKS,
    ),
)
