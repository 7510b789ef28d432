"""Predictions against measurements, and what holds for every machine.

Measured: raw data of the authors of arXiv 2507.03305, github.com/DandinPower, folder `example` of each repository.
`-s` prints the largest errors.
"""

from pathlib import Path

import pytest

from lightning_cxl.machine.speeds import load_machine
from lightning_cxl.planning.job import predict_adam_seconds, predict_copy_seconds

MACHINES = Path(__file__).resolve().parents[4] / "examples" / "machines"
PAPER = load_machine(MACHINES / "paper_a.yaml")
GIB, MIB = 2**30, 2**20
TOLERANCE = 0.08

# numa-cpu-adam-bench, one process: elements, the card's share, milliseconds of an update
ADAM = [
    (67_900_000, 0, 6.312), (67_900_000, 1, 23.75),
    (73_400_320, 0, 6.903475), (73_400_320, 1, 25.723525),
    (73_400_320, 1 / 2, 13.258038), (73_400_320, 2 / 3, 17.756514),
    (73_400_320, 3 / 4, 19.385301), (73_400_320, 4 / 5, 20.839248),
    (545_000_000, 0, 54.83), (545_000_000, 1, 228.8),
    (671_088_640, 0, 67.625959), (671_088_640, 1, 273.293186),
    (671_088_640, 1 / 2, 138.926295), (671_088_640, 2 / 3, 175.588529),
    (671_088_640, 3 / 4, 200.241537), (671_088_640, 4 / 5, 216.251592),
]  # fmt: skip

# numa-gpu-xfer-bench, one GPU: MiB, the card's share, milliseconds of a copy to the device and from it
COPIES = [
    (64, 0, 1.21316, 1.21586), (128, 0, 2.42078, 2.424), (256, 0, 4.83443, 4.84374), (512, 0, 9.66112, 9.67931),
    (1024, 0, 19.3182, 19.3493), (2048, 0, 38.6314, 38.6934),
    (64, 1, 1.21737, 1.21426), (128, 1, 2.45648, 2.58275), (256, 1, 4.95443, 6.14526), (512, 1, 9.97096, 13.4816),
    (1024, 1, 19.9704, 27.9887), (2048, 1, 40.1498, 57.708),
    (64, 1 / 2, 1.21483, 1.21921), (128, 1 / 2, 2.4194, 2.4271), (256, 1 / 2, 4.83528, 4.84519),
    (512, 1 / 2, 9.66369, 9.69304), (1024, 1 / 2, 19.3157, 19.6872), (2048, 1 / 2, 38.6266, 40.0606),
    (64, 2 / 3, 1.21384, 1.2192), (128, 2 / 3, 2.42317, 2.427), (256, 2 / 3, 4.83574, 4.895),
    (512, 2 / 3, 9.66222, 10.0996), (1024, 2 / 3, 19.3162, 20.7701), (2048, 2 / 3, 38.6212, 43.5853),
    (64, 3 / 4, 1.21223, 1.2194), (128, 3 / 4, 2.4185, 2.42821), (256, 3 / 4, 4.83325, 5.15755),
    (512, 3 / 4, 9.66109, 10.8456), (1024, 3 / 4, 19.3195, 22.621), (2048, 3 / 4, 38.6253, 46.3201),
    (64, 4 / 5, 1.21199, 1.21539), (128, 4 / 5, 2.41947, 2.43071), (256, 4 / 5, 4.834, 5.28455),
    (512, 4 / 5, 9.66382, 11.1153), (1024, 4 / 5, 19.3188, 22.8463), (2048, 4 / 5, 38.6294, 47.5593),
]  # fmt: skip

# numa-gpu-xfer-bench, two GPUs at once, 2 GiB each: the card's share, GiB/s of each GPU to the device and from it
TWO_GPUS = [
    (0, 51.8, 51.2), (1, 24.9, 18.2),
    (1 / 2, 49.6, 34.4), (2 / 3, 37.2, 26.6), (3 / 4, 33.1, 23.7), (4 / 5, 31.0, 22.3),
]  # fmt: skip


def split_of(card_share):
    return {"dram0": 1 - card_share, "cxl0": card_share}


def check(name, rows):
    """Fail where a prediction is off by more than the tolerance, and print the largest error."""
    errors = {row: predicted / measured - 1 for row, predicted, measured in rows}
    worst = max(errors, key=lambda row: abs(errors[row]))
    print(f"\n{name}: {len(errors)} measurements, largest error {errors[worst]:+.1%} at {worst}")
    assert abs(errors[worst]) < TOLERANCE


def test_adam_takes_as_long_as_measured():
    check(
        "Adam",
        [((n, share), predict_adam_seconds(n, split_of(share), PAPER) * 1e3, measured) for n, share, measured in ADAM],
    )


@pytest.mark.parametrize(("direction", "column"), [("h2d", -2), ("d2h", -1)])
def test_copies_of_one_device_and_of_two_take_as_long_as_measured(direction, column):
    def seconds(nbytes, share, count=1):
        return predict_copy_seconds(nbytes, split_of(share), PAPER, direction, num_devices=count)

    one = [(row[:2], seconds(row[0] * MIB, row[1]) * 1e3, row[column]) for row in COPIES]
    check(f"{direction}, one GPU", one)
    check(f"{direction}, two GPUs", [(row[:1], 2 / seconds(2 * GIB, row[0], 2), row[column]) for row in TWO_GPUS])
