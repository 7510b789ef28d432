"""A program whose loop is of Fabric, Accelerate or the Trainer of transformers, on two processes; the last one fails.

python tests/integration/own_loops.py FOLDER fabric
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from tests.models import TinyTransformer, token_data

OFFLOAD = {"tiers": {"dram": "1GiB"}}


def train(model, optimizer, data, backward):
    for tokens, labels in data:
        backward(nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_fabric(asked):
    from lightning.fabric import Fabric

    from lightning_cxl import CXLFabricStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=CXLFabricStrategy(**OFFLOAD))
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has launched it
        fabric.launch()
    model = fabric.setup_module(TinyTransformer(dropout=0.0))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = fabric.setup_dataloaders(token_data(8))
    return train(model, optimizer, data, fabric.backward)


def with_accelerate(asked):
    from lightning_cxl.accelerate import CXLAccelerator

    accelerator = CXLAccelerator(cpu=True, offload=OFFLOAD)
    model = TinyTransformer(dropout=0.0)
    parts = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), token_data(8))
    return train(*parts, accelerator.backward)


def with_a_failing_trainer(asked):
    from transformers import TrainerCallback, TrainingArguments

    from lightning_cxl.transformers import CXLTrainer
    from tests.integration.hf_trainer import rows
    from tests.integration.llama import tiny_llama

    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2 and args.process_index == 0:
                print("failing", flush=True)
            if state.global_step == 2 and args.process_index == 1:
                raise ValueError("this batch is bad")

    args = TrainingArguments(
        str(asked.folder), use_cpu=True, max_steps=4, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = CXLTrainer(tiny_llama(), args, train_dataset=rows(16), callbacks=[Fails()], offload=OFFLOAD)
    trainer.train()
    return trainer.model


def in_a_notebook(asked):
    from accelerate import debug_launcher

    debug_launcher(_cell, (asked,), num_processes=2)


def _cell(asked):
    """Train in a forked process; the first one has work left when the other has ended."""
    torch.set_num_threads(1)
    write(asked, with_accelerate(asked))
    if torch.distributed.get_rank() == 0:
        time.sleep(4)


LOOPS = {"fabric": with_fabric, "accelerate": with_accelerate, "trainer": with_a_failing_trainer}


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("loop", choices=[*LOOPS, "notebook"])
    asked = parser.parse_args()
    torch.manual_seed(3)
    if asked.loop == "notebook":
        in_a_notebook(asked)
    else:
        write(asked, LOOPS[asked.loop](asked))


def write(asked, model):
    """Tell what came of it, on each rank."""
    cut = sum(isinstance(each, DTensor) for each in model.parameters())
    total = sum(float((each.full_tensor() if isinstance(each, DTensor) else each).sum()) for each in model.parameters())
    rank = torch.distributed.get_rank()
    (asked.folder / f"rank_{rank}.json").write_text(json.dumps([torch.distributed.get_world_size(), cut, total]))


if __name__ == "__main__":
    main()
