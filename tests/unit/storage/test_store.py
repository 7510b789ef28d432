"""`Store`: what is written is what is read, by windows and by generations."""

import contextlib
import os
import signal
import stat
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, TierFullError
from lightning_cxl.storage.store import Area, Store
from tests.storage_cases import BLOCK, BUDGET, CHUNK, Fails, Gate, bytes_of, damage, fill, folders, get, memory_of, put
from tests.unit.memory.host import ends_in_child


@pytest.fixture
def opened(tmp_path):
    """Opens stores with the same folders, and closes what a test leaves open."""
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


def test_reads_and_writes_that_are_not_waited_for_keep_their_order(opened):
    store = opened(2)
    record = store.reserve("state", 8 * CHUNK)
    wrote, read, expected = [], [], []
    for seed in range(12):
        source, target = memory_of(record.padded_nbytes), memory_of(record.padded_nbytes)
        expected.append(fill(source, seed))
        wrote.append(store.write(record, source))
        read.append((store.read(record, target), target))
        del source
    store.wait()
    assert all(transfer.done() for transfer in wrote)
    assert [bytes_of(target) for _, target in read] == expected


@pytest.mark.parametrize("slow", ["preadv", "pwritev"])
def test_a_write_waits_for_slow_reads_and_writes_before_it(opened, slow):
    delays = []
    store = opened(system=Fails(slow, lambda *args: time.sleep(delays.pop() if delays else 0)))
    record = store.reserve("state", BLOCK)
    sources, target = [memory_of(BLOCK) for _ in range(3)], memory_of(BLOCK)
    contents = [fill(source, seed) for seed, source in enumerate(sources)]
    store.write(record, sources[0]).wait_host()
    delays.append(0.1)
    if slow == "pwritev":
        store.write(record, sources[1])
    else:
        store.read(record, target)
    store.write(record, sources[2])
    store.wait()
    assert get(store, record) == contents[2]
    assert slow == "pwritev" or bytes_of(target) == contents[0]


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
    damage(folders(tmp_path)[0], at=(256 << 10) + 5 * CHUNK + 17)  # in the last of its chunks
    with pytest.raises(StorageError, match="`state` is damaged") as caught:
        get(store, record)
    assert caught.value.path.parent == folders(tmp_path)[0]


def test_without_a_generation_nothing_stays_but_the_lock(opened, tmp_path):
    for keeps in (False, True):
        store = opened(2, keeps=keeps)
        put(store, store.reserve("state", BLOCK), 1)
        store.close()
        store.close()
        assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"lightning_cxl.lock"}
        with pytest.raises(StorageError, match="closed"):
            store.reserve("other", 1)


# -- generations -------------------------------------------------------------------------------------------------------


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


def test_details_that_cannot_be_kept_are_refused_before_anything_is_done(opened):
    store = opened(keeps=True)
    with pytest.raises(TypeError):
        store.commit({"step": object()})
    assert store.generations() == []
    store.close()
    with pytest.raises(ConfigError, match="keeps=True"):
        opened().commit({})


@pytest.mark.parametrize(("old", "new", "message"), [("step", "stop", "is damaged"), ('t": 2', 't": 9', "format 9")])
def test_a_damaged_manifest_says_so(opened, tmp_path, old, new, message):
    store = opened(keeps=True)
    store.reserve("state", BLOCK)
    store.commit({"step": 5})
    store.close()
    (manifest,) = tmp_path.rglob("*manifest.json")
    whole = manifest.read_text()
    manifest.write_text(whole.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        opened(keeps=True)
    manifest.write_text(whole[:50])
    with pytest.raises(CheckpointError, match="is damaged"):
        opened(keeps=True)


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_second_run_and_paths_that_are_no_folders_or_the_same_are_refused(opened, tmp_path):
    opened(2)
    with pytest.raises(ConfigError, match="in use by another process"):
        opened(2)
    with pytest.raises(ConfigError, match="in use by"):
        Store([tmp_path / "drive1"], budget_bytes=BUDGET)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        Store([tmp_path / "file"], budget_bytes=1)
    with pytest.raises(ConfigError, match="each path is used once"):
        Store([tmp_path, tmp_path / ".." / tmp_path.name], budget_bytes=1)
    with pytest.raises(StorageError, match=r"no/folder.*ENOENT"):
        Store([tmp_path / "no" / "folder"], budget_bytes=1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_leaves_nothing_but_the_lock_which_its_forked_child_does_not_keep(opened, tmp_path):
    (started, says_started), (ends, says_end) = os.pipe(), os.pipe()
    run = os.fork()
    if run == 0:
        store = Store(folders(tmp_path, 2), budget_bytes=BUDGET)
        put(store, store.reserve("state", 3 * BLOCK), 1)
        if os.fork() == 0:
            os.write(says_started, b"x")
            os.close(says_end)
            os.read(ends, 1)
            os._exit(0)
        signal.pause()
    os.read(started, 1)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    try:
        assert {path.name for path in tmp_path.glob("*/*")} == {"lightning_cxl.lock"}
        opened(2)
    finally:
        for end in (started, says_started, ends, says_end):
            os.close(end)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
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


# -- areas, whose records take places in turn ------------------------------------------------------------------------


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
@given(
    sizes=st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=20), count=st.sampled_from([1, 2]), data=st.data()
)
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


def test_an_area_that_does_not_fit_is_refused_when_it_is_made(small):
    with pytest.raises(TierFullError, match="passing"):
        Area(small, "passing", 17 * BLOCK, 1)


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
