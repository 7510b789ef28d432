import pytest
from simulation.addresses import AddressMap

from lightning_cxl.memory.resource import Buffer, Span


def buffer(address, nbytes, *tiers):
    """A buffer (of no real memory) whose tiers have equal parts."""
    part = nbytes // len(tiers)
    spans = tuple(Span(tier, node, node * part, part) for node, tier in enumerate(tiers))
    return Buffer(address, nbytes, spans, None)


@pytest.mark.parametrize("new", [(0, 100), (40, 20), (20, 30), (50, 40), (10, 21), (99, 1), (0, 40), (60, 40)])
def test_memory_that_is_given_out_again_is_what_it_was_noted_as_last(new):
    addresses = AddressMap()
    for start, name in ((0, "first"), (40, "second"), (60, "third")):
        addresses.note(buffer(start, {0: 40, 40: 20, 60: 40}[start], "dram"), name)
    start, nbytes = new
    addresses.note(buffer(start, nbytes, "cxl"), "new")
    for address in range(100):
        try:
            name = addresses.name(address, 1)
        except KeyError:
            continue  # of an old buffer that the new one covers in part, and that is dead therefore
        assert (name == "new") == (start <= address < start + nbytes)
        assert addresses.shares(address, 1) == {"cxl" if name == "new" else "dram": 1.0}
    assert addresses.shares(start, nbytes) == {"cxl": 1.0}


@pytest.mark.parametrize(("address", "nbytes"), [(5, 1), (15, 6), (20, 1), (12, 20)])
def test_memory_that_nobody_noted_is_an_error(address, nbytes):
    addresses = AddressMap()
    addresses.note(buffer(10, 10, "dram"), "weights")
    addresses.note(buffer(30, 0, "dram"), "nothing")
    with pytest.raises(KeyError, match="note it when it is allocated"):
        addresses.shares(address, nbytes)
