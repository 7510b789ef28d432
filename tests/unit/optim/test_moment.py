"""One moment in three precisions, in any element order; 8-bit state of other shards."""

import pytest
import torch

from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim import parameter_state
from lightning_cxl.optim.kernels import decode, dynamic_map, encode, num_blocks
from lightning_cxl.optim.parameter_state import Moment, allocate_from_torch, choose_precision, moment_bytes
from tests.numerics.reference import blockwise

PRECISIONS = ["fp32", "bf16", "8bit"]
ROLES = [TensorRole.MOMENTUM, TensorRole.VARIANCE]
SHAPES = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.contiguous().permute(3, 2, 1, 0),
}


def values(role, layout="contiguous"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, 3, 5, generator=generator) * 10 ** torch.randn(6, 8, 3, 5, generator=generator)
    return SHAPES[layout](x.abs() if role is TensorRole.VARIANCE else x)


def read(moment):
    if moment.scales is None:
        return moment.values.float()
    return decode(moment.values, moment.scales, unsigned=moment.unsigned)


def make(like, role, precision):
    return Moment(like, role, precision, allocate_from_torch)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_load_keeps_what_the_format_can_hold(precision, role, layout):
    saved = values(role, layout)
    moment = make(saved, role, precision)
    moment.load(saved)
    assert moment.values.stride() == saved.stride()
    found = read(moment)
    if precision == "fp32":
        assert torch.equal(found, saved)
    elif precision == "bf16":
        assert torch.equal(found, saved.bfloat16().float())
    else:
        in_memory = saved.as_strided((saved.numel(),), (1,))
        codes, scales = blockwise.quantize(in_memory, unsigned=moment.unsigned)
        assert torch.equal(moment.flat, codes) and torch.equal(moment.scales, scales)
        assert torch.equal(moment.scales[0], in_memory[:256].abs().max())
        worst = float(((found - saved).abs() / scales.repeat_interleave(256)[: saved.numel()].max()).max())
        assert 0 < worst < 0.015


def test_which_precision():
    large, small = torch.zeros(64, 64), torch.zeros(4095)
    for wanted in PRECISIONS:
        assert choose_precision(large, wanted, sensitive=False) == wanted
        assert choose_precision(small, wanted, sensitive=False) == "fp32"
        assert choose_precision(large, wanted, sensitive=True) == ("fp32" if wanted == "8bit" else wanted)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes(precision):
    for numel in (0, 1, 256, 257, 4096):
        asked = []

        def allocate(parameter, role, dtype, count, asked=asked):
            asked.append(count * dtype.itemsize)
            return torch.empty(count, dtype=dtype)

        Moment(torch.zeros(numel), TensorRole.MOMENTUM, precision, allocate)
        assert moment_bytes(numel, precision) == sum(asked)
    assert moment_bytes(4096, precision) == {"fp32": 16384, "bf16": 8192, "8bit": 4096 + 64}[precision]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_codes_with_gaps_are_read_in_row_major_order(precision, role):
    saved = values(role)
    source = make(saved, role, "8bit")
    source.load(saved)
    gapped = torch.full((6, 8, 3, 10), 255, dtype=torch.uint8)[..., ::2].copy_(source.values)
    moment, other = make(saved, role, precision), make(saved, role, precision)
    moment.load(gapped, source.scales)
    other.load(source.values, source.scales)
    assert torch.equal(read(moment), read(other)) and read(moment).any()


def saved(values, begins):
    """Return the 8-bit state that ranks whose shards begin there would have saved of a flat parameter."""
    entry = {"step": torch.tensor(3.0)}
    for number, unsigned in ((1, False), (2, True)):
        codes = torch.empty(values.numel(), dtype=torch.uint8)
        for begin, end in zip(begins, [*begins[1:], values.numel()], strict=True):
            scales = torch.empty(num_blocks(end - begin))
            part = torch.empty(end - begin, dtype=torch.uint8)
            encode(values[begin:end].abs() if unsigned else values[begin:end].clone(), part, scales, unsigned=unsigned)
            codes[begin:end] = part
            entry[f"absmax{number}.{begin}"] = scales
        entry |= {f"state{number}": codes, f"qmap{number}": dynamic_map(unsigned)}
    return entry


@pytest.mark.parametrize("begins", [[0], [0, 1000], [0, 300, 5000], [0, 4097]])
@pytest.mark.parametrize("own", [(0, 6000), (0, 2500), (2500, 3500), (999, 2), (5000, 1000)])
def test_each_element_has_the_scale_of_its_shard(monkeypatch, begins, own):
    first, numel = own
    whole = torch.randn(6000, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 10, 6000)
    entry = saved(whole, begins)
    expected = {}
    for key, scales_key, unsigned in (("state1", "absmax1", False), ("state2", "absmax2", True)):
        parts = [
            decode(entry[key][begin:end].clone(), entry[f"{scales_key}.{begin}"], unsigned=unsigned)
            for begin, end in zip(begins, [*begins[1:], 6000], strict=True)
        ]
        expected[key] = torch.cat(parts)[first : first + numel]
    parameter, shard = torch.zeros(6000), torch.zeros(numel)
    monkeypatch.setattr(parameter_state, "first_element", lambda p: first)
    monkeypatch.setattr(parameter_state, "local", lambda t: shard if t is parameter else t)
    mine = {key: value[first : first + numel] if key.startswith("state") else value for key, value in entry.items()}
    result = parameter_state.of_this_shard(mine, parameter)
    if (first, first + numel) in zip(begins, [*begins[1:], 6000], strict=True):  # it was saved so
        for codes, scales in (("state1", "absmax1"), ("state2", "absmax2")):
            assert result[codes] is mine[codes] and torch.equal(result[scales], entry[f"{scales}.{first}"])
        return
    for key, values_key in (("state1", "exp_avg"), ("state2", "exp_avg_sq")):
        torch.testing.assert_close(result[values_key], expected[key], rtol=1e-6, atol=0)
    assert not {name for name in result if name.startswith(("absmax", "state", "qmap"))}
