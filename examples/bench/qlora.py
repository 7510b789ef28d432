"""QLoRA on a base of about 1 B parameters: memory with and without this library, and what a plan says of it.

A Llama of 1.1 B parameters with random weights is written once, in bfloat16, as safetensors files of up to 512 MiB.
Each line is a process of its own, on the CPU. A run of a single layer of the same width comes first, so that what
libraries take at their first use does not count; that of their kernels (MKL keeps some 30 MiB) is as large as their
largest product. Measured is what the process grew by: anonymous memory of its own (`RssAnon`) at the peak, sampled
every 2 ms.

* load: nf4 with double quantisation, by `lightning_cxl.from_pretrained` and by transformers;
* train: adapters of peft on all linear layers of the blocks, two steps, under `CXLOffloadStrategy`, and with plain
  Lightning and the gradient checkpointing of transformers; losses must be the same;
* plan: the quantised model on the meta device, a dry run of a step, and `lightning_cxl.planning.job`,
  against the peak of every role in `strategy.report()` and against the growth of the process.

    python examples/bench/qlora.py FOLDER [--size tiny] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule, Trainer, seed_everything
from own_memory import Growth
from results import Results, machine, print_columns
from safetensors.torch import save_file
from torch.utils.data import DataLoader

import lightning_cxl
from lightning_cxl.commands.plan import loss_on_meta
from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.dry_run import measure
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.planning.job import model_job
from lightning_cxl.streaming.unit_weights import tensors_by_parameter
from lightning_cxl.weights.hf import Quantizer

SHAPE = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4}  # fmt: skip
TINY = SHAPE | {"vocab_size": 512, "num_hidden_layers": 1}
SHARD_BYTES = 512 * 2**20
SEQUENCE, STEPS = 64, 2
GOAL = 0.03
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def write(folder: Path, shape: dict[str, int]) -> None:
    """Write a model of random weights, a shard at a time."""
    config = transformers.LlamaConfig(**shape)
    with lightning_cxl.empty_weights():
        model = transformers.LlamaForCausalLM(config)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    files: dict[str, str] = {}
    weights = list(model.named_parameters())
    for index, (name, parameter) in enumerate(weights, 1):
        values = torch.ones(parameter.shape) if "norm" in name else torch.randn(parameter.shape) * 0.02
        shards[-1][name] = values.bfloat16()
        if index == len(weights) or sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD_BYTES:
            file = f"model-{len(shards):05}.safetensors"
            save_file(shards[-1], folder / file, {"format": "pt"})
            files |= dict.fromkeys(shards[-1], file)
            shards[-1] = {}
            shards.append({})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


# -- the child: one job ------------------------------------------------------------------------------------------------


def load(folder: Path, whose: str) -> Any:
    """Return the model, quantised by us or by transformers."""
    config = transformers.BitsAndBytesConfig(**NF4)
    if whose == "ours":
        return lightning_cxl.from_pretrained(transformers.AutoModelForCausalLM, folder, quantization_config=config)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})


def with_adapters(model: Any) -> Any:
    """Return the model with adapters of peft."""
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


class QLoRA(LightningModule):
    """Trains adapters."""

    def __init__(self, folder: Path, whose: str) -> None:
        super().__init__()
        self.folder, self.whose = folder, whose
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Load the base."""
        if self.model is None:
            model = load(self.folder, self.whose)
            if self.whose != "ours":
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            self.model = with_adapters(model).train()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return torch's AdamW over the adapters."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def train(folder: Path, whose: str) -> dict[str, Any]:
    """Run a job; return what it held."""
    seed_everything(0, verbose=False)
    strategy: Any = lightning_cxl.CXLOffloadStrategy(cpu_adam=False) if whose == "ours" else "auto"
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = torch.randint(0, vocabulary, (STEPS, SEQUENCE))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = QLoRA(folder, whose)
    growth = Growth()
    growth.start()
    trainer.fit(module, DataLoader(tokens))
    found: dict[str, Any] = {"grown": growth.stop(), "losses": module.losses}
    return found | ({"peak_roles": strategy.report()["peak_roles"]} if whose == "ours" else {})


def loaded(folder: Path, whose: str) -> dict[str, Any]:
    """Load; return what the process grew by, and what the weights take."""
    growth = Growth()
    growth.start()
    model = load(folder, whose)
    tensors = [tensor for each in tensors_by_parameter(model).values() for tensor in each]
    return {"grown": growth.stop(), "nbytes": sum(tensor.nbytes for tensor in tensors)}


