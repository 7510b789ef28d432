"""One check on the device, in a process of its own: `python -m tests.gpu.checks NAME DEVICE` prints one line of JSON.

A check returns its figures; an assertion that fails, or any other error, makes it fail.
"""

import importlib.metadata
import json
import platform
import sys
import traceback
import warnings
from typing import Any

import torch

import lightning_cxl
from lightning_cxl.commands.env import environment_report
from tests import training_device
from tests.gpu import jobs

Figures = dict[str, Any]
PACKAGES = ("peft", "datasets", "jsonargparse", "bitsandbytes", "Cython", "setuptools", "pytest", "triton")


def environment() -> Figures:
    """Return what the figures were taken on."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    found = {**environment_report(), "packages": {name: installed.get(name) for name in PACKAGES}}
    found |= {"package": lightning_cxl.__file__, "platform": platform.platform()}
    if training_device.chosen.type == "cuda":
        properties = torch.cuda.get_device_properties(training_device.chosen)
        found |= {"name": properties.name, "device_bytes": properties.total_memory,
                  "capability": torch.cuda.get_device_capability(training_device.chosen)}  # fmt: skip
    return found


def bit_identical() -> Figures:
    """Train streamed and resident on the device: the same kernels on the same values, so the same bits.

    Resident is the strategy with weights and activations on the device: its optimizer computes on the same CPU.
    """
    found: Figures = {}
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        resident, again, ours = (
            jobs.train(options, precision) for options in (jobs.RESIDENT, jobs.RESIDENT, jobs.STREAMED)
        )
        equal = [
            losses == resident[0] and all(torch.equal(weights[name], value) for name, value in resident[1].items())
            for losses, weights in (again, ours)
        ]
        found[precision] = {"resident_equals_itself": equal[0], "streamed_equals_resident": equal[1]}
    assert all(each["streamed_equals_resident"] for each in found.values()), found
    return found


def peak_of_depth() -> Figures:
    """Train 8, 16 and 32 units with the host far ahead: the device's peak does not grow with them."""
    found: Figures = {}
    for depth in (8, 16, 32):
        found[str(depth)] = statistics = jobs.peak(depth)
        statistics["reserved_in_units"] = statistics["reserved"] / jobs.unit_bytes()
    growth = found["32"]["reserved"] / found["8"]["reserved"]
    assert found["32"]["retries"] == 0, found
    assert growth < 1.15, f"from 8 to 32 units the reserved peak grew {growth:.2f} times: {found}"
    return {**found, "reserved_32_over_8": growth}


def overlap() -> Figures:
    """Profile one step: weights come while the unit before computes, and updates run behind the backward."""
    found = jobs.copies_beside_compute()
    assert found["updates_behind_backward"] > 0, f"another schedule ran: {found}"
    share = found["h2d_beside_compute_s"] / found["h2d_s"]
    assert share > 0.5, f"only {share:.0%} of the copies to the device ran beside kernels: {found}"
    return {**found, "share": share}


def lengths() -> Figures:
    """Train on lengths that change: after warm-up nothing is registered with the driver.

    How many inputs are on their way at once is a matter of time: a slab more may be taken in one of the first steps.
    """
    counts, nbytes = jobs.registrations_by_step()
    assert nbytes > 0, f"nothing was registered: {counts}"
    assert not any(counts[len(counts) // 2 :]), f"registrations by step: {counts}"
    return {"registrations_by_step": counts, "registered_bytes": nbytes}


def second_device() -> Figures:
    """Train on device 1 of two: device 0 stays empty."""
    if torch.accelerator.device_count() < 2:
        return {"state": "skipped", "reason": "needs two devices"}
    jobs.train(jobs.STREAMED, "32-true", devices=[1])
    held = [torch.accelerator.max_memory_reserved(index) for index in range(2)]
    assert held[0] == 0 < held[1], f"bytes reserved at most: {held}"
    return {"reserved": held}


def out_of_memory() -> Figures:
    """Run out of memory in forward, recompute and update; then fit again in the same process, and train as usual."""
    expected, _ = jobs.train(jobs.STREAMED, "32-true")
    found: Figures = {}
    for where in ("forward", "recompute", "update"):
        error = jobs.fail_in(where)
        losses, _ = jobs.train(jobs.STREAMED, "32-true")
        left = jobs.bytes_left()
        found[where] = {"error": error, "losses_as_before": losses == expected, "device_bytes_left": left}
    assert all(each["losses_as_before"] for each in found.values()), found
    assert found["update"]["device_bytes_left"] <= found["forward"]["device_bytes_left"], found
    return found


CHECKS = {
    each.__name__: each
    for each in (environment, bit_identical, peak_of_depth, overlap, lengths, second_device, out_of_memory)
}


def main(name: str, device: str) -> None:
    warnings.simplefilter("default")
    training_device.choose(device)
    if training_device.unavailable is not None:
        raise SystemExit(f"device {device}: {training_device.unavailable}")
    try:
        with training_device.on_chosen():  # at the end nothing may be left on the device, nor registered
            print(json.dumps(CHECKS[name](), default=str), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
