"""The main job with a quantised base and adapters, on ranks."""

import json
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything

import lightning_cxl
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.export import ExportPretrained
from lightning_cxl.finetune.model import CausalLM
from tests.distributed.training import place, whole

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def make_base(folder: Path) -> None:
    """Write a tiny model with its tokenizer, and conversations beside them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.unit.finetune.chats import MARKED, byte_tokenizer

    torch.manual_seed(3)
    sizes = {"vocab_size": 262, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3)).save_pretrained(folder)
    byte_tokenizer(MARKED).save_pretrained(folder)
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(30)]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main_job(folder: Path, out: Path, steps: int, save: str) -> dict[str, torch.Tensor]:
    """Train adapters on all ranks and export them to `out`; return them, whole, by name."""
    seed_everything(11, verbose=False)
    model = CausalLM(str(folder), lora=LORA, lr=1e-2, quantization="4bit")
    chats = str(folder / "chats.jsonl")
    data = TextData(chats, seq_len=128, batch_size=2, val_fraction=0.2, tokenizer_name_or_path=str(folder), seed=1)
    trainer = Trainer(
        accelerator="cpu", devices=place()[1], max_steps=steps, max_epochs=-1, logger=False,
        callbacks=[ExportPretrained(str(out))],
        strategy=lightning_cxl.CXLOffloadStrategy(stream_weights=True), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(model, data)
    trainer.save_checkpoint(save)
    return {name: whole(each) for name, each in model.model.named_parameters() if "lora_" in name}
