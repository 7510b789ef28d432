"""Protections of runs with several processes."""

from tests.mutants.mutant import Mutant

_WATCH = "lightning_cxl/sharding/watch.py"
_PROGRAM = "lightning_cxl/sharding/program.py"
_OF_ACCELERATE = "lightning_cxl/integrations/accelerate/processes.py"
_LOADING = "tests/distributed/test_loading.py"
_OWN_LOOPS = "tests/integration/test_own_loops.py"
_HOOKS = "tests/distributed/test_accelerate_hooks.py"
_FAILURES = "lightning_cxl/sharding/failures.py"
_AGREEMENT = "tests/distributed/test_agreement.py"
_PARITY = "tests/distributed/test_parity.py"
_FOLDERS = "lightning_cxl/run/checkpoint_folder.py"
_T_FOLDER = "tests/unit/run/test_checkpoint_folder.py"
_T_FOLDERS = "tests/distributed/test_folders.py"
_TEST = "tests/unit/sharding/test_watch.py"

MUTANTS = (
    Mutant(
        "collectives that a user has replaced stay",
        "lightning_cxl/sharding/exchange_memory.py",
        " if unit.exchanges_by_default]",
        "]",
        ("tests/distributed/test_exchange_memory.py",),
    ),
    Mutant(
        "an error in a collective waits for what explains it",
        _WATCH,
        "            self._decides_at = time.monotonic() + _SETTLE\n",
        "            self._decide()\n",
        (f"{_TEST}::test_a_rank_that_dies_explains_errors_that_came_before",),
    ),
    Mutant(
        "a rank that is gone needs no explanation",
        _WATCH,
        "        elif failure.cause is Cause.GONE:\n",
        "        elif False:\n",
        (f"{_TEST}::test_a_rank_that_dies_is_known_at_once",),
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
        "all ranks leave a step out together",
        "lightning_cxl/gradients/overflow.py",
        "first = first_over_processes(with_grad, here)",
        "first = here",
        (f"{_AGREEMENT}::test_a_bad_gradient_of_one_rank_lets_all_leave_the_step_out",),
    ),
    Mutant(
        "the norm of gradients is that of all ranks",
        "lightning_cxl/optim/clipping.py",
        "return sums_over_processes(gradients(parameters), self.meter.sums_of(parameters))",
        "return self.meter.sums_of(parameters)",
        (f"{_AGREEMENT}::test_cpu_adam_alone_updates_parameters_of_fsdp",),
    ),
    Mutant(
        "FSDP2 does not add to gradients in 16 bits",
        "lightning_cxl/gradients/aside.py",
        "        for pair in pairs:\n            self.take(pair)\n",
        "        pass\n",
        (f"{_AGREEMENT}::test_bfloat16_gradients_are_added_up_in_float32",),
    ),
    Mutant(
        "copies of a shard begin equal",
        "lightning_cxl/sharding/fsdp.py",
        "        _agree_on_values(model, mesh)\n",
        "",
        (f"{_AGREEMENT}::test_copies_of_a_shard_begin_equal_whatever_the_seeds",),
    ),
    Mutant(
        "skipped reductions are not made",
        "lightning_cxl/sharding/fsdp.py",
        "        module.set_requires_gradient_sync(False, recurse=False)\n",
        "        pass\n",
        ("tests/distributed/test_fabric.py::test_skipped_reductions_are_not_made",),
    ),
    Mutant(
        "a region without reductions goes on when one in it ends",
        "lightning_cxl/sharding/fsdp.py",
        "            if not _num_regions[module]:\n",
        "            if True:\n",
        ("tests/distributed/test_fabric.py::test_skipped_reductions_are_not_made",),
    ),
    Mutant(
        "tied weights are gathered where both uses are",
        "lightning_cxl/sharding/fsdp.py",
        "module.named_parameters(remove_duplicate=False))",
        "module.named_parameters())",
        (f"{_PARITY}::test_as_fsdp_alone_and_as_one_process",),
    ),
    Mutant(
        "8-bit state of other shards is decoded with their scales",
        "lightning_cxl/optim/resharded.py",
        "(torch.arange(low, high) - begin) // BLOCK_SIZE",
        "torch.arange(high - low) // BLOCK_SIZE",
        ("tests/unit/optim/test_resharded.py",),
    ),
    Mutant(
        "whatever one rank raises is known to all",
        "lightning_cxl/sharding/agreement.py",
        "    except BaseException as raised:\n",
        "    except LightningCXLError as raised:\n",
        (f"{_AGREEMENT}::test_whatever_one_rank_raises_is_known_to_all",),
    ),
    Mutant(
        "an error that one process has in a save is ours on all",
        "lightning_cxl/run/sharded_checkpoint.py",
        "except (Exception, CheckpointException) as error:",
        "except Exception as error:",
        (f"{_T_FOLDERS}::test_an_error_of_one_process_is_raised_by_all",),
    ),
    Mutant(
        "the list of a folder runs no code",
        "lightning_cxl/run/folder_pickles.py",
        "if (module, name) in _KNOWN or (",
        "if True or (",
        ("tests/unit/run/test_folder_pickles.py",),
    ),
    Mutant(
        "a value in a folder runs no code",
        "lightning_cxl/run/folder_pickles.py",
        "    torch.load(value, weights_only=True)",
        "    pass",
        ("tests/unit/run/test_folder_pickles.py",),
    ),
    Mutant(
        "a plug-in for files that is not asked is named",
        "lightning_cxl/integrations/lightning/sharded.py",
        "            self._warn_of_unused_io()\n",
        "",
        ("tests/distributed/test_lightning.py::test_a_plug_in_that_is_not_asked_is_named",),
    ),
    Mutant(
        "a checkpoint has its name when it is complete",
        _FOLDERS,
        """target.with_name(f".{target.name[:_MOST_CHARS]}.{secrets.token_hex(4)}.partial")""",
        "target",
        ("tests/unit/run/test_sharded_checkpoint.py",),
    ),
    Mutant(
        "folders of users stay that are called as unfinished ones are",
        _FOLDERS,
        """            if all(_IS_OURS(name) for name in os.listdir(left)):
                shutil.rmtree(left)
""",
        "            shutil.rmtree(left)\n",
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
        "a new folder that another save has locked is given up",
        _FOLDERS,
        "except (BlockingIOError, FileNotFoundError):",
        "except FileNotFoundError:",
        (f"{_T_FOLDER}::test_who_loses_its_new_folder_takes_another_one",),
    ),
    Mutant(
        "a new folder that another save has removed is given up",
        _FOLDERS,
        "        if not os.path.samestat(os.fstat(fd), os.stat(folder)):\n",
        "        if False:\n",
        (f"{_T_FOLDER}::test_who_loses_its_new_folder_takes_another_one",),
    ),
    Mutant(
        "a crash while names change leaves a checkpoint that is found",
        _FOLDERS,
        "return before if not os.path.lexists(path) and os.path.lexists(before) else path",
        "return path",
        (f"{_T_FOLDER}::test_a_kill_at_any_step_leaves_a_checkpoint_that_is_found",),
    ),
    Mutant(
        "nobody finds a part of a checkpoint that is being removed",
        _FOLDERS,
        "        _remove(path.rename(gone))\n",
        "        _remove(path)\n",
        (f"{_T_FOLDERS}::test_a_checkpoint_is_removed_at_once",),
    ),
    Mutant(
        "a forked process that ends has not failed",
        _PROGRAM,
        "        Finalize(None, program.end, exitpriority=0)",
        "        __import__('atexit').register(program.end)",
        (f"{_OWN_LOOPS}::test_a_forked_process_that_ends_first_has_not_failed",),
    ),
    Mutant(
        "a rank that exits with a status has failed",
        _PROGRAM,
        "error = self._exit[0]",
        "pass",
        ("tests/unit/sharding/test_program.py",),
    ),
    Mutant(
        "an exit that is caught is no failure",
        _PROGRAM,
        '.startswith("RETURN")',
        '.startswith("none")',
        ("tests/unit/sharding/test_program.py",),
    ),
    Mutant(
        "torchrun has the traceback of an error in a user's loop",
        _PROGRAM,
        "                _record(error.with_traceback(trace))",
        "                get_error_handler().record_exception(error)",
        (f"{_OWN_LOOPS}::test_a_rank_that_raises_is_shown",),
    ),
    Mutant(
        "no process has the whole of a model from files",
        "lightning_cxl/weights/load.py",
        "left = mapped is None and weight.is_parameter and are_left_in_files()",
        "left = False",
        (f"{_LOADING}::test_what_is_converted_waits_in_the_files",),
    ),
    Mutant(
        "an unread weight is not written",
        "lightning_cxl/weights/unread.py",
        "        if any(isinstance(leaf, UnreadWeight) for",
        "        if False and any(isinstance(leaf, UnreadWeight) for",
        (f"{_LOADING}::test_an_unread_weight_is_not_written",),
    ),
    Mutant(
        "an unread weight has the values that it was given",
        "lightning_cxl/weights/unread.py",
        "        self._read = read\n",
        "        pass\n",
        (f"{_LOADING}::test_a_model_can_be_used_before_it_is_cut",),
    ),
    Mutant(
        "processes of one machine are counted where no launcher does",
        _OF_ACCELERATE,
        "machines.num_ranks_beside(rank)",
        "1",
        (f"{_HOOKS}::test_processes_of_one_machine_share_its_budget",),
    ),
    Mutant(
        "hooks on saving get all models",
        _OF_ACCELERATE,
        "self._stand_ins is not None and not unwrap",
        "False",
        (f"{_HOOKS}::test_hooks_get_all_models",),
    ),
    Mutant(
        "files of one process take the place of the folder of several",
        "lightning_cxl/run/checkpoint_file.py",
        "    if (target / META).is_file():\n",
        "    if False:\n",
        ("tests/distributed/test_lightning.py::test_one_process_saves_where_several_have_saved",),
    ),
    Mutant(
        "folders of several processes are gone where one saves a state",
        "lightning_cxl/integrations/accelerate/processes.py",
        "                remove(older)\n",
        "                pass\n",
        ("tests/distributed/test_accelerate.py::test_a_state_is_what_was_saved_last_whatever_lay_in_its_folder",),
    ),
    Mutant(
        "the optimizer's folder is gone where one process of a Trainer saves",
        "lightning_cxl/integrations/transformers/processes.py",
        "                remove(_folder(output_dir))  # of",
        "                pass  # of",
        ("tests/distributed/test_trainer.py::test_one_process_writes_where_several_have_written",),
    ),
    Mutant(
        "whatever is trained beside adapters is saved with them",
        "lightning_cxl/integrations/transformers/processes.py",
        " if p.requires_grad or id(p) in kept}",
        " if id(p) in kept}",
        ("tests/distributed/test_trainer.py::test_another_number_of_processes_goes_on",),
    ),
    Mutant(
        "a process on a machine of its own answers the others",
        "lightning_cxl/machine/ranks/binding.py",
        "    if gather is None and num_local_ranks == 1:\n",
        "    if num_local_ranks == 1:\n",
        ("tests/unit/machine/ranks/test_rank_binding.py",),
    ),
    Mutant(
        "a hook that fails on one process is an error of all",
        "lightning_cxl/integrations/accelerate/processes.py",
        "            results = on_all_ranks(lambda: (save(output_dir, *args, **kwargs), own))\n",
        "            it = (save(output_dir, *args, **kwargs), own)\n            results = on_all_ranks(lambda: it)\n",
        ("tests/distributed/test_accelerate_hooks.py",),
    ),
    Mutant(
        "pages of exchanges belong to this process",
        "lightning_cxl/sharding/exchange_memory.py",
        ", flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        ")",
        ("tests/distributed/test_exchange_memory.py",),
    ),
    Mutant(
        "models of transformers know that ranks generate together",
        "lightning_cxl/integrations/accelerate/processes.py",
        "                module._is_fsdp_managed_module = True",
        "                module._is_fsdp_managed_module = False",
        ("tests/distributed/test_accelerate_hooks.py",),
    ),
    Mutant(
        "a conversion that changes nothing leaves a weight in its file",
        "lightning_cxl/weights/unread.py",
        "        read = values._read if isinstance(values, UnreadWeight) else lambda: values\n",
        "        read = lambda: values\n",
        ("tests/distributed/test_loading.py",),
    ),
)
