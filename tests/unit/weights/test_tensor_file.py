import ctypes
import json
import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save_file as reference_save

from lightning_cxl.errors import CheckpointError
from lightning_cxl.weights import files as tensor_file
from lightning_cxl.weights.files import NamedTensor, Staging, TensorFile, encode_header, write_tensors

SAMPLES = {
    "matrix": torch.randn(33, 17),
    "half": torch.randn(5, 3).half(),
    "brain": torch.randn(7).bfloat16(),
    "double": torch.randn(4).double(),
    "scalar": torch.tensor(3.5),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "eight": torch.randn(9).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "nothing": torch.empty(0, 4),
    "ünïcode": torch.ones(1, dtype=torch.int16),
}


@pytest.fixture(params=[16, 64, 2**24], ids=lambda size: f"{size} B chunks")
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", request.param)
    return request.param


def write(path, tensors):
    write_tensors(path, [NamedTensor(name, tensor, tensor.dtype) for name, tensor in tensors.items()], {"format": "pt"})
    return path


def equal(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )


def test_the_reference_implementation_reads_what_we_write(tmp_path, chunk_bytes):
    loaded = load_file(write(tmp_path / "f.safetensors", SAMPLES))
    assert loaded.keys() == SAMPLES.keys()
    assert all(equal(loaded[name], tensor) for name, tensor in SAMPLES.items())


def test_we_read_what_the_reference_implementation_writes(tmp_path, chunk_bytes):
    reference_save(SAMPLES, tmp_path / "f.safetensors", metadata={"format": "pt", "by": "them"})
    with TensorFile(tmp_path / "f.safetensors") as file:
        assert file.metadata == {"format": "pt", "by": "them"}
        assert file.entries.keys() == SAMPLES.keys()
        for name, tensor in SAMPLES.items():
            target = torch.zeros_like(tensor)
            version = target._version
            file.entries[name].read_into(target, Staging())
            assert equal(target, tensor) and target._version > version
            assert file.entries[name].holds(tensor)


