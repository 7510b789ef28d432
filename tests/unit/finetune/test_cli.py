import csv
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_cxl.__main__ import main
from lightning_cxl.finetune.model import CausalLM
from tests.unit.finetune.chats import CHATML, byte_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "configs" / "finetune_stdlib.yaml"
QLORA = EXAMPLE.with_name("finetune_qlora.yaml")
TINY = {
    "--model.hidden_size": 16, "--model.num_layers": 2, "--model.num_heads": 2, "--model.intermediate_size": 32,
    "--data.seq_len": 16, "--data.batch_size": 2, "--data.vocab_size": 300,
    "--trainer.max_steps": 4, "--trainer.val_check_interval": 2, "--trainer.accelerator": "cpu",
}  # fmt: skip


@pytest.fixture
def command(text_folder, tmp_path, monkeypatch):
    """Return a function that runs ``python -m lightning_cxl ARGS``; relative paths are under tmp_path."""
    monkeypatch.chdir(tmp_path)
    # lightning 2.6 calls methods that jsonargparse 4.53 deprecates; this is jsonargparse's own switch
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def run(*args, tiny=True, **changed):
        options = {**TINY, "--data.text_files": f"{text_folder}/**/*.txt"} if tiny else {}
        options |= {f"--{name}": value for name, value in changed.items()}
        flat = [f"{name}={value}" for name, value in options.items() if value is not None]
        monkeypatch.setattr(sys, "argv", ["lightning_cxl", *map(str, args), *flat])
        main()

    return run


def logged(folder, metric):
    with open(folder / "metrics.csv") as file:
        return [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]


def test_the_example_trains_logs_exports_resumes_and_reports(command, tmp_path, capsys):
    command("fit", "--config", EXAMPLE)
    shown = capsys.readouterr().out
    runs = tmp_path / "runs" / "finetune_stdlib"
    version = runs / "tensorboard" / "version_0"
    assert "validation loss: before " in shown
    assert "sample:\n" in shown and "CXL offload on cpu, finished" in shown
    assert "host_GiB" in shown and "train_loss" in shown
    assert list(version.glob("events.out.tfevents.*"))
    straight = logged(runs / "csv" / "version_0", "train_loss")
    assert len(straight) == 4
    assert len(logged(runs / "csv" / "version_0", "val_loss")) == 2
    assert logged(runs / "csv" / "version_0", "lr")
    config = AutoModelForCausalLM.from_pretrained(version / "export").config
    assert config.vocab_size == 300  # the data's, through the link
    assert yaml.safe_load((version / "config.yaml").read_text())["data"]["vocab_size"] == 300
    with pytest.warns(UserWarning, match="dirpath has changed"):  # ModelCheckpoint: a new version folder
        command("fit", "--config", EXAMPLE, ckpt_path=version / "checkpoints" / "last.ckpt", **{"trainer.max_steps": 6})
    assert len(logged(runs / "csv" / "version_1", "train_loss")) == 2
    assert "before not measured, after " in capsys.readouterr().out
    with pytest.warns(UserWarning, match="dirpath has changed"):
        command("validate", "--config", EXAMPLE, ckpt_path=version / "checkpoints" / "last.ckpt")
    assert "val_loss" in capsys.readouterr().out
    command("test", "--config", EXAMPLE)
    command("predict", "--config", EXAMPLE, return_predictions=False)
    shown = capsys.readouterr().out
    assert "test_loss" in shown and "row 2, text: " in shown and "row 2, predicted: " in shown
    command("fit", "--config", EXAMPLE, **{"model.name_or_path": version / "export", "trainer.max_steps": 1})
    assert "validation loss: before " in capsys.readouterr().out


