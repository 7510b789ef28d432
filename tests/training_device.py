"""The device that the tests that train run on: ``--device apart`` (the default), ``cpu`` or ``cuda``.

[Note: Where tests train]
* One process has one kind of device: the option says which, and it is made known before anything else happens.
* `current` is where the present test trains. It is the CPU unless the test, or its folder, uses the fixture
  ``on_device``; in tests/integration all tests do, but for those that are about the CPU as the device and say so by the
  marker ``on_cpu``.
* The plain run that results are compared with is Lightning's `SingleDeviceStrategy` on the same device. There the same
  kernels run on the same values, so results are equal bit for bit. On CUDA kernels that add in one order are chosen,
  and whatever optimizer or norm is given tensors of the device computes on copies in host memory: a GPU rounds square
  roots and sums as a CPU does not.
* Memory of the device, and pinned memory that is given back, is poisoned in every test on the device apart. A test that
  looks for races makes copies or kernels late, too (fixture ``late``). On other devices nothing can be made late.
* After each test nothing may be left: no race seen, no memory of the device, no host memory registered.
"""

import contextlib
import functools
import gc
import importlib
import os
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_cxl.devices import CudaDevices, register_device_type
from lightning_cxl.machine import recorder
from lightning_cxl.machine import topology as disk_space
from lightning_cxl.optim import cpu_adam
from lightning_cxl.run.user_loop import UserLoop
from tests import apart
from tests.apart_accelerator import ApartAccelerator, ApartDevices
from tests.cases import others_full


class CountedCuda(CudaDevices):
    """CUDA, and which addresses are page-locked."""

    def __init__(self):
        self.registered: set[int] = set()

    def register(self, address, nbytes):
        super().register(address, nbytes)
        self.registered.add(address)

    def unregister(self, address):
        super().unregister(address)
        self.registered.discard(address)


# what tests kill is not for the next training of whoever runs them
_killed = Path(tempfile.gettempdir(), "lightning_cxl-tests")
_killed.mkdir(exist_ok=True)
recorder._folder = lambda: _killed
NAMES = ("apart", "cpu", "cuda")
_OPTIMIZERS = ("adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta")
kernels_answer = disk_space.filesystem_of
# tests may take a folder in memory for a drive, users may not
if kernels_answer(Path(tempfile.gettempdir())) == "tmpfs":
    disk_space.filesystem_of = lambda folder: ""
LATE = {
    "nothing": {}, "copies": {"h2d": 1e-3, "d2h": 1e-3}, "kernels": {"kernel": 1e-4},
    "copies and kernels": {"h2d": 1e-3, "d2h": 1e-3, "kernel": 1e-4},
    "to the device": {"h2d": 2e-3}, "to the device, much": {"h2d": 1e-2},
    "to the host": {"d2h": 2e-3}, "to the host, much": {"d2h": 2e-2},
}  # fmt: skip
"""What `late` makes wait, in seconds for each copy or kernel."""
LATE_CASES = others_full(["copies and kernels", "copies", "kernels"], ["copies and kernels"])
"""For ``parametrize``: races show where both are late; where only one is, nothing else may hide them."""

CPU = torch.device("cpu")
chosen = CPU
"""What the option says."""
current = CPU
"""Where the present test trains."""
_apart_devices = ApartDevices()
_cuda_devices = CountedCuda()
unavailable: str | None = None
"""Why the chosen device cannot be used."""


def choose(name):
    """Make the device known to torch and to the package, once a process."""
    global chosen, unavailable
    if name == "apart":
        unavailable = apart.why_unavailable()
        if unavailable is None:
            apart.load()
            register_device_type(_apart_devices)
            chosen = torch.device("apart", 0)
    elif name == "cuda":
        unavailable = None if torch.cuda.is_available() else "needs a CUDA device"
        chosen = torch.device("cuda", 0)
        register_device_type(_cuda_devices)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        for name in _OPTIMIZERS:
            module = importlib.import_module(f"torch.optim.{name}")
            setattr(module, name, _on_the_host(getattr(module, name)))
        cpu_adam.fused_adam_ = _on_the_host(cpu_adam.fused_adam_)
        clip_grad = torch.nn.utils.clip_grad
        clip_grad._get_total_norm = _on_the_host(clip_grad._get_total_norm)
        for kind in ("flash", "mem_efficient", "cudnn"):  # kernels of attention that add in any order
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)


