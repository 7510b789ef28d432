"""Every command of the README, as it is written, in a new environment and a copy of this repository.

Benchmarks run fewer cases: with all of them three take 25 minutes. Their figures are not looked at, so it runs beside
other tests.

What this repository depends on is taken from the environment that runs the tests: to install it again takes minutes.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig

import pytest

from lightning_cxl.commands.plan import DOES_NOT_FIT
from tests.processes import ROOT, copy_tree

README = (ROOT / "README.md").read_text()
PROGRAMS = ("pip", "python", "lightning-cxl", "printf", "make")
LOADS = "printf 'make\\nload in a run\\n' | python tests/integration/weight_memory.py \"$(mktemp -d)\""
NOT_RUN = {
    "make demo": "makes an environment of its own; tests/unit/finetune/test_cli.py runs its example",
    "make test": "runs this suite",
    "python -m lightning_cxl": "no command: the name of the program",
    "pip install -e .": "what `make demo` does",
    "python examples/conformance": "tests/test_programs.py runs it, and looks at the verdicts",
    LOADS: "tests/integration/test_weight_memory.py looks at its figures",
}
FEWER_CASES = {
    "python examples/bench/state_memory.py": " --only bf16 --precision 32-true",
    "python examples/bench/long_context.py --hidden 256": " --tokens 1024 --rounds 1",
    "python examples/bench/planned.py": " --only 'demo, 6 x 256'",
}
MODEL = "Qwen/Qwen2.5-0.5B"
MAKE_MODEL = f"""
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from lightning_cxl.finetune.data import trained_tokenizer
tokenizer = trained_tokenizer(iter(["What is 1? It is 1."]), 300, "readme")
tokenizer.save_pretrained({MODEL!r})
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained({MODEL!r})
"""


def commands() -> list[str]:
    """Commands in the order of the README, once each; those that install come first."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    blocks = "".join(block for language, block in fenced if not language).splitlines()
    text = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    found = [*blocks, *re.findall(r"`([^`\n]+)`", text)]
    lines = [re.sub(r"\s+#.*$", "", line).strip().replace(r"\|", "|") for line in found]
    named = dict.fromkeys(line for line in lines if line.split(" ")[0] in PROGRAMS and " " in line)
    return sorted(named, key=lambda line: not line.startswith("pip install"))


def test_the_commands_are_found():
    assert {"pip install .", "lightning-cxl env", *NOT_RUN, *FEWER_CASES} <= set(commands())
    assert any(line.startswith("printf ") and "| python " in line for line in commands())


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_command_of_the_readme_works_in_a_new_environment(tmp_path):
    clone = tmp_path / "clone"
    copy_tree(clone)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    lines = ({"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(40))
    (clone / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LIGHTNING_CXL"))},
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "LIGHTNING_CXL_CACHE": str(tmp_path / "cache"),
    }

    def run(line: str) -> None:
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"], cwd=clone, env=environment, capture_output=True, text=True
        )
        does_not_fit = line.startswith("lightning-cxl plan") and done.returncode == DOES_NOT_FIT
        assert done.returncode == 0 or does_not_fit, f"{line}\n{done.stdout}\n{done.stderr}"

    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    made = False
    for line in commands():
        if line in NOT_RUN:
            continue
        if MODEL in line and not made:  # a small one where the hub's would be
            (tmp_path / "make.py").write_text(MAKE_MODEL)
            run(f"python {tmp_path / 'make.py'}")
            made = True
        run(line + FEWER_CASES.get(line, ""))
    shadowed = subprocess.run(["python", "-m", "lightning_cxl", "env"], cwd=clone, env=environment, capture_output=True)
    assert b"run the command `lightning-cxl`" in shadowed.stderr
