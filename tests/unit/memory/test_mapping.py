"""`Mapping.show` and `Mapping.hide`: parts of a mapping that show a file."""

import os

import pytest

from lightning_cxl.native._numa import Mapping, Range

PAGE = 4096


def view(mapping):
    return memoryview(Range(mapping.address, mapping.nbytes, mapping))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([page]) * PAGE for page in range(1, 5)))
    fd = os.open(path, os.O_RDWR)
    yield path, fd
    os.close(fd)


def test_a_part_shows_a_file_and_what_is_written_there_stays_private(file):
    path, fd = file
    before = path.read_bytes()
    mapping = Mapping(4 * PAGE)
    shown = view(mapping)
    shown[0] = 9
    mapping.show(PAGE, 2 * PAGE, fd, 2 * PAGE)
    assert bytes(shown) == bytes([9]) + bytes(PAGE - 1) + bytes([3]) * PAGE + bytes([4]) * PAGE + bytes(PAGE)
    shown[PAGE] = 7
    assert path.read_bytes() == before
    mapping.show(PAGE, 2 * PAGE, fd, 2 * PAGE)
    assert shown[PAGE] == 3
    mapping.hide(PAGE, PAGE)
    assert not any(shown[PAGE : 2 * PAGE]) and shown[2 * PAGE] == 4 and shown[0] == 9
    shown[PAGE] = 1


def test_what_is_shown_outlives_file_and_descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes([5]) * PAGE)
    mapping = Mapping(PAGE)
    fd = os.open(path, os.O_RDONLY)
    mapping.show(0, PAGE, fd, 0)
    os.close(fd)
    path.unlink()
    assert bytes(view(mapping)) == bytes([5]) * PAGE


@pytest.mark.parametrize(
    ("offset", "nbytes", "file_offset"),
    [(1, PAGE, 0), (0, PAGE - 1, 0), (0, 0, 0), (PAGE, PAGE, 0), (0, 2 * PAGE, 0), (0, PAGE, 1), (0, PAGE, -PAGE)],
)
def test_only_whole_pages_inside_the_mapping(file, offset, nbytes, file_offset):
    mapping = Mapping(PAGE)
    with pytest.raises(ValueError):
        mapping.show(offset, nbytes, file[1], file_offset)
    if file_offset == 0:
        with pytest.raises(ValueError):
            mapping.hide(offset, nbytes)


def test_a_part_that_cannot_show_a_file_reads_as_zeros():
    mapping = Mapping(2 * PAGE)
    shown = view(mapping)
    shown[:] = b"x" * 2 * PAGE
    with pytest.raises(OSError, match="cannot show"):
        mapping.show(0, PAGE, -1, 0)
    assert bytes(shown) == bytes(PAGE) + b"x" * PAGE
