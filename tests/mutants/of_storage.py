"""Protections of records on drives: order, checksums, generations, folders."""

from tests.mutants.mutant import Mutant

_STORE = "lightning_cxl/storage/store.py"
_ENGINE = "lightning_cxl/storage/engine.py"
_DRIVE = "lightning_cxl/storage/drive.py"
_FOLDER = "lightning_cxl/storage/folder.py"
_PLACES = "lightning_cxl/storage/places.py"
_GENERATIONS = "lightning_cxl/storage/generations.py"
_RECORD = "lightning_cxl/storage/record.py"
_NUMA = "cython_ext/_numa.pyx"
T_STORE = ("tests/unit/storage/test_store.py",)
T_ENGINE = ("tests/unit/storage/test_engine.py",)
T_NOTHING = (f"{T_ENGINE[0]}::test_a_call_that_moves_nothing_is_an_error_and_no_endless_loop",)
T_PLACES = ("tests/unit/storage/test_places.py",)
_FAULTS = "tests/unit/storage/test_faults.py"
T_FAULTS = tuple(
    f"{_FAULTS}::{name}"
    for name in (
        "test_an_error_says_path_offset_and_errno_each_time",
        "test_an_error_when_a_small_file_is_closed_says_its_path",
        "test_a_record_whose_write_failed_cannot_be_read_until_it_is_written_again",
        "test_after_a_failed_sync_what_was_written_before_is_written_again",
        "test_after_a_manifest_that_may_lie_there_or_not_both_versions_are_protected",
        "test_errors_that_nobody_was_told_are_raised_by_wait_and_close",
    )
)
T_POWER = (f"{_FAULTS}::test_after_a_power_loss_at_any_time_a_committed_generation_is_there",)
T_STATES = ("tests/unit/storage/test_store_states.py", *T_STORE)

