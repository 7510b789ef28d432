import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, TierFullError
from lightning_cxl.storage.drive import HEAD_BYTES, System
from lightning_cxl.storage.store import Area, Store
from tests import storage_cases
from tests.faulty_system import FaultySystem
from tests.storage_cases import BLOCK, BUDGET, CHUNK, Fails, Gate, bytes_of, folders, get, memory_of, put
from tests.unit.memory.host import ends_in_child


@pytest.fixture
def opened(tmp_path):
    stores = []

    def open_store(count=1, budget_bytes=BUDGET, chunk_bytes=CHUNK, **options):
        stores.append(Store(folders(tmp_path, count), budget_bytes=budget_bytes, chunk_bytes=chunk_bytes, **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_later_store_overwrites_nothing_that_a_window_shows(tmp_path, count):
    """Weights of a model may still lie in the file of an earlier run, which stays where a generation is kept."""
    shown, ends = [], []
    for run, sizes in enumerate([[3, 4, 5], [2, 8], [5, 1, 9], [3, 4, 5], [2, 8]]):
        store = Store(folders(tmp_path, count), budget_bytes=BUDGET, keeps=True)
        state = store.reserve("state", BLOCK)
        if run == 0:
            put(store, state, 1)
            store.commit({})
        new = []
        for seed, size in enumerate(sizes):
            record = store.reserve(f"weights {seed}", size * BLOCK, keeps=False)
            new.append((store.window(record), put(store, record, seed)))
        assert all(bytes_of(window) == contents for window, contents in shown + new)
        ends.append(record.versions[0])
        shown = new
        store.close()
        del store, state, record
    assert max(ends[3:]) <= max(ends[:3]), "places that nobody shows any more are used again"


def test_the_window_shows_the_last_write_and_outlives_the_store_and_its_file(opened, tmp_path):
    store = opened(2)
    record = store.reserve("state", 9 * BLOCK)
    tensor = store.window(record).tensor((record.padded_nbytes,), torch.uint8)
    contents = put(store, record, 1)
    tensor[5] = contents[5] ^ 255  # what a user writes is private until the next write
    assert get(store, record) == contents
    contents = put(store, record, 2)
    assert bytes(tensor.numpy()) == contents
    store.close()
    assert not list(tmp_path.rglob("*.data"))
    del store, record
    assert bytes(tensor.numpy()) == contents


@pytest.mark.parametrize("slow", ["preadv", "pwritev"])
def test_reads_and_writes_keep_their_order_however_slow_one_is(opened, slow):
    delays = []
    store = opened(2, system=Fails(slow, lambda *args: time.sleep(delays.pop() if delays else 0)))
    record = store.reserve("state", 8 * CHUNK)
    wrote, read, expected = [], [], []
    for seed in range(4):
        source, target = memory_of(record.padded_nbytes), memory_of(record.padded_nbytes)
        expected.append(storage_cases.fill(source, seed))
        delays.append(0.1)
        wrote.append(store.write(record, source))
        read.append((store.read(record, target), target))
        del source
    store.wait()
    assert all(transfer.done() for transfer in wrote)
    assert [bytes_of(target) for _, target in read] == expected


def test_names_sizes_and_memory_that_cannot_be_are_refused_and_a_budget_holds(opened):
    store = opened(2, budget_bytes=10 * BLOCK, keeps=True)
    record = store.reserve("state", 4 * BLOCK)
    with pytest.raises(TierFullError, match=r"8\.0 KiB of 40\.0 KiB free"):
        store.reserve("second", 2 * BLOCK)
    with pytest.raises(ConfigError, match="`state` already"):
        store.reserve("state", 1)
    with pytest.raises(ValueError, match="at least one byte"):
        store.reserve("other", 0)
    assert store.stats()["reserved_bytes"] == 8 * BLOCK
    memory = memory_of(5 * BLOCK)
    for wrong in (memory.slice(0, BLOCK), memory.slice(512, 4 * BLOCK)):
        with pytest.raises(ValueError, match="page-aligned"):
            store.write(record, wrong)
    with pytest.raises(StorageError, match="nothing was written"):
        store.read(record, memory)


def test_bytes_that_changed_on_the_drive_are_found(opened, tmp_path):
    store = opened()
    record = store.reserve("state", 6 * CHUNK)
    put(store, record, 1)
    storage_cases.damage(folders(tmp_path)[0], at=(256 << 10) + 5 * CHUNK + 17)  # in the last of its chunks
    with pytest.raises(StorageError, match="`state` is damaged") as caught:
        get(store, record)
    assert caught.value.path.parent == folders(tmp_path)[0]


def test_both_generations_can_be_restored_until_one_is_settled(opened):
    store = opened(keeps=True)
    record, wrote = store.reserve("state", BLOCK), {}
    for step in (1, 2):
        wrote[step] = put(store, record, step)
        store.commit({"step": step})
    with pytest.raises(StorageError, match="all its versions belong to generations 1 and 2"):
        store.write(record, memory_of(BLOCK))
    with pytest.raises(StorageError, match="settle one of them"):
        store.commit({"step": 3})
    for chosen in (1, 2, 1):
        store.close()
        store = opened(keeps=True)
        assert [each.details for each in store.generations()] == [{"step": 1}, {"step": 2}]
        record = store.reserve("state", BLOCK)
        store.restore(chosen)
        assert get(store, record) == wrote[chosen]
    store.settle(1)
    put(store, record, 3)
    assert store.commit({"step": 2}) == 3  # no number is used twice
    store.restore(1)
    assert get(store, record) == wrote[1]
    with pytest.raises(CheckpointError, match="no generation 2; it holds: 1, 3"):
        store.restore(2)


def test_without_a_generation_nothing_stays_but_the_lock(opened, tmp_path):
    def files():
        return {path.name for path in tmp_path.rglob("*") if path.is_file()}

    for keeps in (False, True):
        store = opened(2, keeps=keeps)
        put(store, store.reserve("state", BLOCK), 1)
        assert keeps or files() == {"lightning_cxl.lock"}, "so a run that is killed leaves nothing else"
        store.close()
        store.close()
        assert files() == {"lightning_cxl.lock"}
        with pytest.raises(StorageError, match="closed"):
            store.reserve("other", 1)


def test_a_folder_with_a_generation_takes_only_the_same_records(opened):
    store = opened(2, keeps=True)
    store.check_found({"other": 5})
    store.reserve("state", BLOCK)
    store.commit({"step": 5})
    store.close()
    store = opened(2, keeps=True)
    store.check_found({"state": BLOCK})
    with pytest.raises(ConfigError, match=r"generation 1 \{'step': 5\}, which has no record `other`"):
        store.check_found({"state": BLOCK, "other": BLOCK})
    for refuses in (lambda: store.check_found({"state": 5}), lambda: store.reserve("state", 5)):
        with pytest.raises(ConfigError, match=r"`state` has 4096 bytes and not 5.*another folder"):
            refuses()
    store.close()
    with pytest.raises(ConfigError, match="on 2 drives"):
        opened(1, keeps=True)
    with pytest.raises(ConfigError, match=r"this run keeps none\..*before you delete it.*plain_checkpoint"):
        opened(2)


@pytest.mark.parametrize(("old", "new", "message"), [("step", "stop", "is damaged"), ('t": 2', 't": 9', "format 9")])
def test_a_damaged_manifest_says_so(opened, tmp_path, old, new, message):
    store = opened(keeps=True)
    store.reserve("state", BLOCK)
    with pytest.raises(TypeError):
        store.commit({"step": object()})
    assert store.commit({"step": 5}) == 1
    store.close()
    (manifest,) = tmp_path.rglob("*manifest.json")
    whole = manifest.read_text()
    manifest.write_text(whole.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        opened(keeps=True)
    manifest.write_text(whole[:50])
    with pytest.raises(CheckpointError, match="is damaged"):
        opened(keeps=True)


def test_a_second_run_and_paths_that_are_no_folders_or_the_same_are_refused(opened, tmp_path):
    opened(2)
    with pytest.raises(ConfigError, match="in use by another process"):
        Store([tmp_path / "drive1"], budget_bytes=BUDGET)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        Store([tmp_path / "file"], budget_bytes=1)
    with pytest.raises(ConfigError, match="each path is used once"):
        Store([tmp_path, tmp_path / ".." / tmp_path.name], budget_bytes=1)
    with pytest.raises(StorageError, match=r"no/folder.*ENOENT"):
        Store([tmp_path / "no" / "folder"], budget_bytes=1)


def test_a_forked_child_has_no_file_of_a_store_open(opened, tmp_path):
    """A worker that outlives a killed run would keep a block device from the next one (EBUSY)."""
    opened(2)

    def open_files():
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return [link for link in map(os.path.realpath, links) if link.startswith(str(tmp_path))]

    assert len(open_files()) == 4, "a lock and a data file for each drive"
    assert ends_in_child(lambda: not open_files()) == 0
    assert len(open_files()) == 4, "the parent keeps its own"


def test_files_of_runs_that_are_gone_are_removed_and_others_are_not(opened, tmp_path):
    (folder,) = folders(tmp_path)
    opened().close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "for its owner alone"
    others = {"notes.txt", "lightning_cxl-abc.data", "lightning_cxl-0123456789abcdef-0.data.bak"}
    ours = {"lightning_cxl-0123456789abcdef-0.data", "lightning_cxl-manifest.json.new"}
    for name in others | ours:
        (folder / name).touch()
    opened().close()
    assert {path.name for path in folder.iterdir()} == others | {"lightning_cxl.lock"}
    opened(keeps=True)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir() if file.name not in others} == {0o600}


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def small(tmp_path, gate):
    opened = Store([tmp_path], budget_bytes=16 * BLOCK, system=gate)
    yield opened
    gate.is_open.set()
    opened.close()


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=20), count=st.integers(1, 2), data=st.data())
def test_records_that_live_together_never_share_bytes(tmp_path_factory, sizes, count, data):
    with contextlib.closing(Store(folders(tmp_path_factory.mktemp("drives"), count), budget_bytes=1 << 24)) as store:
        area = Area(store, "passing", data.draw(st.integers(0, 4)) * BLOCK, count)
        living = {}
        for seed, nbytes in enumerate(sizes):
            for record in [each for each in living if data.draw(st.booleans())]:
                assert get(store, record) == living.pop(record)
                area.give_back(record)
            record = area.take(nbytes)
            assert record.nbytes == nbytes and not record.is_written
            living[record] = put(store, record, seed)
        assert all(get(store, record) == contents for record, contents in living.items())


