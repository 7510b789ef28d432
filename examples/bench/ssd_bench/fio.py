"""fio, the usual benchmark of disks, where it is installed: one pass over a file, and settings to choose from."""

import json
import shutil
import subprocess
from typing import Any, NamedTuple

from lightning_cxl.errors import LightningCXLError
from lightning_cxl.text import format_bytes
from ssd_bench.disk_area import BLOCK_BYTES, DiskArea

ENGINES = ("io_uring", "libaio")
_DEPTHS = (4, 16, 64)
_LARGEST_BLOCK = 16 << 20
_SMALLEST_PART = 64 << 10
_MOST_IN_FLIGHT = 64 << 20  # fio touches memory for the first time within its pass


class Pass(NamedTuple):
    """One pass over all bytes."""

    seconds: float
    cpu_seconds: float
    """User and system time of the threads that make the calls."""


class Setting(NamedTuple):
    """How fio reads and writes."""

    engine: str
    block_bytes: int
    depth: int
    """Blocks in flight."""

    def __str__(self) -> str:
        return f"fio {self.engine}, {self.depth} x {format_bytes(self.block_bytes)}"


def is_installed() -> bool:
    """Return whether there is a program `fio`."""
    return shutil.which("fio") is not None


def run(area: DiskArea, nbytes: int, setting: Setting, *, writes: bool) -> Pass:
    """Let fio go over the first bytes of a file once, from front to back, `fsync` at the end of writes included.

    Its time is that of its input and output: not that of its start.

    Raises:
        LightningCXLError: fio failed.
    """
    direction = "write" if writes else "read"
    command = [
        "fio", "--name=area", f"--filename={area.path}", "--allow_file_create=0", "--thread=1",
        f"--size={nbytes // setting.block_bytes * setting.block_bytes}", f"--rw={direction}",
        f"--bs={setting.block_bytes}", f"--ioengine={setting.engine}", f"--iodepth={setting.depth}",
        f"--direct={int(area.direct)}", "--end_fsync=1", "--output-format=json",
        # nothing beside input and output: no new contents, no clock at every request
        "--refill_buffers=0", "--scramble_buffers=0", "--gtod_reduce=1",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    try:
        job: dict[str, Any] = json.loads(ended.stdout)["jobs"][0]
        seconds = job[direction]["runtime"] / 1e3 * nbytes / job[direction]["io_bytes"]
        cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    except (ValueError, LookupError, ZeroDivisionError):
        ended.returncode = ended.returncode or 1
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        raise LightningCXLError(f"{setting} failed: {said[-1] if said else f'exit status {ended.returncode}'}")
    return Pass(seconds, cpu_seconds)


def settings(engine: str, tensor_bytes: int) -> list[Setting]:
    """Return what is tried for tensors of one size: no block is larger than a tensor."""
    whole = min(tensor_bytes, _LARGEST_BLOCK)
    blocks = {whole, whole // 4} if whole // 4 >= _SMALLEST_PART and whole // 4 % BLOCK_BYTES == 0 else {whole}
    found = [Setting(engine, block, depth) for block in sorted(blocks) for depth in _DEPTHS]
    return [setting for setting in found if setting.block_bytes * setting.depth <= _MOST_IN_FLIGHT]
