import contextlib
import os
import random
import shutil
import threading
from types import SimpleNamespace

import pytest

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError
from lightning_cxl.storage.store import Store
from tests.faulty_system import FAULTS, FaultySystem, LoggingSystem
from tests.storage_cases import BLOCK, BUDGET, CHUNK, bytes_of, folders, get, memory_of, put

SIZES = {"first": 3 * CHUNK, "second": 5}
COUNT = 2


class Run:
    """A short run that notes what it wrote, and which generations it was told to have."""

    def __init__(self, path, system):
        self.path = path
        self.system = system
        self.fault_flips = getattr(system, "fault", None) == "flip"  # what a window shows has no checksum
        self.written: dict[str, bytes] = {}
        self.generations: dict[int, dict[str, bytes]] = {}
        self.number = 0
        self.returned = 0  # the last commit that came back without an error
        self.settled = 0
        self.times: list[tuple[int, int]] = []  # when commits returned, and their numbers

    def __call__(self):
        store = Store(folders(self.path, COUNT), budget_bytes=BUDGET, keeps=True, system=self.system, chunk_bytes=CHUNK)
        try:
            records = {name: store.reserve(name, nbytes) for name, nbytes in SIZES.items()}
            window = store.window(records["first"])
            for step in range(1, 4):
                for index, (name, record) in enumerate(records.items()):
                    if name == "second" and step == 2:
                        continue  # a record that one generation takes over from the one before
                    self.written[name] = put(store, record, 10 * step + index)
                assert bytes_of(window) == self.written["first"] or self.fault_flips
                assert get(store, records["first"]) == self.written["first"]
                self.number += 1
                self.generations[self.number] = dict(self.written)
                assert store.commit({"step": step}) == self.number
                self.returned = self.number
                self.times.append((getattr(self.system, "now", 0), self.number))
                store.settle(self.number)
                self.settled = self.number
            assert {name: get(store, record) for name, record in records.items()} == self.written
            put(store, records["second"], 99)
        finally:
            store.close()


def restored(path, generations):
    """Open what a run left, and check every generation that lies there; returns their numbers."""
    store = Store(folders(path, COUNT), budget_bytes=BUDGET, keeps=True, system=FaultySystem())
    try:
        found = [generation.number for generation in store.generations()]
        records = {name: store.reserve(name, nbytes) for name, nbytes in SIZES.items()}
        for number in found:
            store.restore(number)
            assert {name: get(store, record) for name, record in records.items()} == generations[number]
        if found:
            store.settle(found[-1])
            put(store, records["first"], 7)
            store.commit({})
        return found
    finally:
        store.close()


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


SHARED = {  # those that do the same, each at some of the calls
    "EIO": slice(0, None, 3),
    "ENOSPC": slice(1, None, 3),
    "EROFS": slice(2, None, 3),
    "late": slice(0, None, 2),
    "behind the next": slice(1, None, 2),
}


@pytest.mark.parametrize(("fault", "some"), [(fault, SHARED.get(fault, slice(None))) for fault in FAULTS], ids=str)
def test_every_fault_at_every_call(fault, some, tmp_path):
    system = FaultySystem()
    Run(tmp_path, system)()
    assert len(system.calls) > 60
    before, outcomes = descriptors(), {"fine": 0, "refused": 0}
    for at, name in list(enumerate(system.calls))[some]:
        if fault in ("short", "none moved", "flip") and name not in ("preadv", "pwritev"):
            continue  # nothing would happen
        path = tmp_path / str(at)
        path.mkdir()
        run = Run(path, FaultySystem(fault, at))
        try:
            run()
            outcomes["fine"] += 1
        except StorageError as error:
            outcomes["refused"] += 1
            assert str(error) and not isinstance(error.__cause__, AssertionError)
        except CheckpointError:
            assert fault == "flip"
        assert descriptors() == before, run.system.calls[at]
        assert not [each for each in threading.enumerate() if each.name.startswith("lightning_cxl storage")]
        try:
            found = restored(path, run.generations)
        except (StorageError, CheckpointError):
            assert fault in ("flip", "vanish"), (at, run.system.calls[at])
            continue
        # a generation whose commit came back is there, or one that came after it
        assert not run.returned or (found and found[-1] >= run.returned), (at, run.system.calls[at])
    survivable = fault in ("short", "late", "behind the next")
    always_told = fault.startswith("E") or fault == "none moved"
    assert (outcomes["refused"] == 0) == survivable and (outcomes["fine"] == 0) == always_told


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_at_every_call_where_a_generation_is_found(fault, tmp_path):
    run = Run(tmp_path, FaultySystem())
    run()

    def open_and_close(system):
        Store(folders(tmp_path, COUNT), budget_bytes=BUDGET, keeps=True, system=system).close()
        return len(system.calls)

    num_calls, before = open_and_close(FaultySystem()), descriptors()
    assert num_calls > 25
    for at in range(num_calls):
        system = FaultySystem(fault, at)
        try:
            open_and_close(system)
        except (StorageError, CheckpointError):
            assert fault not in ("short", "late", "behind the next")
        except ConfigError as error:  # the manifest has vanished, and what it names is not deleted
            assert fault == "vanish" and "which is missing" in str(error)
        assert descriptors() == before, system.calls
    if fault != "vanish":
        assert restored(tmp_path, run.generations)[-1] == run.settled


