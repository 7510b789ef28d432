"""A gate before the updates that run behind."""

import threading
import time

from lightning_cxl.optim.cpu_adam import AdamStep


class Gate:
    """Holds every update on the worker until it is opened."""

    def __init__(self, monkeypatch):
        self.is_open = threading.Event()
        self.num_waiting = 0
        apply = AdamStep.apply

        def gated(step, work, scale):
            if threading.current_thread() is not threading.main_thread():
                self.num_waiting += 1
                assert self.is_open.wait(30), "nobody opened the gate: the step waits for its updates"
            apply(step, work, scale)

        monkeypatch.setattr(AdamStep, "apply", gated)

    def open_when_one_waits(self):
        deadline = time.monotonic() + 30
        while not self.num_waiting and time.monotonic() < deadline:
            time.sleep(1e-3)
        self.is_open.set()