def planned(folder: Path) -> dict[str, Any]:
    """Return what the plan of the training says; no weights are read."""
    quantizer = Quantizer(transformers.BitsAndBytesConfig(**NF4), None)
    with lightning_cxl.empty_weights():
        base = transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    quantizer.replace_layers(base)
    quantizer.fill_on_meta(base)
    model = with_adapters(base)
    model.to("meta").train()
    work, config = Workload(batch=1, sequence=SEQUENCE, computes_on_host=True), OffloadConfig(cpu_adam=False)
    seen = measure(model, config, work, loss_on_meta(model, 1, SEQUENCE))
    if seen.note:
        raise RuntimeError(seen.note)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    job = model_job("planned", list_tensors(model, [optimizer], config, work, measured=seen))
    roles = {role.value: nbytes for role, nbytes in job.bytes_of().items()}
    return {"roles": roles, "working": job.device_bytes, "num_parameters": job.num_parameters}


def child(folder: Path, what: str, whose: str) -> None:
    """Run one job and print what was found as JSON."""
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    if what == "plan":
        print(json.dumps(planned(folder)))
        return
    with tempfile.TemporaryDirectory() as tiny:
        write(Path(tiny), TINY)
        (loaded if what == "load" else train)(Path(tiny), whose)
    print(json.dumps((loaded if what == "load" else train)(folder, whose)))


# -- the parent --------------------------------------------------------------------------------------------------------


def measured(folder: Path, what: str, whose: str = "ours") -> dict[str, Any]:
    """Run a child."""
    command = [sys.executable, __file__, str(folder), "--child", what, whose]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} of {whose} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def mib(nbytes: float) -> str:
    """Return bytes as text."""
    return f"{nbytes / 2**20:,.0f}"


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the files, 2.2 GB; used again if they are there")
    parser.add_argument("--size", choices=("1b", "tiny"), default="1b", help="tiny: for a look at the output")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.folder, *options.child)
        return
    if not (options.folder / "model.safetensors.index.json").is_file():
        options.folder.mkdir(parents=True, exist_ok=True)
        write(options.folder, SHAPE if options.size == "1b" else TINY)
    shard = max(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    results = Results(machine(torch.get_num_threads()) | {"size": options.size, "sequence": SEQUENCE})
    loads = {whose: measured(options.folder, "load", whose) for whose in ("ours", "theirs")}
    print("loaded:", {whose: mib(found["grown"]) for whose, found in loads.items()}, flush=True)
    trains = {whose: measured(options.folder, "train", whose) for whose in ("ours", "theirs")}
    if trains["ours"]["losses"] != trains["theirs"]["losses"]:
        raise SystemExit(f"the losses differ: {trains}")
    plan = measured(options.folder, "plan")
    quantised = loads["ours"]["nbytes"]
    print(f"{plan['num_parameters']:,} parameters, quantised {mib(quantised)} MiB, largest file {mib(shard)} MiB\n")
    rows = [("MiB that the process grew by, at the peak", "lightning_cxl", "without")]
    rows += [
        (name, mib(found["ours"]["grown"]), mib(found["theirs"]["grown"]))
        for name, found in (("load", loads), (f"train, {STEPS} steps of {SEQUENCE} tokens", trains))
    ]
    print_columns(rows)
    peaks = {role: sum(tiers.values()) for role, tiers in trains["ours"]["peak_roles"].items()}
    rows = [("\nrole", "planned, MiB", "peak, MiB")]
    rows += [(role, mib(plan["roles"].get(role, 0)), mib(peaks.get(role, 0))) for role in {**plan["roles"], **peaks}]
    total = sum(plan["roles"].values())
    with_work = total + plan["working"]
    rows.append(("all roles", mib(total), mib(sum(peaks.values()))))
    rows.append(("and working memory: the process", mib(with_work), mib(trains["ours"]["grown"])))
    print_columns(rows)
    results.at_most("load: more than the quantised weights", loads["ours"]["grown"] - quantised, "bytes", shard)
    results.add("load: transformers", loads["theirs"]["grown"] / loads["ours"]["grown"], "times ours")
    results.add("train: without us", trains["theirs"]["grown"] / trains["ours"]["grown"], "times ours")
    results.at_most("all roles, planned off by", abs(total / sum(peaks.values()) - 1), "of the peak", GOAL)
    off = abs(with_work / trains["ours"]["grown"] - 1)
    results.at_most("with working memory, planned off by", off, "of the growth", GOAL)
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
