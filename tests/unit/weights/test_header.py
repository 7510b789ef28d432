import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.errors import CheckpointError
from lightning_cxl.weights import files as header
from lightning_cxl.weights.files import TensorEntry, decode_header, encode_header

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4).map(tuple)), max_size=8
)


def parts(tensors, metadata=None):
    """Return the header's text and the number of data bytes of a file with these tensors."""
    encoded = encode_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()], metadata or {})
    length = int.from_bytes(encoded[:8], "little")
    assert len(encoded) == 8 + length and length % 8 == 0
    return encoded[8:], sum(TensorEntry(n, d, s, 0).nbytes for n, (d, s) in tensors.items())


@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=3))
def test_what_is_written_is_read(tensors, metadata):
    text, data_bytes = parts(tensors, metadata)
    entries, read = decode_header(text, data_bytes)
    assert {entry.name: (entry.dtype, entry.shape) for entry in entries} == tensors
    assert read == metadata
    assert [entry.begin for entry in entries] == sorted(entry.begin for entry in entries)


@given(TENSORS, st.data())
def test_a_header_with_any_byte_changed_is_read_or_refused_with_a_reason(tensors, data):
    text, data_bytes = parts(tensors)
    position = data.draw(st.integers(0, len(text) - 1))
    changed = bytearray(text)
    changed[position] = data.draw(st.integers(0, 255))
    try:
        entries, _ = decode_header(bytes(changed), data_bytes)
    except ValueError:
        return
    assert sum(entry.nbytes for entry in entries) == data_bytes, "whatever it says, it fits the file"


@given(st.binary(max_size=60), st.integers(0, 100))
def test_arbitrary_bytes_are_never_another_kind_of_error(text, data_bytes):
    with pytest.raises(ValueError):
        decode_header(b"[" + text, data_bytes)


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("content", "data_bytes", "reason"),
    [
        ({"a": entry()}, 7, "the file is cut off"),
        ({"a": entry()}, 9, "the rest belongs to no tensor"),
        ({"a": entry(), "b": entry(data_offsets=[4, 12])}, 12, "'b' begins at byte 4 .* overlaps"),
        ({"a": entry(), "b": entry(data_offsets=[12, 20])}, 20, "'b' begins at byte 12 .* gap"),
        ({"a": entry(data_offsets=[4, 12])}, 12, "gap"),
        ({"a": entry(shape=[3])}, 8, "takes 12 bytes, but its data_offsets .* span 8"),
        ({"a": entry(shape=[-2])}, 8, r"the shape \[-2\]"),
        ({"a": entry(shape=[True, 2])}, 8, r"the shape \[True, 2\]"),
        ({"a": entry(shape=[2.0])}, 8, "the shape"),
        ({"a": entry(shape=None)}, 8, "the shape"),
        ({"a": entry(data_offsets=[8, 0])}, 8, "the data_offsets"),
        ({"a": entry(data_offsets=[0])}, 8, "the data_offsets"),
        ({"a": entry(data_offsets=[0, 2**80])}, 8, "data_offsets"),
        ({"a": entry(dtype="F4")}, 8, "the dtype 'F4'; this version reads BOOL"),
        ({"a": entry(dtype=["F32"])}, 8, "the dtype"),
        ({"a": {"dtype": "F32"}}, 8, "'a' has not dtype, shape and data_offsets"),
        ({"a": 3}, 8, "'a' has not"),
        ({"__metadata__": {"format": 1}}, 0, "__metadata__ is not a table of strings"),
        ([], 0, "not a JSON object"),
    ],
)
def test_what_the_format_does_not_allow_is_named(content, data_bytes, reason):
    with pytest.raises(ValueError, match=reason):
        decode_header(json.dumps(content).encode(), data_bytes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":{"dtype":"F32","dtype":"F16"}}', "names 'dtype' twice"),
        (b'{"a":1,"a":2}', "names 'a' twice"),
        (b'{"a"', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b" {}", "not a JSON object"),
        (b'{"a":' + b"[" * 100_000, "not JSON"),
    ],
)
def test_damaged_text_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        decode_header(text, 0)


def test_names_and_dtypes_that_cannot_be_written():
    with pytest.raises(CheckpointError, match="__metadata__"):
        encode_header([("__metadata__", torch.float32, (1,))], {})
    with pytest.raises(CheckpointError, match="two tensors named 'a'"):
        encode_header([("a", torch.float32, (1,)), ("a", torch.float32, (1,))], {})
    with pytest.raises(CheckpointError, match=r"cannot hold torch\.complex128; they hold .*float32"):
        encode_header([("a", torch.complex128, (1,))], {})


def test_a_header_too_large_is_not_written(monkeypatch):
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 50)
    with pytest.raises(CheckpointError, match="write more, smaller files"):
        encode_header([("a" * 50, torch.float32, (1,))], {})
