"""Examples run, and what the documents say exists: files, names, options, layers, notes."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from footprint import PUBLISHED, zero_offload
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_cxl
from lightning_cxl.__main__ import main
from lightning_cxl.commands import verify
from lightning_cxl.commands.parsers import COMMANDS
from lightning_cxl.machine.speeds import load_machine
from tests.test_architecture import arrows, folder_of, home_of
from tests.test_public_names import OF_FRAMEWORKS

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README, MAP = ROOT / "README.md", ROOT / "lightning_cxl" / "README.md"
GUIDES = sorted((EXAMPLES / "guides").glob("*.md"))
FOR_USERS = [README, *GUIDES, *(EXAMPLES / name / "README.md" for name in ("bench", "conformance", "lab"))]
DOCUMENTS = [*FOR_USERS, MAP, MAP.with_name("DECISIONS.md"), ROOT / "cython_ext" / "README.md", ROOT / "CHANGELOG.md"]
MARKDOWN = [*DOCUMENTS, *sorted((ROOT / "tests").rglob("README.md"))]


def name_of(document):
    return str(document.relative_to(ROOT))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Examples and programs write into the current folder."""
    monkeypatch.chdir(tmp_path)


def test_the_quickstart_trains_and_prints_the_report(capsys):
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "CXL offload on cpu, finished" in shown or "CXL offload on cuda" in shown
    assert "blocks.0 to blocks.3" in shown and "CPUAdam" in shown
    (report,) = code_blocks(README, "text")
    assert "compute_weights" in report and set(report.splitlines()) <= set(shown.splitlines())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("configs/finetune_*.yaml")), ids=lambda path: path.name)
def test_every_yaml_parses(path, monkeypatch, capsys):
    assert "strategy: cxl_offload" in shown_by(monkeypatch, capsys, "fit", "--config", str(path), "--print_config")


def shown_by(monkeypatch, capsys, *command):
    """Return what a command of ours prints."""
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", *command])
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None)
    return capsys.readouterr().out


def test_the_batch_script_starts_what_exists_and_goes_back_to_the_queue(tmp_path, monkeypatch, capsys):
    script = EXAMPLES / "slurm" / "train.sbatch"
    text = script.read_text()
    fakes = {"srun": 'printf "%s\\0" "$@" > srun.txt; kill -USR1 $PPID; sleep 0.2', "scontrol": 'echo "$@" > queued'}
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": asked["job-name"], "SLURM_NNODES": asked["nodes"]}
    slurm["SLURM_NTASKS_PER_NODE"] = asked["ntasks-per-node"]
    slurm["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", script], env={**os.environ, **slurm}, timeout=60)
    assert (tmp_path / "queued").read_text() == "requeue 7\n"

    started = (tmp_path / "srun.txt").read_text().split("\0")[:-1]
    assert "--kill-on-bad-exit=1" in started
    fit = started[started.index("lightning_cxl") + 1 :]
    assert "strategy: cxl_offload" in shown_by(monkeypatch, capsys, *fit, "--print_config")

    (plan,) = re.findall(r"^#   python -m lightning_cxl (plan .*) \\\n#( .*)$", text, re.MULTILINE)
    monkeypatch.chdir(ROOT)  # the machine is a file of ours
    planned = shown_by(monkeypatch, capsys, *"".join(plan).replace("FOLDER", "llama-3.1-8b").split())
    assert re.search(r"host memory: \S+ GiB of each machine", planned)


PROGRAMS = [path for path in EXAMPLES.glob("bench/*.py") if re.search(r"(?s)argparse.*__main__", path.read_text())]