@pytest.fixture
def base(tmp_path):
    """The folder of a pretrained model, whose layers are as wide as a block of 4-bit weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=262, **shape)).save_pretrained(tmp_path / "base")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_the_example_of_adapters_trains_resumes_and_exports(command, base, tmp_path, ask, capsys):
    pytest.importorskip("bitsandbytes")
    example = yaml.safe_load(QLORA.read_text())
    example["trainer"]["callbacks"][1]["init_args"]["every_n_train_steps"] = 2
    example["trainer"]["callbacks"][3]["init_args"] = {"max_new_tokens": 3}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(example))
    options = {"model.name_or_path": base, "data.text_files": ask(40), "data.seq_len": 64, "trainer.max_steps": 2}
    options |= {"trainer.val_check_interval": 2, "trainer.accelerator": "cpu"}
    command("fit", "--config", tmp_path / "short.yaml", tiny=False, **options)
    shown = capsys.readouterr().out
    assert "held-out sample 2" in shown and "validation loss: before " in shown
    version = tmp_path / "runs" / "finetune_qlora" / "tensorboard" / "version_0"
    config = json.loads((version / "export" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (16, 32, str(base))
    last = version / "checkpoints" / "last.ckpt"
    with pytest.warns(UserWarning, match="dirpath has changed"):
        more = options | {"ckpt_path": last, "trainer.max_steps": 4}
        command("fit", "--config", tmp_path / "short.yaml", tiny=False, **more)
    assert len(logged(tmp_path / "runs" / "finetune_qlora" / "csv" / "version_1", "train_loss")) == 2
    command("export", last, tmp_path / "merged", tiny=False)
    assert "merged an adapter into 14 layers" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == 262


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_a_run_without_a_model_is_asked_for_one(command, name):
    """It was a Llama with random weights, a thousand epochs long."""
    with pytest.raises(SystemExit, match=f"^ConfigError: a model is needed: .*\n  python -m lightning_cxl {name} --"):
        command(name, tiny=False)


def test_a_given_model_is_tuned_for_one_epoch_in_bf16_with_our_strategy(command, base, tmp_path, ask):
    short = {"data.text_files": ask(40), "data.seq_len": 64, "trainer.accelerator": "cpu"}
    command("fit", tiny=False, **{"model.name_or_path": base}, **short)
    run = tmp_path / "lightning_logs" / "version_0"
    config = yaml.safe_load((run / "config.yaml").read_text())
    found = {name: config["trainer"][name] for name in ("strategy", "precision", "max_epochs", "max_steps")}
    assert found == {"strategy": "cxl_offload", "precision": "bf16-true", "max_epochs": 1, "max_steps": -1}
    (saved,) = (run / "checkpoints").iterdir()
    state = torch.load(saved, weights_only=True)
    assert state["epoch"] == 0 and state["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 1e-5
    assert {value.dtype for value in state["state_dict"].values()} == {torch.bfloat16}


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(command, tmp_path, monkeypatch, capsys):
    def interrupt(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(CausalLM, "on_train_batch_end", interrupt)
    every = {"trainer.callbacks": "[{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 2}}]"}
    with pytest.raises(SystemExit):
        command("fit", "--config", EXAMPLE, **every)
    saved = Path("runs/finetune_stdlib/tensorboard/version_0/checkpoints/epoch=0-step=2.ckpt")
    lines = capsys.readouterr().err.splitlines()
    assert "interrupted after step 3" in lines and f"saved: {saved}" in lines and saved.is_file()
    assert f"go on from there: the same command with --ckpt_path {saved}" in lines


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data.text_files": "nothing/*.txt"}, "matches no file"),
        ({"model.name_or_path": "./nowhere"}, "no model './nowhere'"),
        ({"trainer.strategy": "nothing"}, "invalid strategy name"),
        ({"ckpt_path": "nowhere.ckpt"}, "nowhere.ckpt"),
        ({"ckpt_path": "other.ckpt"}, "Error: "),
    ],
)
def test_what_cannot_be_done_ends_in_one_message(command, changed, message, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "other.ckpt").write_text("no checkpoint")
    with pytest.raises(SystemExit, match=message) as caught:
        command("fit", "--config", EXAMPLE, **changed)
    assert str(caught.value.code).partition(":")[0] in ("ConfigError", "CheckpointError")


def test_without_a_logger_a_run_leaves_no_config_and_can_be_repeated(command, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {lr: 0.01}\n")
    quiet = {"trainer.enable_checkpointing": False, "trainer.enable_progress_bar": False}
    for logger in (False, "[]"):
        command("fit", "--config", "config.yaml", **quiet, **{"trainer.logger": logger})
    assert (tmp_path / "config.yaml").read_text() == "model: {lr: 0.01}\n"
