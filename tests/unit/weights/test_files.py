import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_cxl.errors import CheckpointError, UnsupportedError
from lightning_cxl.weights import files as tensor_file
from lightning_cxl.weights.files import (
    NamedTensor,
    Staging,
    TensorFile,
    UnreadWeight,
    encode_header,
    open_weights,
    write_tensors,
)
from lightning_cxl.weights.models import load_weights
from tests.models import TinyConvNet, TinyTransformer
from tests.unit.weights.test_load import assert_loaded, built_empty, saved

SAMPLES = {
    "matrix": torch.randn(33, 17),
    "scalar": torch.tensor(3.5),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "eight": torch.randn(9).to(torch.float8_e4m3fn),
    "nothing": torch.empty(0, 4),
    "ünïcode": torch.ones(1, dtype=torch.int16),
    **{str(dtype): torch.randn(5, 3).to(dtype) for dtype in (torch.half, torch.bfloat16, torch.double, torch.int64)},
    "complex": torch.randn(3, dtype=torch.complex64),
}


@pytest.fixture(params=[16, 64, 2**24], ids=lambda size: f"{size} B chunks")
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", request.param)
    return request.param


def write(path, tensors):
    write_tensors(path, [NamedTensor(name, tensor, tensor.dtype) for name, tensor in tensors.items()], {"format": "pt"})
    return path


def equal(a, b):
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def read(path, target, name="w"):
    with TensorFile(path) as file:
        file.entries[name].read_into(target, Staging())
    return target


def test_we_and_the_reference_implementation_read_what_the_other_writes(tmp_path, chunk_bytes):
    loaded = load_file(write(tmp_path / "ours", SAMPLES))
    assert loaded.keys() == SAMPLES.keys()
    assert all(equal(loaded[name], tensor) for name, tensor in SAMPLES.items())
    save_file(SAMPLES, tmp_path / "theirs", metadata={"format": "pt", "by": "them"})
    with TensorFile(tmp_path / "theirs") as file:
        assert file.metadata == {"format": "pt", "by": "them"}
        assert file.entries.keys() == SAMPLES.keys()
        for name, tensor in SAMPLES.items():
            target = torch.zeros_like(tensor)
            version = target._version
            file.entries[name].read_into(target, Staging())
            assert equal(target, tensor) and target._version > version
            assert file.entries[name].holds(tensor)
    with TensorFile(write(tmp_path / "odd", {"odd": torch.ones(3, dtype=torch.uint8), **SAMPLES})) as file:
        for each in file.entries.values():
            assert each.begin % each.dtype.itemsize == 0, "aligned for readers that map the file"


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_rounds_as_torch_does_both_ways(tmp_path, chunk_bytes, stored, wanted):
    values = torch.cat([torch.randn(50), torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1 + 2**-8, 65520.0])])
    values = values.to(stored)
    target = read(write(tmp_path / "f", {"w": values}), torch.empty(values.shape, dtype=wanted))
    write_tensors(tmp_path / "g", [NamedTensor("w", values, wanted)], {})
    for converted in (target, load_file(tmp_path / "g")["w"]):
        # the bits of a NaN depend on where in a vector torch meets it
        assert torch.equal(converted.isnan(), values.isnan())
        assert equal(converted.nan_to_num(0.0), values.to(wanted).nan_to_num(0.0))


LAYOUTS = [
    lambda: torch.empty(6, 4).t(),
    lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.empty(8, 10)[::2, 1::3],
]


@pytest.mark.parametrize("make", LAYOUTS)
def test_tensors_of_any_layout_are_written_and_read(tmp_path, chunk_bytes, make):
    source, target = make().copy_(torch.randn(make().shape)), make()
    path = write(tmp_path / "f", {"w": source})
    assert torch.equal(load_file(path)["w"], source)
    assert torch.equal(read(path, target), source) and target.stride() == make().stride()
    with TensorFile(path) as file:
        assert file.entries["w"].holds(source) and not file.entries["w"].holds(source + 1)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


