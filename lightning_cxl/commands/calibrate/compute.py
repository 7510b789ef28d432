"""How fast a device multiplies bf16 matrices: what a model's training comes close to where nothing else holds it up."""

import time
from functools import partial

import torch

from lightning_cxl.commands.calibrate.options import Figure, Options
from lightning_cxl.commands.measuring.timing import Contender, measure
from lightning_cxl.transfer.engine import TransferEngine


def measure_flops(engine: TransferEngine, options: Options) -> dict[int, Figure]:
    """Return floating-point operations per second by the size of square matrices, smallest first.

    The smallest size is always measured, larger ones while they do not take too long.
    """
    contenders: list[Contender] = []
    expected_s = 0.0
    for size in options.matmul_sizes:
        if expected_s > options.matmul_seconds:
            break
        product = _Product(engine, size)
        product()  # loads libraries and starts threads
        start = time.perf_counter()
        product()
        expected_s = 8 * (time.perf_counter() - start)
        contenders.append(Contender(str(size), partial(_itself, product)))
    timings = measure(contenders, options.rounds)
    return {
        int(name): Figure(2 * int(name) ** 3 / timings.median(name), timings.spread(name)) for name in timings.seconds
    }


def _itself(product: "_Product") -> "_Product":
    return product


class _Product:
    def __init__(self, engine: TransferEngine, size: int) -> None:
        self._engine = engine
        generator = torch.Generator().manual_seed(size)
        matrices = torch.randn(2, size, size, generator=generator).to(torch.bfloat16).to(engine.device)
        self._left, self._right = matrices
        self._out = torch.empty_like(self._left)

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._out)
        self._engine.mark().wait_host()
