"""Mistakes spread over the folders and the kernels: each is one that a change of the code could bring in."""

from tests.mutants.mutant import Mutant

_CHECKPOINT = "lightning_cxl/run/checkpoint.py"
_STEP = "lightning_cxl/planning/step.py"
_ROOM = "lightning_cxl/planning/policies.py"
_HEADER = "lightning_cxl/weights/header.py"
_LIMITS = "lightning_cxl/machine/nodes.py"
_SETTLE = "lightning_cxl/planning/settle_state.py"
T_SETTLE = ("tests/unit/planning/test_settle_state.py",)
T_CHECKPOINT = "tests/integration/test_checkpoint.py"
T_STEP = ("tests/unit/planning/jobs/test_step.py",)
T_LIMITS = ("tests/unit/machine/test_limits.py",)
T_SSD = ("tests/unit/lab/test_ssd.py",)
_POLICIES = "tests/unit/planning/policies/test_properties.py"

MUTANTS = (
    # -- kernels
    Mutant(
        "a rounded sum of gradients that is not a number stays so",
        "cython_ext/include/grads_body.h",
        "from == CXL_BF16 ? random : random & (grads_bits)(sums == sums);",
        "random;",
        ("tests/numerics/test_grad_kernels.py",),
    ),
    Mutant(
        "the last elements' remainders are written back",
        "cython_ext/include/adam_tail.h",
        "        memcpy(s->rest, whole->rest, n * 2);\n",
        "        ;\n",
        ("tests/numerics/test_adam_kernel.py::test_equals_the_definition_at_every_size",),
    ),
    Mutant(
        "the definition rounds split masters away from zero",
        "lightning_cxl/optim/number_formats.py",
        "bits + 0x8000 >> 16",
        "bits + 0x7FFF >> 16",
        ("tests/numerics/test_formats.py",),
    ),
    Mutant(
        "a forked child has no threads of kernels",
        "cython_ext/include/threads.h",
        "    cxl_idle = NULL;\n",
        "",
        ("tests/unit/optim/test_kernel_threads.py",),
    ),
    Mutant(
        "a thread that has slept takes over the floating-point mode of its caller",
        "cython_ext/include/threads.h",
        "        _mm_setcsr(call->mode);\n",
        "",
        ("tests/numerics/test_adam_threads.py",),
    ),
    Mutant(
        "a thread that has slept takes over the CPUs of its caller",
        "cython_ext/include/threads.h",
        "sched_setaffinity(0, sizeof worker->cpus, &worker->cpus) == 0)",
        "0)",
        ("tests/numerics/test_adam_threads.py",),
    ),
    # -- machine, placement, memory
    Mutant(
        "the lower of two limits counts", _LIMITS, "min(found), max(0", "max(found), max(0", ("tests/unit/machine",)
    ),
    Mutant("file cache is not in use", _LIMITS, "max(0, used - droppable)", "used", T_LIMITS),
    Mutant(
        "the last rule that matches counts",
        "lightning_cxl/placement/rules.py",
        "in reversed(list(rules.items())):",
        "in rules.items():",
        ("tests/unit/placement/test_rules.py",),
    ),
    Mutant(
        "a full budget makes a pool give free slabs back",
        "lightning_cxl/memory/pool.py",
        "            self._release_free()\n            if self._held",
        "            if self._held",
        ("tests/unit/memory/test_pool.py",),
    ),
    Mutant(
        "stripes go to whom they are due",
        "lightning_cxl/memory/striped.py",
        "                credit[child] -= size\n",
        "",
        ("tests/unit/memory/test_striped.py",),
    ),
    Mutant(
        "an arena that shrinks gives its bytes back to the budget",
        "lightning_cxl/memory/arena.py",
        "        self._source.release(gone)\n",
        "",
        ("tests/unit/memory/test_arena.py",),
    ),
    Mutant(
        "a forked child does not unregister its parent's memory",
        "lightning_cxl/memory/pinned.py",
        "if os.getpid() == self._pid:",
        "if True:",
        ("tests/unit/memory/test_pinned.py",),
    ),
    # -- planning
    Mutant(
        "every device copies",
        _STEP,
        "together = nbytes * self._device.count\n        if",
        "together = nbytes\n        if",
        ("tests/unit/planning/jobs",),
    ),
    Mutant(
        "steps are added up in one order",
        _STEP,
        "in job.in_one_order():",
        "in job.classes:",
        T_STEP,
    ),
    Mutant(
        "machines exchange over the network, too",
        "lightning_cxl/planning/job.py",
        "nbytes if crosses else 0.0",
        "0.0",
        ("tests/unit/planning/jobs/test_exchange.py",),
    ),
    Mutant(
        "padding is gathered, too",
        "lightning_cxl/inventory/workload.py",
        "math.ceil(length / self.num_shards) * parameter.numel() // length",
        "parameter.numel() // self.num_shards",
        ("tests/unit/inventory/test_mesh.py", "tests/unit/planning/jobs/test_collectives_of_fsdp.py"),
    ),
    Mutant(
        "the root is gathered once",
        "lightning_cxl/planning/job.py",
        "for group in found if not group.is_root)",
        "for group in found)",
        ("tests/unit/planning/jobs/test_collectives_of_fsdp.py",),
    ),
    Mutant(
        "gradients of two roles are copied once each",
        "lightning_cxl/planning/job.py",
        "engine_moves(role, of_role[role], _of_role(role, traffic, inventory))",
        "engine_moves(role, of_role[role], traffic)",
        ("tests/unit/planning/jobs/test_model_job.py::test_every_gradient_is_copied_once",),
    ),
    Mutant(
        "copies of several devices share a tier",
        "lightning_cxl/planning/step.py",
        "(tier, num_devices * num_bytes * share)",
        "(tier, num_bytes * share)",
        ("tests/unit/planning/jobs/test_perf.py",),
    ),
    Mutant(
        "parts of a split are whole bytes, and no byte is lost",
        _ROOM,
        "    for tier in in_turn[: nbytes - sum(parts.values())]:\n        parts[tier] += 1\n",
        "",
        ("tests/unit/planning/policies/test_room.py",),
    ),
    Mutant(
        "full tiers are not rounded up",
        _ROOM,
        "parts[tier] >= left[tier])",
        "False)",
        ("tests/unit/planning/policies/test_room.py",),
    ),
    Mutant(
        "no byte too much is placed",
        _ROOM,
        "if part > self._left[tier]]",
        "if part > self._left[tier] + 1]",
        (f"{_POLICIES}::test_what_rules_fix_is_not_rounded",),
    ),
    Mutant(
        "what is taken is taken from all memory, too",
        _ROOM,
        "        self.together -= nbytes\n",
        "",
        (f"{_POLICIES}::test_memory_that_tiers_share_is_handed_out_once",),
    ),
    Mutant(
        "DRAM that is left is shared like the cards",
        "lightning_cxl/planning/policies.py",
        "taken = min(local, each.nbytes // (1 + sum(tier.num_nodes for tier in cards)))",
        "taken = local",
        ("tests/unit/planning/policies/test_latency_first.py",),
    ),
    Mutant(
        "bytes of two classes change places",
        "lightning_cxl/planning/policies.py",
        "                yield from _changed(x, {i: moved / size, j: -moved / other})\n",
        "                pass\n",
        ("tests/unit/planning/policies/test_bandwidth.py",),
    ),
    Mutant(
        "what the first roles take, the next ones have not",
        "lightning_cxl/planning/decide.py",
        "            left[tier] -= size\n",
        "            pass\n",
        ("tests/unit/run/test_report.py",),
    ),
    # -- checkpoints, weights
    Mutant(
        "state finds its parameter by name",
        _CHECKPOINT,
        '"params": [index_of[name] for name in names]',
        '"params": group["params"]',
        (f"{T_CHECKPOINT}::test_optimizer_state_finds_its_parameter_by_name",),
    ),
    Mutant(
        "a checkpoint that could not be written leaves nothing",
        "lightning_cxl/run/checkpoint_file.py",
        "            partial.unlink(missing_ok=True)\n",
        "            pass\n",
        (f"{T_CHECKPOINT}::test_a_full_disk_leaves_no_partial_file",),
    ),
    Mutant(
        "tensors of a file lie one behind the other",
        _HEADER,
        "        if entry.begin != end:\n",
        "        if False:\n",
        ("tests/unit/weights/test_header.py",),
    ),
    Mutant(
        "a cut-off file is refused",
        _HEADER,
        "    if end != data_bytes:\n",
        "    if end < data_bytes:\n",
        ("tests/unit/weights/test_header.py",),
    ),
    # -- state on SSD, as it is planned
    Mutant(
        "state that someone asks another tier for stays there",
        _SETTLE,
        "lambda each: each.tier is None)",
        "lambda each: each.tier != SSD)",
        T_SETTLE,
    ),
    Mutant(
        "each of the slots holds the largest record",
        _SETTLE,
        "slots = slot_bytes([*there, *chosen], ssd.num_drives, num_devices)",
        "slots = slot_bytes(there, ssd.num_drives, num_devices)",
        T_SETTLE,
    ),
    Mutant(
        "units that go to drives are spread",
        _SETTLE,
        "[(2 * index + 1) * of // (2 * count) for index in range(count)]",
        "list(range(count))",
        T_SETTLE,
    ),
    Mutant(
        "no more goes to drives than they hold",
        _SETTLE,
        "if sum(map(ssd.bytes_of, chosen)) > room:",
        "if False:",
        T_SETTLE,
    ),
    Mutant(
        "a version that a checkpoint refers to takes room, too",
        "lightning_cxl/planning/settle_state.py",
        "return versions * record",
        "return record",
        T_SETTLE,
    ),
    Mutant(
        "copies of weights do not lie on drives",
        "lightning_cxl/inventory/asked.py",
        "if tier == SSD and not may_leave:",
        "if False:",
        T_SETTLE,
    ),
    Mutant(
        "what lies on drives takes no memory of a run",
        "lightning_cxl/planning/decide.py",
        "    requests = [each for each in requests if SSD not in each[2].tiers]\n",
        "",
        ("tests/integration/test_planned_ssd.py",),
    ),
    Mutant(
        "a policy puts nothing on drives",
        "lightning_cxl/placement/placer.py",
        "            if self._is_ssd(name):\n",
        "            if self.topology.tier(name) is None:\n",
        ("tests/unit/placement/test_placer.py",),
    ),
    Mutant(
        "the slower of two drives decides",
        "lightning_cxl/machine/speeds.py",
        "len(folders) * min(reads)",
        "sum(reads)",
        ("tests/unit/machine/test_speeds.py",),
    ),
    Mutant(
        "a phase takes no less than its writes to drives",
        _STEP,
        "return max(self._seconds_in_memory(load), *self._ssd_seconds(load))",
        "return self._seconds_in_memory(load)",
        T_STEP,
    ),
    # -- the ends: the main job, commands
    Mutant(
        "much slower contenders have three turns",
        "lightning_cxl/commands/measuring.py",
        "return index % max(1, -(-rounds // _SLOW_ROUNDS)) == 0",
        "return True",
        ("tests/unit/commands/test_timing.py",),
    ),
    Mutant(
        "an ended child is no other process",
        "lightning_cxl/commands/measuring.py",
        " + children.children_user + children.children_system",
        "",
        ("tests/unit/commands/test_timing.py",),
    ),
    Mutant(
        "a measured write counts when it is on the disk",
        "examples/bench/ssd_bench/contenders.py",
        "        os.fsync(job.area.fd)\n",
        "        pass\n",
        T_SSD,
    ),
    Mutant(
        "fio's time is for all bytes, also where it did fewer",
        "examples/bench/ssd_bench/fio.py",
        ' * nbytes / job[direction]["io_bytes"]',
        "",
        T_SSD,
    ),
    Mutant(
        "the measured file has no name",
        "examples/bench/ssd_bench/disk_area.py",
        "            os.unlink(name)\n",
        "",
        T_SSD,
    ),
    Mutant(
        "a tied weight is in a pool once",
        "examples/bench/pools.py",
        "for parameter in model.parameters() if",
        "for _, parameter in model.named_parameters(remove_duplicate=False) if",
        ("tests/unit/lab/test_pools.py",),
    ),
    Mutant(
        "a loader's order depends on its seed",
        "lightning_cxl/finetune/loader.py",
        '            "seed": self.seed,\n',
        "",
        ("tests/unit/finetune/test_loader.py",),
    ),
    Mutant(
        "a path with a scheme is remote",
        "lightning_cxl/integrations/lightning/checkpoint_io.py",
        'return "://" in str(path)',
        "return False",
        ("tests/integration/test_checkpoint_habits.py::test_a_checkpoint_in_memory_is_read_back",),
    ),
)
