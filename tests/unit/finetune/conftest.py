"""Tiny text, tiny models, and a cache folder of the tests' own."""

import functools
import json

import pytest

from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning import Trainer
from tests.unit.finetune.chats import MARKED, byte_tokenizer

SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "vocab_size": 300}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(folder))
    return folder


@pytest.fixture
def text_folder(tmp_path):
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    for number in range(12):
        words = " ".join(f"word{(number * 7 + i * i) % 23}" for i in range(60))
        target = folder / "deep" if number % 2 else folder
        (target / f"{number:02}.txt").write_text(f"document {number}\n{words}\n")
    return folder


@pytest.fixture
def data(text_folder):
    return TextData(f"{text_folder}/**/*.txt", seq_len=16, batch_size=2, vocab_size=300, val_fraction=0.2)


@pytest.fixture
def tiny_model():
    return CausalLM(**SHAPE, lr=1e-2, warmup_steps=2)


@pytest.fixture
def make_trainer(tmp_path):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return functools.partial(Trainer, accelerator="cpu", devices=1, max_steps=4, default_root_dir=tmp_path, **quiet)


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes rows (or lines as they are) to a file and returns its path."""

    def write(*rows, name="chat.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return write


@pytest.fixture
def ask(write_lines):
    return lambda count: str(
        write_lines(*({"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(count)))
    )


@pytest.fixture
def chat_tokenizer(tmp_path):
    byte_tokenizer(MARKED).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")
