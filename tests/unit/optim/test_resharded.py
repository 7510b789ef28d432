"""8-bit state of shards other than the own one is decoded with the scales that it was saved with."""

import pytest
import torch

from lightning_cxl.optim import parameter_state as resharded
from lightning_cxl.optim.kernels import decode, dynamic_map, encode, num_blocks


def saved(values, begins):
    """Return the 8-bit state that ranks whose shards begin there would have saved of a flat parameter."""
    entry = {"step": torch.tensor(3.0)}
    for codes_key, scales_key, map_key, unsigned in (
        ("state1", "absmax1", "qmap1", False),
        ("state2", "absmax2", "qmap2", True),
    ):
        codes = torch.empty(values.numel(), dtype=torch.uint8)
        for begin, end in zip(begins, [*begins[1:], values.numel()], strict=True):
            scales = torch.empty(num_blocks(end - begin))
            part = torch.empty(end - begin, dtype=torch.uint8)
            encode(values[begin:end].abs() if unsigned else values[begin:end].clone(), part, scales, unsigned=unsigned)
            codes[begin:end] = part
            entry[f"{scales_key}.{begin}"] = scales
        entry |= {codes_key: codes, map_key: dynamic_map(unsigned)}
    return entry


@pytest.mark.parametrize("begins", [[0, 1000], [0, 300, 5000], [0, 4097]])
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
    monkeypatch.setattr(resharded, "first_element", lambda p: first)
    monkeypatch.setattr(resharded, "local", lambda t: shard if t is parameter else t)
    mine = {key: value[first : first + numel] if key.startswith("state") else value for key, value in entry.items()}
    result = resharded.of_this_shard(mine, parameter)
    if (first, first + numel) in zip(begins, [*begins[1:], 6000], strict=True):  # it was saved so
        assert {"state1", "absmax1", "state2", "absmax2"} <= result.keys()
        return
    for key, values_key in (("state1", "exp_avg"), ("state2", "exp_avg_sq")):
        torch.testing.assert_close(result[values_key], expected[key], rtol=1e-6, atol=0)
    assert not {name for name in result if name.startswith(("absmax", "state", "qmap"))}


def test_a_shard_that_was_saved_keeps_its_codes():
    entry = saved(torch.randn(6000), [0])
    result = resharded.of_this_shard(entry, torch.zeros(6000))
    assert result["state1"] is entry["state1"] and torch.equal(result["absmax2"], entry["absmax2.0"])
