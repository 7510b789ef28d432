"""`pages_of_file`: a file's pages as memory, which takes none."""

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping


def pages_of_file(fd: int, nbytes: int) -> Buffer:
    """Return a buffer that shows a file; what is written to it becomes memory of this process, and never the file's.

    The file may be larger than memory: the kernel is not asked to keep memory for writes, which it would refuse then
    (``torch.from_file`` does ask). The buffer stays valid when the file is closed.

    Args:
        fd: open for reading.
        nbytes: of the file, from its beginning.

    Raises:
        OSError: the file cannot be mapped.
    """
    mapping = Mapping(nbytes, inherit=True)
    mapping.show(0, mapping.nbytes, fd, 0)
    return Buffer(mapping.address, nbytes, (), None, mapping)
