"""A gate before the updates that run behind."""

import threading

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