def test_space_is_taken_when_the_area_is_made_and_again_only_where_it_is_too_small(small):
    with pytest.raises(TierFullError, match="passing"):
        Area(small, "passing", 17 * BLOCK, 1)
    area = Area(small, "passing", 6 * BLOCK, 1)
    for _ in range(20):
        records = [area.take(2 * BLOCK) for _ in range(3)]
        assert small.stats()["reserved_bytes"] == 6 * BLOCK
        for record in records:
            area.give_back(record)
    for _ in range(3):
        larger = area.take(9 * BLOCK)
        assert small.stats()["reserved_bytes"] == 15 * BLOCK
        contents = put(small, larger, 1)
        with pytest.raises(TierFullError, match=r"of 64\.0 KiB free"):
            area.take(7 * BLOCK)
        assert get(small, larger) == contents
        area.give_back(larger)


def test_a_place_is_not_given_away_while_it_is_written(small, gate):
    area = Area(small, "passing", 2 * BLOCK, 1)
    first = area.take(2 * BLOCK)
    gate.is_open.clear()
    small.write(first, memory_of(2 * BLOCK))
    area.give_back(first)
    started = time.monotonic()
    threading.Timer(0.05, gate.is_open.set).start()
    second = area.take(2 * BLOCK)
    assert second.versions == first.versions and time.monotonic() - started >= 0.05
    assert small.stats()["reserved_bytes"] == 2 * BLOCK  # waited instead of taking more


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=["drive", "memory"])
def test_a_write_that_failed_does_not_keep_its_place(small, gate, error):
    area = Area(small, "passing", 2 * BLOCK, 1)
    first = area.take(2 * BLOCK)
    gate.fails = error
    write = small.write(first, memory_of(2 * BLOCK))
    area.give_back(first)
    second = area.take(2 * BLOCK)
    with pytest.raises((StorageError, MemoryError)):
        write.wait_host()
    gate.fails = None
    assert get(small, second) if put(small, second, 3) else False


