"""The guest's archive and the shell text of its job."""

import subprocess

import pytest

from tests.numa_vm.fetch import debian_mirror, load_order
from tests.numa_vm.initrd import cpio, initrd, job_text


def test_cpio_has_its_headers_names_and_padding():
    archive = cpio([("a", 0o100644, b"hello")])
    header = b"070701" + b"00000001" + b"000081A4" + b"00000000" * 2 + b"00000001" + b"00000000" + b"00000005"
    assert archive.startswith(header + b"00000000" * 4 + b"00000002" + b"00000000" + b"a\0" + b"hello\0\0\0")
    assert len(archive) % 4 == 0 and b"TRAILER!!!\0" in archive


def test_initrd_holds_all_that_its_first_process_reads(tmp_path):
    (tmp_path / "busybox").write_bytes(b"a program")
    (tmp_path / "0-overlay.ko").write_bytes(b"a module")
    shares = {"root": "/", "share1": "/home"}
    archive = initrd(tmp_path / "busybox", [tmp_path / "0-overlay.ko"], "true\n", shares, b"<end>")
    for part in (b"bin/busybox\0", b"a program", b"modules/0-overlay.ko\0", b"a module", b"root /\nshare1 /home\n"):
        assert part in archive
    assert b"#!/bin/busybox sh\n" in archive


def test_job_runs_in_its_folder_with_its_environment_only(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    text = job_text(["sh", "-c", 'pwd; echo "$A|$HOME"; exit 3'], str(folder), {"A": "b c'd", "PATH": "/usr/bin:/bin"})
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
    assert done.stdout == f"{folder}\nb c'd|\n" and done.returncode == 3


def test_a_job_whose_folder_is_missing_says_so():
    assert subprocess.run(["sh", "-c", job_text(["true"], "/no/such", {})], capture_output=True).returncode == 125


def test_modules_come_after_those_they_depend_on(tmp_path):
    for name, depends in {"net-fs": "", "overlay": "net_fs,base", "base": "net_fs", "other": ""}.items():
        (tmp_path / f"{name}.ko").write_bytes(b"\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0")
    assert [path.name for path in load_order(tmp_path, ["overlay", "built_in"])] == [
        "net-fs.ko",
        "base.ko",
        "overlay.ko",
    ]


@pytest.mark.parametrize(
    ("sources", "mirror"),
    [
        ("Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm", "http://deb.debian.org/debian"),
        ("deb [signed-by=/k] https://mirror.example/debian/ bookworm main", "https://mirror.example/debian"),
        ("deb http://security.debian.org/debian-security bookworm-security main", "http://deb.debian.org/debian"),
        ("", "http://deb.debian.org/debian"),
    ],
)
def test_packages_come_from_the_mirror_that_apt_uses(sources, mirror):
    assert debian_mirror(sources) == mirror
