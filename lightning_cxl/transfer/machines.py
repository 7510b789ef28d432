"""Links of machines that others have measured."""

from lightning_cxl.transfer.links import Link, Links

_GIB = 2**30

# arXiv 2507.03305's machine. Copies and Adam: its authors' raw data, numa-gpu-xfer-bench and numa-cpu-adam-bench.
# DRAM: 671 M elements x 28 bytes (16 read, 12 written) in 67.6 ms.
_DRAM_BYTES_PER_S = 278e9
# GPU link (PCIe 5.0 x16), either direction: 51.8 GiB/s for copies of 2 GiB from DRAM.
_DEVICE_BYTES_PER_S = 51.8 * _GIB
# Fixed cost of a copy: 5 to 8 us, from copies of 64 KiB and less.
_COPY_LATENCY_S = 6.5e-6
# One CXL card (x16): two GPUs reading at once get 49.6 GiB/s of it together at every interleave,
_CARD_READ_BYTES_PER_S = 49.6 * _GIB
# and writing 34.4 to 36.5, in the middle 35.6.
_CARD_WRITE_BYTES_PER_S = 35.6 * _GIB
# Adam's mix flows at 66.7 to 68.8 GB/s, more than reading or writing alone: 1.5 gives 68.4.
_CARD_DUPLEX = 1.5


def paper_machine(num_cards: int = 1) -> Links:
    """Return the machine of arXiv 2507.03305: a GPU, tier ``dram``, and cards ``cxl0``, ``cxl1`` and so on.

    Args:
        num_cards: CXL cards; their bandwidths were measured on one.
    """
    card = Link(_CARD_READ_BYTES_PER_S, _CARD_WRITE_BYTES_PER_S, duplex=_CARD_DUPLEX)
    return Links(
        device=Link(_DEVICE_BYTES_PER_S, _DEVICE_BYTES_PER_S, _COPY_LATENCY_S, duplex=2),
        tiers={
            "dram": Link(_DRAM_BYTES_PER_S, _DRAM_BYTES_PER_S),
            **{f"cxl{index}": card for index in range(num_cards)},
        },
    )
