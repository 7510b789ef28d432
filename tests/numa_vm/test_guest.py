"""What no boot of a guest is needed for: QEMU's arguments, the job's shell text, and the way of a guest's output."""

import os
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.numa_vm.fetch import debian_mirror, load_order
from tests.numa_vm.guest import mount_points, relay
from tests.numa_vm.initrd import job_text
from tests.numa_vm.machine import MACHINES, numa_arguments

MARK = b"<end 0123>"


def relayed(*pieces, pause_s=0.0, wait_s=10.0):
    """Send pieces through a pipe; return what was passed on, piece by piece, and the line after the mark."""
    source, sink = os.pipe()

    def send():
        for piece in pieces:
            os.write(sink, piece)
            time.sleep(pause_s)
        os.close(sink)

    thread = threading.Thread(target=send)
    thread.start()
    passed = []
    try:
        return passed, relay(source, passed.append, MARK, time.monotonic() + wait_s)
    finally:
        thread.join()
        os.close(source)


def test_output_ends_at_the_mark_wherever_it_is_cut():
    whole = b"a <end of a line\n" + MARK + b"exit 3\n"
    for cut in range(1, len(whole)):
        passed, said = relayed(whole[:cut], whole[cut:], pause_s=0.002)
        assert b"".join(passed) == b"a <end of a line\n" and said == "exit 3", cut


def test_output_is_passed_on_as_it_comes_until_a_silent_guest_is_given_up():
    passed, said = relayed(b"one", b"two <en", b"d\n", pause_s=0.05)
    assert passed[:2] == [b"one", b"two "] and b"".join(passed) == b"onetwo <end\n"
    assert said == "", "the guest died"
    with pytest.raises(TimeoutError):
        relayed(b"one", pause_s=0.5, wait_s=0.1)


def test_packages_come_from_the_mirror_that_apt_uses():
    for sources, mirror in (
        ("Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm", "http://deb.debian.org/debian"),
        ("deb [signed-by=/k] https://mirror.example/debian/ bookworm main", "https://mirror.example/debian"),
        ("deb http://security.debian.org/debian-security bookworm-security main", "http://deb.debian.org/debian"),
        ("", "http://deb.debian.org/debian"),
    ):
        assert debian_mirror(sources) == mirror


def test_file_systems_that_hold_the_paths_are_found():
    table = "\n".join(
        f"{number} 1 0:{number} / {point} rw,relatime - ext4 /dev/x rw"
        for number, point in enumerate(["/", "/home", "/home/me/my\\040disk", "/proc"])
    )
    paths = [Path("/home/me/my disk/repo"), Path("/usr/bin"), Path("/home/me/.venv")]
    assert mount_points(paths, table) == ["/", "/home", "/home/me/my disk"]
    assert mount_points([Path("/usr")], table) == ["/"]
    assert mount_points([Path("/")])[0] == "/"


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


def numa(machine):
    return [value for name, value in pairwise(numa_arguments(machine)) if name == "-numa"]


def test_a_hot_plugged_node_is_a_dimm_and_no_memory_of_the_boot():
    hot = MACHINES["cxl1hot"]
    arguments = numa_arguments(hot)
    assert "3072M,slots=2,maxmem=64G" in arguments
    assert arguments[-2:] == ["-device", "pc-dimm,id=dimm1,memdev=m1,node=1"]
    assert "node,nodeid=1,initiator=0" in numa(hot)


def test_firmware_without_hmat_names_no_initiator_and_no_speed():
    arguments = numa_arguments(MACHINES["cxl1nohmat"])
    assert not any("hmat" in text or "initiator" in text for text in arguments)
    assert "node,nodeid=1,memdev=m1" in arguments


def test_two_sockets_have_their_cpus_cards_and_pci_ports():
    both = MACHINES["dual2"]
    assert both.sockets == (0, 1)
    arguments, nodes = numa_arguments(both), numa(both)
    assert "4,sockets=2,cores=2,threads=1" in arguments
    assert nodes[:4] == [
        "node,nodeid=0,cpus=0-1,memdev=m0,initiator=0",
        "node,nodeid=1,cpus=2-3,memdev=m1,initiator=1",
        "node,nodeid=2,memdev=m2,initiator=0",
        "node,nodeid=3,memdev=m3,initiator=1",
    ]
    rows = [[both.distance(source, target) for target in range(4)] for source in range(4)]
    assert rows == [[10, 21, 17, 25], [21, 10, 25, 17], [17, 25, 10, 29], [25, 17, 29, 10]]
    assert "dist,src=1,dst=3,val=17" in nodes and "dist,src=3,dst=0,val=25" in nodes
    speeds = [text for text in nodes if "target=3" in text and "access-latency" in text]
    assert [text.split(",")[1] + text[-4:] for text in speeds] == ["initiator=0=500", "initiator=1=250"]
    assert "pxb-pcie,id=pci1,bus=pcie.0,bus_nr=128,numa_node=1" in arguments
    assert not any("pxb" in text for text in numa_arguments(MACHINES["cxl2"]))