@pytest.mark.parametrize(("seed", "share"), [(0, 0), (1, 0.2), (2, 0.5), (3, 0.8), (4, 1)])  # the last is a kill
def test_after_a_power_loss_at_any_time_a_committed_generation_is_there(seed, share, tmp_path):
    system = LoggingSystem()
    run = Run(tmp_path, system)
    run()
    rng = random.Random(seed)
    seen = set()
    # without chance, one look at each time is enough
    for now in [now for now in range(1, system.now + 1) for _ in range(2 if 0 < share < 1 else 1)]:
        for folder in folders(tmp_path, COUNT):
            shutil.rmtree(folder)
            folder.mkdir()
        system.lose_power(now, rng, share)
        found = restored(tmp_path, run.generations)
        committed = [number for time, number in run.times if time <= now]
        assert not committed or (found and found[-1] >= committed[-1]), (now, found)
        seen.update(found)
    assert seen == set(run.generations)


@pytest.fixture
def rig(tmp_path):
    """A store with one record, and ``rig.fails(3)``: the third system call from now on fails."""
    system = FaultySystem()
    store = Store([tmp_path], budget_bytes=BUDGET, keeps=True, system=system, chunk_bytes=CHUNK)

    def fails(number=1):
        system.fault, system.at = "EIO", len(system.calls) + number - 1

    yield SimpleNamespace(system=system, store=store, record=store.reserve("state", 2 * CHUNK), fails=fails)
    store.close()


def test_an_error_says_path_offset_and_errno_each_time(rig, tmp_path):
    contents = put(rig.store, rig.record, 1)
    rig.fails()
    transfer = rig.store.read(rig.record, memory_of(rig.record.padded_nbytes))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"cannot read .*data` at offset \d+: .*EIO.*dmesg") as caught:
            transfer.wait_host()
        assert caught.value.errno == 5 and caught.value.path.parent == tmp_path and caught.value.offset % CHUNK == 0
    assert transfer.done()
    assert get(rig.store, rig.record) == contents


def test_a_record_whose_write_failed_cannot_be_read_until_it_is_written_again(rig):
    store, record = rig.store, rig.record
    put(store, record, 1)
    store.settle(store.commit({}))
    rig.fails()
    with pytest.raises(StorageError, match="EIO"):
        put(store, record, 2)
    for needs in (lambda: get(store, record), lambda: store.commit({})):
        with pytest.raises(StorageError, match="its last write failed"):
            needs()
    contents = put(store, record, 3)
    assert get(store, record) == contents
    assert store.commit({}) == 2


def test_after_a_failed_sync_what_was_written_before_is_written_again(rig):
    store, one = rig.store, rig.record
    other = store.reserve("other", BLOCK)
    put(store, one, 1)
    contents = put(store, other, 1)
    store.settle(store.commit({}))
    put(store, one, 2)
    rig.fails(3)
    with pytest.raises(StorageError, match="cannot sync"):
        store.commit({})
    assert rig.system.calls[-1] == "datasync"
    with pytest.raises(StorageError, match="`state` is not whole"):
        store.commit({})
    assert get(store, other) == contents
    put(store, one, 3)
    assert store.commit({}) == 2


@pytest.mark.parametrize(("call", "number"), [("rename", 8), ("sync", 10)])
def test_after_a_manifest_that_may_lie_there_or_not_both_versions_are_protected(rig, tmp_path, call, number):
    first = put(rig.store, rig.record, 1)
    rig.store.settle(rig.store.commit({}))
    second = put(rig.store, rig.record, 2)
    rig.fails(number)
    with pytest.raises(StorageError):
        rig.store.commit({})
    assert rig.system.calls[rig.system.at] == call
    with pytest.raises(StorageError, match="generations 1 and 2"):
        put(rig.store, rig.record, 3)
    assert rig.store.commit({}) == 3
    rig.store.close()
    with contextlib.closing(Store([tmp_path], budget_bytes=BUDGET, keeps=True)) as store:
        record = store.reserve("state", 2 * CHUNK)
        for generation, contents in ((1, first), (3, second)):
            store.restore(generation)
            assert get(store, record) == contents


def test_errors_that_nobody_was_told_are_raised_by_wait_and_close(rig):
    before = descriptors()
    for raises in (rig.store.wait, rig.store.close):
        rig.fails()
        rig.store.write(rig.record, memory_of(rig.record.padded_nbytes))
        with pytest.raises(StorageError, match="EIO"):
            raises()
        raises()
    assert len(descriptors()) == len(before) - 2
