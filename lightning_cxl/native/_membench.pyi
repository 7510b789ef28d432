"""Types of the compiled module `cython_ext/_membench.pyx`."""

from typing_extensions import Buffer

STREAM_FIELDS: int
MAX_GROUP_STREAMS: int
READ: int
UPDATE: int
WRITE: int
WRITE_PAST_CACHE: int

def sweep(streams: Buffer, num_threads: int, isa: str, pattern: int = 0) -> int: ...
