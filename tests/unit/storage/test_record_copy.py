"""Bytes of records in another file: shared or written, they are the same, and so are their checksums."""

import errno
import os
import zlib

import pytest

from lightning_cxl.storage.record_copy import RecordCopy
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.system import System
from tests.reflinks import filesystem_with_reflinks
from tests.storage_cases import BLOCK, BUDGET, bytes_of, folders, memory_of, put

NBYTES = 24 * BLOCK
AT = 3 * BLOCK  # in the file
PARTS = [
    (0, NBYTES), (BLOCK, 9 * BLOCK + 17), (7 * BLOCK, BLOCK), (0, 100), (64, 5 * BLOCK),
    (BLOCK + 192, NBYTES - 5 * BLOCK),
]  # fmt: skip


class OneDisk(System):
    """Shares blocks as a filesystem with reflinks does, or refuses; notes what is shared and what is written."""

    def __init__(self, refuses=None, free=1 << 40, writes=None):
        self.refuses, self.free_bytes, self.writes = refuses, free, writes
        self.shared, self.written, self.asked = 0, 0, 0

    def share(self, fd, offset, nbytes, to_fd, to_offset):
        assert not (offset % BLOCK or nbytes % BLOCK or to_offset % BLOCK), "filesystems share whole blocks"
        self.asked += 1
        if self.refuses is not None:
            raise OSError(self.refuses, os.strerror(self.refuses))
        with open(f"/proc/self/fd/{fd}", "rb") as source:
            os.pwrite(to_fd, os.pread(source.fileno(), nbytes, offset), to_offset)
        self.shared += nbytes

    def free(self, fd):
        return self.free_bytes

    def pwritev(self, fd, views, offset):
        if self.writes is not None:
            return self.writes(fd, views, offset)
        self.written += sum(view.nbytes for view in views)
        return super().pwritev(fd, views, offset)


@pytest.fixture
def stored(tmp_path):
    """Makes a store with a record on several drives; returns record, memory with its bytes, and these bytes."""
    stores = []

    def make(drives=1, **options):
        store = Store(folders(tmp_path, drives), budget_bytes=BUDGET, **options)
        stores.append(store)
        record = store.reserve("state", NBYTES)
        put(store, store.reserve("before", NBYTES), 1)
        put(store, record, 2)
        put(store, store.reserve("behind", NBYTES), 3)
        store.window(record)
        memory = memory_of(record.padded_nbytes)
        store.read(record, memory).wait_host()
        return record, memory, bytes_of(memory)

    yield make
    for store in stores:
        store.close()


def copied(folder, record, memory, parts, system):
    """Put parts of a record into a file, with other bytes around each; returns contents and checksums."""
    path, checksums = folder / "file", []
    with open(path, "x+b") as file:
        copy = RecordCopy(file, path, system)
        for number, (start, nbytes) in enumerate(parts):
            at = AT + number * 2 * NBYTES
            file.write(bytes([7]) * (at - file.tell()))
            checksums.append(copy.put(record, memory, start, nbytes, at))
            file.write(b"behind")
        copy.close()
    return path.read_bytes(), checksums


def assert_copied(got, contents, parts):
    file, checksums = got
    for number, (start, nbytes) in enumerate(parts):
        at = AT + number * 2 * NBYTES
        assert file[at : at + nbytes] == contents[start : start + nbytes], (start, nbytes)
        assert file[at + nbytes :][:6] == b"behind"
        assert file[at - 1] == 7
        assert checksums[number] == zlib.crc32(contents[start : start + nbytes])


@pytest.mark.parametrize("drives", [1, 2, 3])
@pytest.mark.parametrize("refuses", [None, "EOPNOTSUPP", "EXDEV", "EINVAL", "EIO", "ENOSPC", "ENOTTY"])
def test_parts_are_the_same_shared_or_written(stored, tmp_path, drives, refuses):
    record, memory, contents = stored(drives)
    system = OneDisk(refuses and getattr(errno, refuses))
    assert_copied(copied(tmp_path, record, memory, PARTS, system), contents, PARTS)
    whole = sum(nbytes // BLOCK * BLOCK for start, nbytes in PARTS if start % BLOCK == 0)
    assert (system.shared, system.written) == ((whole, 0) if refuses is None else (0, whole))
    if refuses is not None:
        assert system.asked == drives, "each drive is asked once"


def test_what_is_shared_stays_when_the_record_is_written(tmp_path):
    with filesystem_with_reflinks(tmp_path) as folder:
        store = Store([folder / "drive"], budget_bytes=BUDGET)
        record = store.reserve("state", NBYTES)
        put(store, record, 1)
        store.window(record)
        memory = memory_of(NBYTES)
        store.read(record, memory).wait_host()
        contents = bytes_of(memory)
        system = System()
        system.pwritev = None
        with open(folder / "file", "x+b") as file:
            copy = RecordCopy(file, folder / "file", system)
            copy.put(record, memory, 0, NBYTES, AT)
            copy.close()
            assert copy.shared_bytes == NBYTES
            put(store, record, 2)
        store.close()
        assert (folder / "file").read_bytes()[AT:] == contents


def test_nothing_is_shared_where_a_copy_would_have_no_room(stored, tmp_path):
    """The next writes to the record take that room."""
    record, memory, contents = stored()
    system = OneDisk(free=NBYTES + 10 * BLOCK)
    parts = [(0, NBYTES), (0, NBYTES), (0, 10 * BLOCK)]
    assert_copied(copied(tmp_path, record, memory, parts, system), contents, parts)
    assert (system.shared, system.written) == (NBYTES + 10 * BLOCK, NBYTES)


@pytest.mark.parametrize("when", ["opened", "first written", "written later"])
def test_where_direct_writes_are_refused_the_page_cache_takes_them(stored, tmp_path, when):
    record, memory, contents = stored()

    class Refuses(OneDisk):
        def open(self, path, flags):
            if when == "opened":
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return super().open(path, flags)

    def writes(fd, views, offset):
        if when == "written later" and offset == AT:
            return os.pwritev(fd, [views[0][:BLOCK]], offset)
        raise OSError(errno.EINVAL, "not so")

    system = Refuses(errno.EXDEV, writes=writes)
    assert_copied(copied(tmp_path, record, memory, PARTS, system), contents, PARTS)


def test_a_short_write_goes_on_where_it_stopped(stored, tmp_path):
    record, memory, contents = stored()
    system = OneDisk(errno.EXDEV, writes=lambda fd, views, offset: os.pwritev(fd, [views[0][: 2 * BLOCK]], offset))
    assert_copied(copied(tmp_path, record, memory, PARTS, system), contents, PARTS)


@pytest.mark.parametrize("failure", ["EIO", "ENOSPC", "none written", "open"])
def test_a_file_that_cannot_be_written_is_an_error(stored, tmp_path, failure):
    record, memory, _ = stored()

    def writes(fd, views, offset):
        if failure == "none written":
            return 0
        raise OSError(getattr(errno, failure), "no")

    system = OneDisk(errno.EXDEV, writes=writes)
    if failure == "open":
        system.open = lambda path, flags: os.open(path / "no folder", flags)
    with pytest.raises(OSError) as caught:
        copied(tmp_path, record, memory, PARTS, system)
    expected = {"none written": errno.EIO, "open": errno.ENOTDIR}.get(failure) or getattr(errno, failure)
    assert caught.value.errno == expected
