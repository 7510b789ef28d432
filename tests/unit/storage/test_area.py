"""`Area`: places on drives that records take in turn, never two at a time."""

import contextlib
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.errors import StorageError, TierFullError
from lightning_cxl.storage.store import Area, Store
from tests.storage_cases import BLOCK, Gate, folders, get, memory_of, put


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def store(tmp_path, gate):
    opened = Store([tmp_path], budget_bytes=16 * BLOCK, system=gate)
    yield opened
    gate.is_open.set()
    opened.close()


@settings(deadline=None, max_examples=25)
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


def test_space_is_taken_when_the_area_is_made_and_again_only_where_it_is_too_small(store):
    area = Area(store, "passing", 6 * BLOCK, 1)
    for _ in range(20):
        records = [area.take(2 * BLOCK) for _ in range(3)]
        assert store.stats()["reserved_bytes"] == 6 * BLOCK
        for record in records:
            area.give_back(record)
    for _ in range(3):
        larger = area.take(9 * BLOCK)
        assert store.stats()["reserved_bytes"] == 15 * BLOCK
        contents = put(store, larger, 1)
        with pytest.raises(TierFullError, match=r"of 64\.0 KiB free"):
            area.take(7 * BLOCK)
        assert get(store, larger) == contents
        area.give_back(larger)


def test_an_area_that_does_not_fit_is_refused_when_it_is_made(store):
    with pytest.raises(TierFullError, match="passing"):
        Area(store, "passing", 17 * BLOCK, 1)


def test_a_place_is_not_given_away_while_it_is_written(store, gate):
    area = Area(store, "passing", 2 * BLOCK, 1)
    first = area.take(2 * BLOCK)
    gate.is_open.clear()
    store.write(first, memory_of(2 * BLOCK))
    area.give_back(first)
    started = time.monotonic()
    threading.Timer(0.05, gate.is_open.set).start()
    second = area.take(2 * BLOCK)
    assert second.versions == first.versions and time.monotonic() - started >= 0.05
    assert store.stats()["reserved_bytes"] == 2 * BLOCK  # waited instead of taking more


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=["drive", "memory"])
def test_a_write_that_failed_does_not_keep_its_place(store, gate, error):
    area = Area(store, "passing", 2 * BLOCK, 1)
    first = area.take(2 * BLOCK)
    gate.fails = error
    write = store.write(first, memory_of(2 * BLOCK))
    area.give_back(first)
    second = area.take(2 * BLOCK)
    with pytest.raises((StorageError, MemoryError)):
        write.wait_host()
    gate.fails = None
    assert get(store, second) if put(store, second, 3) else False