@pytest.mark.parametrize("path", sorted(PROGRAMS), ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports_and_tells_its_options(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code in (0, None) and "usage: " in capsys.readouterr().out


def code_blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def without_code(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


class Trains(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trains_and_reports(names, shown):
    assert names["trainer"].global_step == 20
    assert "compute_weights" in shown


def places(names, _):
    assert names["strategy"].config.budgets() == {"dram": 48 << 30}
    assert lightning_cxl.residency(names["cache"]) == {"cxl": 4194304}
    assert lightning_cxl.residency(names["table"]) == {"dram": 4194304}
    machine = load_machine(EXAMPLES / "machines" / "paper_a.yaml")
    decision = names["own"]._session._policy.decide(zero_offload(PUBLISHED["qwen2.5-7b"], 1, 4096), machine)
    assert decision.splits[lightning_cxl.TensorRole.MOMENTUM] == {"dram0": 0.8, "cxl0": 0.2}
    assert decision.splits[lightning_cxl.TensorRole.ACTIVATIONS] == {"cxl0": 1.0}


def loads(names, _):
    saved = names["trained"].state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in names["network"].state_dict().items())
    tuned = names["Tuned"]()
    tuned.configure_model()
    assert {parameter.dtype for parameter in tuned.parameters()} == {torch.bfloat16}


def resumes(names, _):
    assert names["trainer"].global_step == 2 and names["resumed"].global_step == 4
    assert "lightning_cxl" in torch.load("ours.ckpt") and "lightning_cxl" not in torch.load("plain.ckpt")


def accelerates(names, _):
    assert {p.grad for p in names["model"].parameters()} == {None} and len(names["norms"]) == len(names["same"]) == 8
    assert set(torch.load("checkpoint/optimizer.bin")) > {"state", "param_groups"}
    names["accelerator"].free_memory()


def loops(names, shown):
    assert "AdamW by CPUAdam" in shown and len(names["optimizer"].state_dict()["state"]) == 8
    saved = torch.load("loop.ckpt")
    assert all(torch.equal(value, names["model"].state_dict()[name]) for name, value in saved["model"].items())


def packs(names, shown):
    assert shown == "[[0, 1, 2, 3, 0, 1], [0, 1, 2, 0]]\n"
    assert names["model"].lm_head.weight.grad is not None and names["arguments"] is not None


def goes_on(names, _):
    assert names["trainer"].state.global_step == 4 and names["trainer"].state.log_history
    assert "lightning_cxl" in torch.load("out/checkpoint-2/optimizer.pt")


def verifies(names, said):
    assert callable(names["model"])
    Path("file.py").write_text("\n".join(code_blocks(EXAMPLES / "guides" / "support.md", "python")))
    assert verify.main(["--script", "file.py"]) == 0


SHOWN = {
    "README.md": trains_and_reports,
    "examples/guides/accelerate.md": accelerates,
    "examples/guides/big_models.md": loads,
    "examples/guides/checkpoints.md": resumes,
    "examples/guides/fabric.md": loops,
    "examples/guides/long_contexts.md": packs,
    "examples/guides/policies.md": places,
    "examples/guides/support.md": verifies,
    "examples/guides/transformers.md": goes_on,
}
"""What the Python code of a document must have done, where more than to run."""


# Lightning's own advice about the worker count, the missing log and unused hooks
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if code_blocks(each, "python")], ids=name_of)
def test_the_python_code_of_a_document_runs_as_it_is(document, capsys):
    names = {"MyModule": Trains}
    for block in code_blocks(document, "python"):
        exec(compile(block, document, "exec"), names)
    if check := SHOWN.get(name_of(document)):
        check(names, capsys.readouterr().out)


def test_the_yaml_of_the_documents_parses(tmp_path, monkeypatch, capsys):
    blocks = [block for document in DOCUMENTS for block in code_blocks(document, "yaml")]
    assert blocks
    for block in blocks:
        path = tmp_path / "block.yaml"
        path.write_text(block)
        shown = shown_by(monkeypatch, capsys, "fit", "--config", str(path), "--print_config")
        assert "class_path: lightning_cxl.CXLOffloadStrategy" in shown


@pytest.mark.parametrize("document", FOR_USERS, ids=name_of)
def test_a_document_has_the_commands_and_targets_that_exist(document):
    text = document.read_text()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`|\S=\S+ )make ([\w-]+)", text, re.MULTILINE))
    assert named <= targets
    assert document != README or {"demo", "test"} <= named
    assert set(re.findall(r"(?:python -m lightning_cxl|lightning-cxl) (\w+)", text)) <= COMMANDS.keys()
    for name in re.findall(r'strategy="(\w+)"', text):
        assert name in lightning_cxl.StrategyRegistry


@pytest.mark.slow
def test_the_plan_that_the_guide_shows_is_what_the_command_says(monkeypatch, capsys):
    text = (EXAMPLES / "guides" / "policies.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    command, shown = (block for language, block in blocks if not language)
    monkeypatch.chdir(ROOT)  # the machine is a file of ours
    said = " ".join(shown_by(monkeypatch, capsys, *command.split()[3:]).split())  # as wide as the terminal
    assert [line for line in shown.splitlines() if line != "..." and " ".join(line.split()) not in said] == []


def test_every_command_is_in_the_guide():
    text = (EXAMPLES / "guides" / "configuration.md").read_text()
    assert [name for name in COMMANDS if not re.search(rf"^\|.*`{name}[` ].*\|", text, re.MULTILINE)] == []


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_lines_of_a_document_are_short_but_for_tables(document):
    """One word that is longer, such as a link, has a line of its own. Blocks of code may be wider, not the README's."""
    text = document.read_text() if document == README else without_code(document)
    long = [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert [line for line in long if " " in line.strip()] == []


def headings(document):
    """Return the anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", without_code(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_links_of_a_document_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.is_relative_to(ROOT) and target.is_file(), link
        assert not anchor or anchor in headings(target), link


def test_the_readme_is_short_and_leads_to_every_guide():
    assert len(README.read_text().splitlines()) <= 160
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", README.read_text())}
    assert [name_of(document) for document in DOCUMENTS if document != README and document not in linked] == []


@pytest.fixture(scope="module")
def site():
    """The names in the site's configuration."""
    return runpy.run_path(str(EXAMPLES / "site" / "conf.py"))


def test_every_document_is_in_the_sidebar(site):
    listed = ["README.md", *(f"{name}.md" for names in site["NAVIGATION"].values() for name in names)]
    assert len(listed) == len(set(listed)) and {name_of(each) for each in DOCUMENTS} <= set(listed)
    assert all((ROOT / name).is_file() and name.removesuffix(".md") in site["contents"]() for name in listed[1:])


def test_every_public_name_is_on_the_page_of_the_api(site):
    wanted = {f"lightning_cxl.{name}" for name in lightning_cxl.__all__}
    wanted |= {f"lightning_cxl.{each}.{name}" for each, names in OF_FRAMEWORKS for name in names}
    assert set(re.findall(r"^.. auto\w+:: ([\w.]+)$", site["api"](), re.MULTILINE)) == wanted


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_documents_name_exist(document):
    text = document.read_text()
    files = r"(?:[\w.-]+/)*[\w.-]+\.(?:py|pyx|pyi|yaml|h|md|svg|txt|toml)"
    named = set(re.findall(rf"`({files}|[\w/]+/)`", text))
    named |= {name for name in re.findall(rf"(?<![\w./<>*~-])({files})(?=[\s`,;:.)])", text) if "/" in name}
    roots = [document.parent, document.parent / "include", ROOT, ROOT / "lightning_cxl"]
    missing = [name for name in named if "..." not in name and not any((root / name).exists() for root in roots)]
    assert not missing
    assert named or document not in (README, MAP, ROOT / "cython_ext" / "README.md")


