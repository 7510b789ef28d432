"""What no boot of a guest is needed for."""

import subprocess

from tests.numa_vm.initrd import job_text


def test_job_runs_in_its_folder_with_its_environment_only(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    text = job_text(["sh", "-c", 'pwd; echo "$A|$HOME"; exit 3'], str(folder), {"A": "b c'd", "PATH": "/usr/bin:/bin"})
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
    assert done.stdout == f"{folder}\nb c'd|\n" and done.returncode == 3