def test_data_is_aligned_for_readers_that_map_the_file(tmp_path):
    write(tmp_path / "f", {"odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2).double()})
    with TensorFile(tmp_path / "f") as file:
        assert all(e.begin % e.dtype.itemsize == 0 for e in file.entries.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_rounds_as_torch_does_both_ways(tmp_path, chunk_bytes, stored, wanted):
    values = torch.cat([torch.randn(50), torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1 + 2**-8, 65520.0])])
    values = values.to(stored)
    with TensorFile(write(tmp_path / "f", {"w": values})) as file:
        target = torch.empty(values.shape, dtype=wanted)
        file.entries["w"].read_into(target, Staging())
    write_tensors(tmp_path / "g", [NamedTensor("w", values, wanted)], {})
    for converted in (target, load_file(tmp_path / "g")["w"]):
        # the bits of a NaN depend on where in a vector torch meets it
        assert torch.equal(converted.isnan(), values.isnan())
        assert equal(converted.nan_to_num(0.0), values.to(wanted).nan_to_num(0.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(6, 4).t(),
        lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.empty(8, 10)[::2, 1::3],
        lambda: torch.empty(3, 4, 5).permute(2, 0, 1),
    ],
)
def test_tensors_of_any_layout_are_written_and_read(tmp_path, chunk_bytes, make):
    source = make().copy_(torch.randn(make().shape))
    path = write(tmp_path / "f", {"w": source})
    assert torch.equal(load_file(path)["w"], source)
    target = make()
    strides = target.stride()
    with TensorFile(path) as file:
        file.entries["w"].read_into(target, Staging())
        assert file.entries["w"].holds(source)
        assert not file.entries["w"].holds(source + 1)
    assert torch.equal(target, source) and target.stride() == strides


def test_lazy_conjugates_are_written_as_what_they_mean(tmp_path):
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert torch.equal(load_file(write(tmp_path / "f", {"w": value.conj()}))["w"], value.conj())


def test_equal_numbers_with_other_bits_are_other_tensors(tmp_path):
    with TensorFile(write(tmp_path / "f", {"zero": torch.zeros(2), "nan": torch.full((2,), float("nan"))})) as file:
        assert not file.entries["zero"].holds(-torch.zeros(2))
        assert file.entries["nan"].holds(torch.full((2,), float("nan")))


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04torch",
        [],
        {"a": {"dtype": "F32"}},
        {"a": entry(shape=[3])},
        {"a": entry(dtype="F4")},  # of safetensors, and not of torch
        {"a": entry(), "b": entry(data_offsets=[4, 12])},
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "f.safetensors"
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
        content = len(content).to_bytes(8, "little") + content + bytes(8)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{path}.*Download or save it again"):
        TensorFile(path)


@given(st.data())
def test_a_header_with_any_byte_changed_is_read_or_refused(tmp_path_factory, data):
    path = write(tmp_path_factory.getbasetemp() / "changed", {"a": torch.ones(3), "ü": torch.ones(2, 2).half()})
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        with TensorFile(path) as file:
            assert sum(each.nbytes for each in file.entries.values()) == 20, "whatever it says, it fits the file"
    except CheckpointError as error:
        assert str(path) in str(error)


def test_names_and_dtypes_that_cannot_be_written(monkeypatch):
    with pytest.raises(CheckpointError, match="__metadata__"):
        encode_header([("__metadata__", torch.float32, (1,))], {})
    with pytest.raises(CheckpointError, match="two tensors named 'a'"):
        encode_header([("a", torch.float32, (1,)), ("a", torch.float32, (1,))], {})
    with pytest.raises(CheckpointError, match=r"cannot hold torch\.complex128; they hold .*float32"):
        encode_header([("a", torch.complex128, (1,))], {})
    monkeypatch.setattr(tensor_file, "MAX_HEADER_BYTES", 50)
    with pytest.raises(CheckpointError, match="write more, smaller files"):
        encode_header([("a" * 50, torch.float32, (1,))], {})


def test_every_truncation_is_noticed_and_leaves_no_descriptor(tmp_path):
    path = write(tmp_path / "f", {"a": torch.ones(3), "b": torch.ones(2, 2)})
    whole = path.read_bytes()
    before = len(os.listdir("/proc/self/fd"))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            TensorFile(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path, chunk_bytes):
    path = write(tmp_path / "f", {"a": torch.ones(100)})
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 40)
        with pytest.raises(CheckpointError, match="has become shorter"):
            file.entries["a"].read_into(torch.zeros(100), Staging())


def test_errors_of_the_disk_name_the_file(tmp_path, monkeypatch):
    path = write(tmp_path / "f", {"a": torch.ones(100)})
    with pytest.raises(CheckpointError, match=r"gone`: No such file"):
        TensorFile(tmp_path / "gone")
    with TensorFile(path) as file:

        def fail(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=rf"{path}.*Input/output error"):
            file.entries["a"].read_into(torch.zeros(100), Staging())


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    preadv, write_, values = os.preadv, os.write, torch.randn(1000)
    monkeypatch.setattr(os, "write", lambda fd, memory: write_(fd, memory[:333]))
    path = write(tmp_path / "f", {"a": values})
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:77]], offset))
    target = torch.zeros(1000)
    with TensorFile(path) as file:
        file.entries["a"].read_into(target, Staging())
    assert torch.equal(target, values)


def test_files_do_not_stay_in_the_page_cache(tmp_path):
    """Asked from the kernel with mincore, through a map that touches nothing."""
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("files there are nothing but page cache")
    path = write(tmp_path / "f", {"a": torch.ones(2**20)})
    with TensorFile(path) as file:
        file.entries["a"].read_into(torch.zeros(2**20), Staging())
    assert resident_pages(path) < 0.1 * path.stat().st_size / 4096
    path.read_bytes()
    assert resident_pages(path) > 0.9 * path.stat().st_size / 4096, "the probe sees pages where there are some"


def file_system(path):
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(mount[1]), mount[2]) for mount in mounts if path.is_relative_to(mount[1]))[1]


def resident_pages(path):
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        states = (ctypes.c_ubyte * -(-size // 4096))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states)
        del start
        assert not failed
        return sum(state & 1 for state in states)
