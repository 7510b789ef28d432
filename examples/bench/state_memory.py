"""What a run holds on the host per parameter with fp32, bf16 and 8-bit state: asked for, and backed by pages.

The job of `examples/configs/finetune_stdlib.yaml` for two steps in `bf16-true`, once per precision. After the second
step every tensor of weights, gradients and optimizer state is looked at: its bytes, how many of them the kernel backs
with pages of this process (`move_pages`), and what `strategy.report()` says.

    python examples/bench/state_memory.py [--config FILE.yaml] [--precision bf16-true] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_cxl

CONFIG = Path(__file__).parents[1] / "configs" / "finetune_stdlib.yaml"
ROLES = ("WEIGHTS", "GRADIENTS", "OPTIMIZER STATE")


class Probe(Callback):
    """Writes what the tensors of a run take, after its second step."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Write, after the second step."""
        if trainer.global_step != 2:
            return
        report = trainer.strategy.report()
        found: dict[str, dict[str, int]] = {}
        for role, tensor in held(trainer, module):
            sizes = found.setdefault(role, {"bytes": 0, "resident": 0})
            sizes["bytes"] += tensor.nbytes
            sizes["resident"] += tensor.nbytes - lightning_cxl.residency(tensor).get("unbacked", 0)
        reported = sum(sum(tiers.values()) for role, tiers in report["roles"].items() if role != "activations")
        rows = {"roles": found, "reported": reported, "num_parameters": report["num_trainable"]}
        self.file.write_text(json.dumps(rows))


def held(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that outlives a step, with its role; tied parameters once."""
    for parameter in module.parameters():
        yield ROLES[0], parameter.detach()
        if parameter.grad is not None:
            yield ROLES[1], parameter.grad
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from ((ROLES[2], value) for value in state.values() if isinstance(value, torch.Tensor))


def run(state: str, precision: str, config: Path, file: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-P", "-m", "lightning_cxl", "fit", "--config", str(config), "--trainer.max_steps", "2",
        "--trainer.default_root_dir", str(file.parent), "--trainer.precision", precision,
        "--trainer.strategy", "lightning_cxl.CXLOffloadStrategy",
        f"--trainer.strategy.state={state}", "--trainer.logger", "false", "--trainer.limit_val_batches", "0",
        "--trainer.callbacks", json.dumps([{"class_path": "state_memory.Probe", "init_args": {"file": str(file)}}]),
        "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    )
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="another job of `python -m lightning_cxl fit`")
    parser.add_argument("--precision", default="bf16-true")
    parser.add_argument("--only", nargs="+", choices=["fp32", "bf16", "8bit"], default=["fp32", "bf16", "8bit"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for state in options.only:
        with tempfile.TemporaryDirectory() as folder:
            found = run(state, options.precision, options.config, Path(folder) / "found.json")
        count = found["num_parameters"]
        print(f"\nstate {state}, {count:,} parameters, bytes per parameter{'tensors':>12}{'backed by pages':>18}")
        totals = {"bytes": 0, "resident": 0}
        for role, sizes in found["roles"].items():
            print(f"  {role.lower():<44}{sizes['bytes'] / count:>12.3f}{sizes['resident'] / count:>18.3f}")
            totals = {key: totals[key] + size for key, size in sizes.items()}
        print(f"  {'all':<44}{totals['bytes'] / count:>12.3f}{totals['resident'] / count:>18.3f}")
        print(f"  {'all, as strategy.report() has it':<44}{found['reported'] / count:>12.3f}")
        for name, size in (*totals.items(), ("reported", found["reported"])):
            rows.append({"name": f"{state}, {name}", "value": size / count, "unit": "B per parameter"})
    if options.json:
        options.json.write_text(json.dumps({"rows": [row | {"goal": None, "holds": None} for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