def committed(paths):
    """Leave a generation on drives; returns the bytes of its record."""
    store = Store(paths, budget_bytes=BUDGET, keeps=True)
    contents = put(store, store.reserve("state", 5 * BLOCK), 1)
    store.commit({"step": 1})
    store.close()
    return contents


def check_restored(paths, contents):
    store = Store(paths, budget_bytes=BUDGET, keeps=True)
    record = store.reserve("state", 5 * BLOCK)
    store.restore(1)
    assert get(store, record) == contents
    store.close()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("role", ["first", "second"])
def test_a_folder_with_a_part_of_a_generation_is_not_taken(tmp_path, keeps, role):
    paths = folders(tmp_path, 2)
    contents = committed(paths)
    for part in paths:
        taken = [part] if role == "first" else [tmp_path / "another", part]
        if role == "first" and keeps and part == paths[0]:
            continue  # the home of the generation itself, which says that it has two drives
        with pytest.raises(ConfigError, match="holds"):
            Store(taken, budget_bytes=BUDGET, keeps=keeps)
    check_restored(paths, contents)


def test_drives_in_another_order_are_refused_and_nothing_is_lost(tmp_path):
    paths = folders(tmp_path, 3)
    contents = committed(paths)
    for others in ([paths[2], paths[1]], [tmp_path / "other", paths[2]]):
        with pytest.raises(StorageError, match="No such file"):
            Store([paths[0], *others], budget_bytes=BUDGET, keeps=True)
    check_restored(paths, contents)


