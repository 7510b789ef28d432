"""Types of the compiled module `cython_ext/_adam.pyx`."""

from typing_extensions import Buffer

SPAN_FIELDS: int
SCALAR_FIELDS: int

def update(spans: Buffer, scalars: Buffer, num_threads: int, isa: str) -> None: ...
def advance(steps: Buffer, values: Buffer) -> None: ...
