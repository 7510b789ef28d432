"""Where tests let shared weights lie: on node 0."""

from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, NumaResource, allocate_pages


class OnOneTier:
    """Gives memory of one source to files of memory; see `SharedPlaces`."""

    def __init__(self, source=None, **options):
        self._source = source or NumaResource("dram", 0, Topology.detect(), **options)

    def place(self, parameter, nbytes):
        return 0

    def back(self, place, nbytes, fd):
        return allocate_pages(self._source, nbytes, HUGE_PAGE_BYTES, fd)

    def file(self, nbytes, fd):
        return self.back(0, nbytes, fd)