def test_parts_of_a_run_that_was_killed_before_its_first_manifest_was_there_are_taken_by_the_next(tmp_path):
    paths = folders(tmp_path, 2)
    committed(paths)
    for name in ("manifest", "part"):
        (paths[0] / f"lightning_cxl-{name}.json").unlink()
    with pytest.raises(ConfigError, match="which is missing"):
        Store([paths[1]], budget_bytes=BUDGET)
    Store(paths, budget_bytes=BUDGET).close()
    assert {path.name for path in paths[1].iterdir()} == {"lightning_cxl.lock"}


@pytest.mark.parametrize("lost", ["home", "manifest", "part"])
def test_a_part_is_not_taken_where_its_home_or_manifest_is_missing_or_it_cannot_be_read(tmp_path, lost):
    paths, elsewhere = folders(tmp_path, 2), tmp_path / "elsewhere"
    contents = committed(paths)
    hidden = {"home": paths[0], "manifest": paths[0] / "lightning_cxl-manifest.json"}.get(lost)
    if hidden is None:
        (paths[1] / "lightning_cxl-part.json").write_text("{")
    else:
        hidden.rename(elsewhere)
    with pytest.raises(ConfigError, match="holds a part of a generation whose manifest is"):
        Store([paths[1]], budget_bytes=BUDGET)
    if hidden is not None:
        elsewhere.rename(hidden)
    check_restored(paths, contents)


