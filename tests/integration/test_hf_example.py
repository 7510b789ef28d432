"""`examples/run_clm.py` with our Trainer and with that of transformers."""

from pathlib import Path

import pytest

from tests import training_device
from tests.integration.accelerate_loop import forget_accelerators
from tests.integration.hf_trainer import assert_close, finish
from tests.integration.llama import tiny_llama, word_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "run_clm.py"
OURS = "from lightning_cxl.transformers import CXLTrainer as Trainer\n"


@pytest.fixture
def files(tmp_path):
    words = ["<unk>", *(f"w{i}" for i in range(30))]
    word_tokenizer(words).save_pretrained(tmp_path / "model")
    tiny_llama().save_pretrained(tmp_path / "model")
    lines = (" ".join(f"w{(3 * i + k * k) % 30}" for k in range(9)) for i in range(40))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return tmp_path


def run(files, code, *options):
    names = {"__name__": "run_clm"}
    exec(compile(code, str(SCRIPT), "exec"), names)  # dataclasses look their module up, hence its name
    forget_accelerators()
    given = (
        f"--model_name_or_path {files / 'model'} --train_file {files / 'text.txt'} --output_dir {files / 'out'} "
        "--block_size 8 --report_to none --disable_tqdm True --logging_steps 1 --max_steps 6 --do_train --do_eval "
        "--per_device_train_batch_size 2 --dataloader_pin_memory False"
    )
    trainer = names["main"]([*given.split(), *options])
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return finish(trainer), evaluated[-1]


def test_the_script_differs_in_one_import(files, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(files / "cache"))
    code = SCRIPT.read_text()
    assert code.count(OURS) == 1
    options = ["--gradient_accumulation_steps", "2", "--lr_scheduler_type", "cosine", "--save_steps", "3"]
    plain, plain_loss = run(files, code.replace(OURS, "from transformers import Trainer\n"), *options)
    ours, loss = run(files, code, *options)
    assert len(plain[0]) == 6
    assert_close(plain, ours)
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    resumed, _ = run(files, code, *options, "--resume_from_checkpoint", str(files / "out" / "checkpoint-3"))
    assert resumed[0] == ours[0], f"resumed exactly on {training_device.current}"