NO_HEADERS = [
    None,
    [],
    {"a": {"dtype": "F32"}},
    {"a": {**ENTRY, "shape": [3]}},
    {"a": {**ENTRY, "dtype": "F4"}},  # of safetensors, and not of torch
    {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}},
]


@pytest.mark.parametrize("header", NO_HEADERS, ids=str)
def test_what_is_no_safetensors_file_is_refused(tmp_path, header):
    path, content = tmp_path / "f.safetensors", json.dumps(header).encode()
    is_none = header is None
    path.write_bytes(b"PK\x03\x04torch" if is_none else len(content).to_bytes(8, "little") + content + bytes(8))
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


def test_every_truncation_and_errors_of_the_disk_are_noticed_and_leave_no_descriptor(
    tmp_path, chunk_bytes, monkeypatch
):
    path, target = write(tmp_path / "f", {"w": torch.ones(100)}), torch.zeros(100)
    whole = path.read_bytes()
    before = len(os.listdir("/proc/self/fd"))
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            TensorFile(path)
    assert len(os.listdir("/proc/self/fd")) == before
    path.write_bytes(whole)
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 40)
        with pytest.raises(CheckpointError, match="has become shorter"):
            file.entries["w"].read_into(target, Staging())
        monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match=rf"{path}.*Input/output error"):
            file.entries["w"].read_into(target, Staging())


def test_short_reads_are_continued_bits_compared_and_conjugates_written_as_what_they_mean(tmp_path, monkeypatch):
    preadv, write_, values = os.preadv, os.write, torch.randn(1000)
    monkeypatch.setattr(os, "write", lambda fd, memory: write_(fd, memory[:333]))
    path = write(tmp_path / "f", {"w": values})
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:77]], offset))
    assert torch.equal(read(path, torch.zeros(1000)), values)
    value, nan = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64), torch.full((2,), float("nan"))
    assert torch.equal(load_file(write(tmp_path / "f", {"w": value.conj()}))["w"], value.conj())
    with TensorFile(write(tmp_path / "f", {"zero": torch.zeros(2), "nan": nan})) as file:
        assert not file.entries["zero"].holds(-torch.zeros(2)) and file.entries["nan"].holds(nan)


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def names(source):
    with open_weights(source) as files:
        return [sorted(file.entries) for file in files]


def test_a_folder_with_an_index_a_file_and_a_list_of_files(sharded):
    assert names(sharded) == names(str(sharded)) == [["a"], ["b", "c"]]
    assert names(sharded / "model.safetensors.index.json") == [["a"], ["b", "c"]]
    assert names(sharded / "two.safetensors") == [["b", "c"]]
    assert names([sharded / "two.safetensors", str(sharded / "one.safetensors")]) == [["b", "c"], ["a"]]
    save_file({"b": torch.ones(3)}, sharded / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"'b' is in .*two\.safetensors` and in .*old\.safetensors`"):
        names([sharded / "two.safetensors", sharded / "old.safetensors"])
    save_file({"z": torch.ones(2)}, sharded / "model.safetensors")
    assert names(sharded) == [["z"]], "a single file comes before an index, as in transformers"


TWO_OF_THREE = {"a": "one.safetensors", "b": "three.safetensors", "c": "four.safetensors"}
OUTSIDE = ("../one.safetensors", "/etc/passwd", "..", "..\\\\one.safetensors", 3)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (TWO_OF_THREE, r"2 of 3 files .*three\..*four\.safetensors.*Complete"),
        ({"a": "two.safetensors"}, r"'a' is in `two\.safetensors`, but it is in none of its files"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, r"'a' is in `two\.safetensors`, but it is in `one\.safet"),
        *(({"a": name}, "not a file beside it") for name in OUTSIDE),
        ([], "no table of names, or empty"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(sharded, weight_map, reason):
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=reason):
        names(sharded)