def test_places_that_cannot_be_used_are_refused_and_a_new_folder_lies_on_the_disk(tmp_path):
    synced = []
    system = Fails("sync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    for is_new in (True, False):
        Store(folders(tmp_path), budget_bytes=BUDGET, system=system).close()
        assert (str(tmp_path) in synced) == is_new
        synced.clear()
    no_space = Mock(side_effect=OSError(errno.EINVAL, "Invalid argument"))  # so does libc on ext2
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "lightning_cxl.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match="It is a link: remove the link"):
        Store([tmp_path], budget_bytes=BUDGET)
    assert (tmp_path / "mine").read_text() == "kept"
    with pytest.raises(StorageError, match="cannot take space in advance: use ext4, XFS or btrfs"):
        Store([tmp_path / "ext2"], budget_bytes=BUDGET, system=Fails("allocate", no_space))
    with pytest.raises(StorageError, match="shorter path"):
        Store([tmp_path / ("x" * 300)], budget_bytes=BUDGET)


def test_a_vanished_file_is_found_at_the_commit(tmp_path):
    store = Store([tmp_path], budget_bytes=BUDGET, keeps=True)
    put(store, store.reserve("state", BLOCK), 1)
    (file,) = tmp_path.glob("*.data")
    file.unlink()
    with pytest.raises(StorageError, match=r"cannot find.*ENOENT"):
        store.commit({})
    file.touch()
    with pytest.raises(StorageError, match="another file"):
        store.commit({})
    store.close()


def test_space_is_taken_when_a_record_is_reserved(tmp_path):
    def full(fd, offset, nbytes):
        if offset + nbytes > HEAD_BYTES + 8 * BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store([tmp_path], budget_bytes=BUDGET, system=Fails("allocate", full))
    first = store.reserve("first", 6 * BLOCK)
    with pytest.raises(StorageError, match=r"cannot take .*ENOSPC.*smaller budget") as caught:
        store.reserve("second", 3 * BLOCK)
    assert caught.value.errno == errno.ENOSPC and store.stats()["reserved_bytes"] == 6 * BLOCK
    second = store.reserve("second", 2 * BLOCK)
    wrote = {record: put(store, record, seed) for seed, record in enumerate((first, second))}
    assert {record: get(store, record) for record in wrote} == wrote
    assert storage_cases.data_file(tmp_path).stat().st_blocks * 512 >= HEAD_BYTES + 8 * BLOCK
    store.close()


@pytest.mark.parametrize("when", ["open", "read"])
def test_a_filesystem_that_refuses_direct_transfers_is_used_through_its_cache(tmp_path, caplog, when):
    direct = set()

    def refuse(is_direct):
        if is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")

    class Refuses(System):
        def open(self, path, flags):
            refuse(flags & os.O_DIRECT and when == "open")
            fd = super().open(path, flags)
            direct.discard(fd)
            if flags & os.O_DIRECT:
                direct.add(fd)
            return fd

        def preadv(self, fd, views, offset):
            refuse(fd in direct)
            return super().preadv(fd, views, offset)

    with caplog.at_level(logging.WARNING):
        store = Store([tmp_path], budget_bytes=BUDGET, system=Refuses())
        record = store.reserve("state", 5 * BLOCK)
        contents = put(store, record, 1)
        assert get(store, record) == contents
        store.close()
    assert [entry.message.count("O_DIRECT") for entry in caplog.records] == [1]


@pytest.mark.parametrize("num_drives", [1, 2])
def test_a_missing_manifest_lets_nobody_delete_the_data(tmp_path, num_drives):
    paths = folders(tmp_path, num_drives)
    contents = committed(paths)
    manifest = paths[0] / "lightning_cxl-manifest.json"
    manifest.rename(tmp_path / "lost")
    for keeps in (True, False):
        with pytest.raises(ConfigError, match=r"whose manifest is .*missing.* back from a backup"):
            Store(paths, budget_bytes=BUDGET, keeps=keeps)
    (tmp_path / "lost").rename(manifest)
    check_restored(paths, contents)


SIZES = (1, BLOCK - 1, BLOCK, 3 * BLOCK + 1, 9 * BLOCK)


class StoreMachine(RuleBasedStateMachine):
    """`now` is what records hold, `kept` what generations hold, `found` whether an earlier run left some."""

    names = Bundle("names")

    @initialize(count=st.sampled_from([1, 3]))
    def start(self, count):
        self.path = Path(tempfile.mkdtemp())
        self.count = count
        self.kept: dict[int, dict[str, tuple[bytes, int]]] = {}
        self.sizes: dict[str, int] = {}
        self.number = self.seed = 0
        self.open()

    def open(self):
        options = {"keeps": True, "system": FaultySystem(), "chunk_bytes": 2 * BLOCK}
        self.store = Store(folders(self.path, self.count), budget_bytes=BUDGET, **options)
        self.number = max([0, *self.kept]) if self.kept else 0
        self.sizes = {name: size for name, size in self.sizes.items() if self.kept}
        self.records = {name: self.store.reserve(name, size) for name, size in self.sizes.items()}
        self.now: dict[str, bytes] = {}

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.path)

    @precondition(lambda self: len(self.records) < 4)
    @rule(size=st.sampled_from(SIZES))
    def reserve(self, size):
        name = f"record {len(self.records)}"
        self.records[name] = self.store.reserve(name, size)
        self.sizes[name] = size

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def write(self, data):
        name = data.draw(st.sampled_from(sorted(self.records)))
        self.seed += 1
        versions = {kept[name][1] for kept in self.kept.values() if name in kept}
        if len(versions) == 2:
            with pytest.raises(StorageError, match="all its versions"):
                put(self.store, self.records[name], self.seed)
        else:
            self.now[name] = put(self.store, self.records[name], self.seed)
            assert self.records[name].present not in versions

    @rule()
    def commit(self):
        if len(self.kept) == 2:
            with pytest.raises(StorageError, match="settle one"):
                self.store.commit({})
            return
        self.number = self.store.commit({"seed": self.seed})
        assert self.number > max([0, *self.kept])
        self.kept[self.number] = {name: (held, self.records[name].present) for name, held in self.now.items()}

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def settle(self, data):
        number = data.draw(st.sampled_from(sorted(self.kept)))
        self.store.settle(number)
        self.kept = {number: self.kept[number]}

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def restore(self, data):
        number = data.draw(st.sampled_from(sorted(self.kept)))
        if set(self.records) - set(next(g.records for g in self.store.generations() if g.number == number)):
            return  # reserved after that generation
        self.store.restore(number)
        self.now = {name: held for name, (held, _) in self.kept[number].items()}

    @rule()
    def reopen(self):
        self.store.close()
        self.open()

    @invariant()
    def everything_is_as_it_should_be(self):
        for name, record in self.records.items():
            assert record.is_written == (name in self.now)
            expected = self.now.get(name, bytes(record.padded_nbytes))
            assert bytes_of(self.store.window(record)) == expected
            if record.is_written:
                assert get(self.store, record) == expected
        assert [generation.number for generation in self.store.generations()] == sorted(self.kept)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestStore = StoreMachine.TestCase
