"""`inside/` is collected in a guest only: its tests need memory-only nodes, see README.md."""

import os

collect_ignore = [] if "NUMA_VM" in os.environ else ["inside"]