def _on_the_host(function):
    """Let a function that changes lists of tensors, or returns one, compute on copies in host memory."""

    def on_host(value):
        return value.cpu() if isinstance(value, torch.Tensor) else value

    @functools.wraps(function)
    def computes(*lists, **keywords):
        copies = [list(map(on_host, some)) if isinstance(some, list) else some for some in lists]
        device = next((each.device for some in lists if isinstance(some, list) for each in some), CPU)
        result = function(*copies, **keywords)
        for some, copied in zip(lists, copies, strict=True):
            for index, value in enumerate(copied if isinstance(some, list) else ()):
                if isinstance(some[index], torch.Tensor):
                    if some[index] is not value:
                        some[index].copy_(value)
                elif isinstance(value, torch.Tensor):  # a momentum that begins
                    some[index] = value.to(device)
        return result.to(device) if isinstance(result, torch.Tensor) else result

    return computes


def accelerator():
    """Return what a Trainer takes as its accelerator."""
    return ApartAccelerator() if current.type == "apart" else current.type


@contextlib.contextmanager
def on_chosen():
    """Train on the chosen device inside; afterwards nothing may be left there. Skips where there is no such device."""
    global current
    if unavailable is not None:
        pytest.skip(unavailable)
    current = chosen
    before = held()  # of tests that failed
    try:
        if current.type == "apart":
            _apart_devices.are_there = True
            apart.reset()
            apart.set_poison(True)
        yield current
        races = _races()
        left = _left(before)
    finally:
        current = CPU
        _apart_devices.are_there = False
        if chosen.type == "apart":
            apart.reset()
    assert not races, "\n".join(races)
    assert not left, f"left behind: {left}"


def _races():
    if chosen.type != "cpu":
        torch.accelerator.synchronize()
    return apart.violations() if chosen.type == "apart" else []


def forget_races():
    """Wait, and forget what races were seen, in a test that makes one."""
    _races()
    if chosen.type == "apart":
        apart.clear_violations()


def _left(before):
    """Return what is held and was not before; garbage is collected only if something is."""
    for _ in range(3):  # what has a finaliser of its own goes one round later
        if held() != before:
            gc.collect()
            close_loops()
    return {name: now - before[name] for name, now in held().items() if now > before[name]}


def close_loops():
    """Close loops that a test has left open: torch keeps their hooks, and these all memory of their runs."""
    for each in gc.get_objects():
        if type(each) is UserLoop and each.__dict__.get("_prepared"):
            each.close()


def clear_workspaces():
    """Give back what cuBLAS keeps for every stream and thread that has multiplied matrices: it is nobody's leak."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if chosen.type == "cuda" and clear is not None:
        torch.cuda.synchronize()
        clear()


def held():
    """Return what the chosen device has of memory, and of registered host memory."""
    if chosen.type == "cpu":
        return {}
    clear_workspaces()
    found = {"bytes on the device": torch.accelerator.memory_allocated(chosen.index)}
    if chosen.type == "cuda":
        found["registrations"] = len(_cuda_devices.registered)
    if chosen.type == "apart":
        usage = apart.host_usage()
        found |= {"registrations": usage.registrations, "copies under way in freed memory": usage.waiting_blocks}
    return found


def needs_late(needed=True):
    """Skip a test of what is only seen while a copy is under way, where copies cannot be made late."""
    if needed and chosen.type == "cuda":
        pytest.skip("copies of this device cannot be made late")


def make_late(what):
    """Delay what `LATE` says for the rest of the test; only the device apart can."""
    if current.type == "apart":
        apart.set_delay(**LATE[what])
