"""The memory of a benchmark's own process that no file backs, watched while it works."""

import threading
from pathlib import Path


class Growth(threading.Thread):
    """Watches the process's own memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = anonymous_bytes()
        self._over = threading.Event()

    def run(self) -> None:
        """Look every 2 ms."""
        while not self._over.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def stop(self) -> int:
        """Return what was added at the peak."""
        self._over.set()
        self.join()
        return max(self.peak, anonymous_bytes()) - self.before


def anonymous_bytes() -> int:
    """Return what this process has of memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this needs Linux 4.5 or newer")
