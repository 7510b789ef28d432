import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "examples" / "lab"


def test_the_readme_of_the_lab_names_everything_that_is_there_and_nothing_else():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (LAB / "README.md").read_text()))
    found = {path.name if path.suffix else f"{path.name}/" for path in LAB.iterdir() if path.name[0] not in "_R"}
    assert found <= named
    assert [name for name in named - found if not (ROOT / name).exists()] == []


def test_the_readme_of_the_lab_gives_the_command_that_each_script_gives():
    text = (LAB / "README.md").read_text()
    for script in re.findall(r"python (examples/lab/\w+\.py) --quick", text):
        assert f"python {script} " in (ROOT / script).read_text()
    assert text.count("python examples/lab/") == 4