def test_every_public_name_is_in_the_table_and_no_other():
    names = " ".join(row[0] for row in table_after(MAP, "## Public names"))
    assert set(re.findall(r"`(\w+)`", names)) == set(lightning_cxl.__all__)


def test_every_option_is_in_the_table_with_its_default():
    rows = table_after(README, "## Options")
    default = lightning_cxl.OffloadConfig()
    shown = {row[0].strip("`"): row[1].strip("`").replace('"', "'") for row in rows}
    assert shown == {field.name: repr(getattr(default, field.name)) for field in fields(default)}


def test_the_table_of_versions_is_that_of_pip():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in ("test", "qlora", "accelerate") for each in project["optional-dependencies"][name]]
    wanted = dict(re.fullmatch(r"([a-z]+)(\S*)", each).groups() for each in [*extras, *project["dependencies"][:3]])
    named = {row[0]: row[1].strip("`") for row in table_after(EXAMPLES / "guides" / "support.md", "## Versions")}
    assert named.pop("python") == project["requires-python"]
    assert named == {name: wanted[name] for name in named}


def test_the_table_of_folders_is_true_and_in_order():
    """A folder is described as its own `__init__` describes it, and comes after those that it imports."""
    table = {row[0].strip("`/"): row[1] for row in table_after(MAP, "## Folders")}
    inits = [path for path in (ROOT / "lightning_cxl").rglob("__init__.py") if path.parent.name != "lightning_cxl"]
    folders = {str(path.parent.relative_to(ROOT / "lightning_cxl")): path for path in inits}
    assert table == {name: ast.get_docstring(ast.parse(path.read_text())) for name, path in folders.items()}
    place = {name.replace("/", "."): index for index, name in enumerate(table)}
    for own, others in arrows(folder_of, home_of).items():
        for other in others & place.keys() if own in place else ():
            assert place[other] < place[own], f"{own} imports {other}"


def test_every_note_is_listed_with_its_file_and_code_refers_to_no_other():
    found, rows = set(), table_after(MAP, "## Notes")
    for path in [*(ROOT / "lightning_cxl").rglob("*.py"), *(ROOT / "cython_ext").rglob("*.*")]:
        for name in re.findall(r"^\W*\[Note: ([^\]]+)\]$", path.read_text(errors="ignore"), re.MULTILINE):
            found.add((name, str(path.relative_to(ROOT / "lightning_cxl"))))
    assert {(row[0], row[1].strip("`")) for row in rows} == found
    for path in (ROOT / "lightning_cxl").rglob("*.py"):
        for name in re.findall(r"\[Note: ([^\]]+)\]", path.read_text()):
            assert any(row[0].startswith(name.removesuffix("...").strip()) for row in rows), f"{path}: {name}"


def table_after(document, heading):
    """Return the cells of the body of the first table after a heading."""
    lines = document.read_text().partition(f"{heading}\n")[2].splitlines()
    start = next(i for i, line in enumerate(lines) if re.fullmatch(r"\|[-|]+\|", line)) + 1
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