VALUES = torch.arange(100.0)[10:26].view(4, 4)  # not at the begin of its memory, like the pages of a file
OPERATORS = {
    "transposed": lambda w: w.t().reshape(-1), "a diagonal": lambda w: w.diagonal(), "a chunk": lambda w: w.chunk(2)[1],
    "unfolded": lambda w: w.unfold(0, 2, 1), "expanded": lambda w: w[0].expand(3, 4), "chosen": lambda w: w[w > 15],
    "split": lambda w: torch.cat(list(w.split(3))), "as other numbers": lambda w: w.view(torch.int32),
    "as complex numbers": lambda w: torch.view_as_complex(w.view(4, 2, 2)), "added": lambda w: w + 1,
    "copied from": lambda w: torch.zeros(4, 4).copy_(w), "cloned": lambda w: w.clone(), "as it is": lambda w: w,
}  # fmt: skip


def unread():
    return UnreadWeight(torch.empty(4, 4, device="meta"), torch.float32, lambda: VALUES)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_it_gives_of_the_values(name):
    expected, found = OPERATORS[name](VALUES.clone()), OPERATORS[name](unread())
    values = found.values() if isinstance(found, UnreadWeight) else found
    assert (found.dtype, found.shape, values.dtype) == (expected.dtype, expected.shape, expected.dtype)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("operator", [lambda w: w.as_strided((2, 2), (4, 1)), lambda w: w[2].as_strided((2,), (1,), 8)])
def test_what_counts_from_the_begin_of_memory_is_refused(operator):
    with pytest.raises(UnsupportedError, match=r"as_strided.*is in its file.*mapped=False"):
        operator(unread())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def shown_file(tensor):
    """The file whose pages a tensor shows, as the kernel says; empty for memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, shown = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= tensor.data_ptr() < end:
            return shown
    return ""


def test_mapped_weights_show_the_pages_of_the_file(path):
    state = saved(TinyTransformer(), path)
    before = path.read_bytes()
    model = built_empty(TinyTransformer)
    report = load_weights(model, path, mapped=True)
    assert_loaded(model, state)
    assert report.nbytes == sum(value.nbytes for value in state.values())
    assert {shown_file(parameter) for parameter in model.parameters()} == {str(path)}
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()), "each can be saved alone"
    with torch.no_grad():
        model.head.weight.fill_(7)
    assert path.read_bytes() == before, "what is written stays in memory"
    assert model.embed.weight.equal(state["embed.weight"])


def test_what_is_not_as_in_the_file_is_not_mapped(path):
    """In another layout, converted, in place, or not aligned."""
    state = saved(TinyConvNet(), path)
    model, half, odd = (built_empty(TinyConvNet) for _ in range(3))
    load_weights(model, path, mapped=True)
    assert_loaded(model, state)
    in_memory = {name for name, p in model.named_parameters() if shown_file(p) != str(path)}
    assert in_memory == {name for name, p in TinyConvNet().named_parameters() if not p.is_contiguous()} != set()
    load_weights(half, path, dtype=torch.bfloat16, mapped=True)
    existing = TinyConvNet()
    load_weights(existing, path, mapped=True)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    load_weights(odd, path, mapped=True)
    for each in (existing, odd):
        assert_loaded(each, state)
    assert str(path) not in {shown_file(p) for each in (half, existing, odd) for p in each.parameters()}


def test_a_file_that_is_larger_than_memory_is_mapped(path):
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("MemTotal", "SwapTotal")))
    numel = (memory + (1 << 30)) // 4
    begin = encode_header([("weight", torch.float32, (numel,))], {})
    path.write_bytes(begin)
    os.truncate(path, len(begin) + 4 * numel)  # of which the disk has one block
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(numel, device="meta"))
    load_weights(model, path, mapped=True)
    assert model.weight.shape == (numel,) and shown_file(model.weight) == str(path)
    assert model.weight[0] == model.weight[-1] == 0
