"""A filesystem with reflinks, in an image file that is mounted for a test."""

import contextlib
import shutil
import subprocess

import pytest

_NBYTES = 400 << 20  # the smallest that mkfs.xfs takes is 300 MiB; the file is sparse


@contextlib.contextmanager
def filesystem_with_reflinks(folder):
    """Yield a folder on it; skip the test where there is no `mkfs.xfs`, or nothing can be mounted."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with open(image, "wb") as file:
        file.truncate(_NBYTES)
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("there is no mkfs.xfs")
    for command in (["mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, mounted]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no filesystem can be mounted: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)
