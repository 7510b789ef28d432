"""Weights that show the pages of their files."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_cxl.weights import files as header
from lightning_cxl.weights.load import load_weights
from tests.models import TinyConvNet, TinyTransformer
from tests.unit.weights.test_load import assert_loaded, built_empty, saved


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
    """Converted, in another layout, in place, or not aligned."""
    state = saved(TinyConvNet(), path)
    model = built_empty(TinyConvNet)
    load_weights(model, path, mapped=True)
    assert_loaded(model, state)
    in_memory = {name for name, p in model.named_parameters() if shown_file(p) != str(path)}
    assert in_memory == {name for name, p in TinyConvNet().named_parameters() if not p.is_contiguous()} != set()
    half = built_empty(TinyConvNet)
    load_weights(half, path, dtype=torch.bfloat16, mapped=True)
    existing = TinyConvNet()
    load_weights(existing, path, mapped=True)
    for each in (*half.parameters(), *existing.parameters()):
        assert shown_file(each) != str(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    odd = built_empty(TinyConvNet)
    load_weights(odd, path, mapped=True)
    assert_loaded(odd, state)
    assert all(shown_file(p) != str(path) for p in odd.parameters())


def test_a_file_that_is_larger_than_memory_is_mapped(path):
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("MemTotal", "SwapTotal")))
    numel = (memory + (1 << 30)) // 4
    begin = header.encode_header([("weight", torch.float32, (numel,))], {})
    with open(path, "xb") as file:  # of which the disk has one block
        file.write(begin)
        file.truncate(len(begin) + 4 * numel)
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(numel, device="meta"))
    load_weights(model, path, mapped=True)
    assert model.weight.shape == (numel,) and shown_file(model.weight) == str(path)
    assert model.weight[0] == model.weight[-1] == 0