MUTANTS = (
    # -- transfers
    Mutant("a read waits for the write before it", _STORE, "finish=check, after=before", "finish=check", T_STORE),
    Mutant("a write waits for what came before it", _STORE, "finish=end, after=after", "finish=end", T_STORE),
    Mutant(
        "bytes that are not those written are found",
        _STORE,
        "if entry is None or entry.checksum != checksum:",
        "if False:",
        T_STORE,
    ),
    Mutant(
        "a record whose last write failed is not read",
        _STORE,
        "                    if record.last_whole != write:\n",
        "                    if False:\n",
        T_FAULTS,
    ),
    Mutant(
        "a record whose last write failed is not committed",
        _STORE,
        "                if not record.is_whole:\n",
        "                if False:\n",
        T_FAULTS,
    ),
    Mutant(
        "the window shows a write", _STORE, "record.show()\n                    record.last", "record.last", T_STORE
    ),
    Mutant("chunks drop their views at their end", _ENGINE, "        chunk.views = []\n", "", T_ENGINE),
    Mutant(
        "frames of the kernel's error do not keep memory",
        _ENGINE,
        "        error.__context__ = None\n",
        "",
        T_ENGINE,
    ),
    Mutant(
        "frames of an error do not keep memory",
        _ENGINE,
        "error = _bare(caught)",
        "error = caught",
        T_ENGINE,
    ),
    Mutant(
        "a transfer that failed is kept until someone is told",
        _ENGINE,
        "            if transfer.error is None:\n                del self._open[transfer]\n",
        "            del self._open[transfer]\n",
        (*T_FAULTS, *T_ENGINE),
    ),
    Mutant(
        "pieces that are no neighbours are not merged",
        _ENGINE,
        "or last.offset + last.nbytes != offset + position",
        "or False",
        T_ENGINE,
    ),
    Mutant(
        "reads do not wait for writes of a drive",
        _ENGINE,
        "self._queues[chunk.drive, transfer._writes]",
        "self._queues[chunk.drive, False]",
        (f"{T_ENGINE[0]}::test_a_read_does_not_wait_for_writes_of_the_same_drive",),
    ),
    Mutant("one call takes at most 1024 parts", _ENGINE, "or len(last.views) == _MAX_VIEWS", "or False", T_ENGINE),
    Mutant(
        "a short transfer goes on where it stopped",
        _DRIVE,
        "            left = _after(left, moved)\n",
        "            left = ()\n",
        T_ENGINE,
    ),
    Mutant("a transfer that moves nothing is an error", _DRIVE, "if moved <= 0:", "if moved < 0:", T_NOTHING),
    # -- generations
    Mutant(
        "a committed version is not written",
        _GENERATIONS,
        "            if version not in committed:\n",
        "            if True:\n",
        T_STATES,
    ),
    Mutant(
        "a generation whose manifest may lie there is protected",
        _GENERATIONS,
        "            self._unsure.append(new)\n",
        "            pass\n",
        T_FAULTS,
    ),
    Mutant(
        "the generation before stays until it is settled",
        _GENERATIONS,
        "self._replace([*self.kept, new]",
        "self._replace([new]",
        T_STATES,
    ),
    Mutant(
        "drives are synced before the manifest",
        _STORE,
        "                drive.sync()\n",
        "                pass\n",
        T_POWER,
    ),
    Mutant(
        "the manifest is synced before it gets its name",
        _FOLDER,
        "                self._system.sync(fd)\n            finally:\n                self._system.close(fd)\n"
        '        except OSError as error:\n            raise storage_error("write"',
        "                pass\n            finally:\n                self._system.close(fd)\n"
        '        except OSError as error:\n            raise storage_error("write"',
        T_POWER,
    ),
    Mutant(
        "names in the folder are synced after the manifest",
        _FOLDER,
        '            raise storage_error("replace", path, error) from None\n        self.sync()\n',
        '            raise storage_error("replace", path, error) from None\n',
        T_POWER,
    ),
    Mutant(
        "a new folder is synced into its parent",
        _FOLDER,
        "                sync_folder(path.parent, system)\n",
        "",
        T_PLACES,
    ),
    Mutant(
        "threads end after all transfers, also where the wait was interrupted",
        _ENGINE,
        "                transfer._event.wait()\n",
        "                pass\n",
        T_ENGINE,
    ),
    Mutant("new data files are synced into their folder", _PLACES, "        folder.sync()\n", "", T_POWER),
    Mutant(
        "after a failed sync nothing counts as written",
        _STORE,
        "                    record.last_whole = -1\n",
        "                    pass\n",
        T_FAULTS,
    ),
    Mutant(
        "a vanished file is found at the commit",
        _STORE,
        "            drive.check_name()\n",
        "            pass\n",
        T_PLACES,
    ),
    Mutant(
        "a damaged manifest is found",
        "lightning_cxl/storage/manifest.py",
        "version == FORMAT and zlib.crc32(body.encode()) != crc",
        "False",
        T_STORE,
    ),
    Mutant(
        "restored records show in their windows",
        _RECORD,
        "self.num_begun\n        self.show()\n",
        "self.num_begun\n",
        T_STORE,
    ),
    # -- whose what is
    Mutant("a folder is locked", _FOLDER, "            self._system.lock(self._lock_fd)\n", "", T_STORE),
    Mutant(
        "a child does not keep the lock", _FOLDER, "os.register_at_fork(after_in_child=_close_in_child)\n", "", T_STORE
    ),
    Mutant("a child keeps no drive open", _DRIVE, "os.register_at_fork(after_in_child=_close_in_child)\n", "", T_STORE),
    Mutant("only our files are removed", _FOLDER, "data = _DATA.fullmatch(name)", "data = _DATA.match(name)", T_STORE),
    Mutant(
        "a part of another generation is not taken",
        _PLACES,
        "            self._check_not_needed(folder.path, contents)\n",
        "            pass\n",
        T_PLACES,
    ),
    Mutant(
        "a part whose home is not there is not taken",
        _PLACES,
        "needed = not home.parent.is_dir() or",
        "needed = False or",
        T_PLACES,
    ),
    Mutant(
        "a block device is refused",
        "lightning_cxl/storage/folder.py",
        "if not stat.S_ISDIR(mode := system.mode(path)):",
        "if False:",
        T_PLACES,
    ),
    Mutant(
        "a missing manifest lets nobody delete the data",
        _PLACES,
        " or (home.parent / PART).exists()",
        "",
        T_PLACES,
    ),
    Mutant(
        "a killed run that keeps nothing leaves nothing",
        _PLACES,
        "                folder.remove(path)\n        folder.remove_orphans",
        "                pass\n        folder.remove_orphans",
        T_STORE,
    ),
    Mutant(
        "a folder in memory is no drive",
        "lightning_cxl/machine/disk_space.py",
        "    if kind in _IN_MEMORY:\n",
        "    if False:\n",
        ("tests/unit/machine/test_disk_space.py",),
    ),
    Mutant(
        "a lock that is a link is not followed", "lightning_cxl/storage/folder.py", " | os.O_NOFOLLOW", "", T_PLACES
    ),
    Mutant(
        "files stay where a generation is kept",
        _PLACES,
        "        if not self.files_stay:\n",
        "        if True:\n",
        T_STORE,
    ),
    Mutant(
        "the budget holds",
        _STORE,
        "        if nbytes > (left := self._budget_bytes - self._reserved_bytes):\n",
        "        if left := 0:\n",
        T_STORE,
    ),
    # -- windows
    Mutant(
        "a window is not there in a forked child",
        _NUMA,
        "elif not self._inherit and madvise(start, nbytes, MADV_DONTFORK) != 0:",
        "elif False:",
        T_STORE,
    ),
    Mutant(
        "users see the error that ended a store",
        _PLACES,
        "            if error is None:\n                raise\n",
        "            raise\n",
        ("tests/integration/test_faulty_runs.py",),
    ),
    Mutant(
        "a small file that cannot be closed is an error of ours",
        _FOLDER,
        '        except OSError as error:\n            raise storage_error("read", path, error) from None\n',
        '        except IndexError as error:\n            raise storage_error("read", path, error) from None\n',
        T_FAULTS,
    ),
)
