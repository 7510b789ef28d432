"""Train a model that is larger than the memory of its control group, with weights and state on SSD.

The job: a Llama of `--layers` layers (12.8 M parameters each, random weights, in a safetensors file for each layer),
`bf16-true`, byte tokens, one sequence of 64, `CPUAdam` with 8-bit state and split master weights, the CPU as
accelerator. The strategy gets a folder for the tier `ssd` and no rule: it decides itself what goes there. Run it in a
control group with a memory limit, for example in that of systemd::

    systemd-run --scope -p MemoryMax=2G python examples/bench/ssd_largest.py --folder DIR [--layers 70] [--steps 4]

Printed are the limit, the peak of the process's own anonymous memory (`RssAnon`, from its start on), the seconds of
each step, the bytes that a step moves, and how long the same drive takes for as many bytes alone, half of them before
the training and half of them after it. Compute alone is measured by `--compute`: the same job with few layers, twice,
all in memory, without a limit; the seconds of a layer and of the rest follow from these two.
"""

import argparse
import itertools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from own_memory import Growth
from safetensors.torch import save_file
from ssd_state import LENGTH, batches
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_cxl
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping
from lightning_cxl.storage.store import Store
from lightning_cxl.text import format_bytes

SHAPES = {"large": (1024, 2816), "tiny": (64, 128)}
PROBE_BYTES = {"large": 1 << 30, "tiny": 1 << 23}


def llama(layers: int, size: str) -> LlamaForCausalLM:
    """Return the model without weights."""
    width, inner = SHAPES[size]
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    with lightning_cxl.empty_weights():
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def write_files(folder: Path, layers: int, size: str) -> list[Path]:
    """Write random weights, a file for each layer and one for the rest; none is in memory afterwards."""
    torch.manual_seed(0)
    of_file: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in llama(layers, size).named_parameters():
        parts = name.split(".")
        of_file.setdefault(f"layer-{parts[2]}" if "layers" in parts else "rest", {})[name] = parameter
    paths = []
    for stem, parameters in of_file.items():
        weights = {
            name: torch.ones(each.shape, dtype=each.dtype)
            if each.dim() == 1
            else torch.randn(each.shape).mul_(0.02).to(each.dtype)
            for name, each in parameters.items()
        }
        paths.append(folder / f"{stem}.safetensors")
        save_file(weights, paths[-1])
    return paths


class Job(LightningModule):
    """Next-token loss of a model whose weights stay in their files until the run moves them."""

    def __init__(self, layers: int, size: str, files: list[Path]) -> None:
        super().__init__()
        self.layers, self.size, self.files = layers, size, files
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = llama(self.layers, self.size)
            lightning_cxl.load_weights(self.model, self.files, mapped=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        print(f"loss {float(loss.detach()):.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def train_dataloader(self) -> Any:
        return batches()


class Clock(Callback):
    """Notes the seconds from step to step. It has no hook at the end of a step: there it might look at gradients."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        run = trainer.strategy.run
        run.wait_for_updates()
        if run.on_ssd is not None:
            run.on_ssd.state.wait()
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of each step."""
        return [end - begin for begin, end in itertools.pairwise(self.times)]


def fit(layers: int, size: str, folder: Path, steps: int, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Train a model from files in a folder; returns the seconds of the steps and the report."""
    files = write_files(folder, layers, size)
    strategy = lightning_cxl.CXLOffloadStrategy(
        state="8bit", master="split", stream_weights=True, overlap_step=True, on_overflow="ignore", **options
    )
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, precision="bf16-true", callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Job(layers, size, files))
    print(strategy, flush=True)
    return clock.seconds, strategy.report()


def drive_speed(folder: Path, nbytes: int) -> dict[str, float]:
    """Return bytes per second of reading alone and of writing alone, through the package's storage."""
    store = Store([folder / "probe"], budget_bytes=2 * nbytes)
    mapping = Mapping(nbytes // 8)
    memory = Buffer(mapping.address, mapping.nbytes, (), None, mapping)
    memory.tensor((memory.nbytes,), torch.uint8).random_()
    records = [store.reserve(str(index), memory.nbytes) for index in range(8)]
    speeds = {}
    for name, start in (("write", store.write), ("read", store.read)):
        begin = time.perf_counter()
        for record in records:
            start(record, memory).wait_host()
        speeds[name] = nbytes / (time.perf_counter() - begin)
    store.close()
    return speeds


def memory_limit() -> str:
    """Return what the control group allows, as text."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists():
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            group = next((line for line in lines if "memory" in line or line.startswith("0::")), ":/")
            own = Path(path).parent / group.rpartition(":")[2].lstrip("/") / Path(path).name
            value = (own if own.exists() else Path(path)).read_text().strip()
            return format_bytes(int(value)) if value.isdigit() and int(value) < 1 << 60 else "none"
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive that is used; must be empty")
    parser.add_argument("--layers", type=int, default=70)
    parser.add_argument("--steps", type=int, default=4, help="the first one does not count")
    parser.add_argument("--budget", default="100GiB", help="of the tier ssd")
    parser.add_argument("--size", choices=list(SHAPES), default="large")
    parser.add_argument("--everything", action="store_true", help="lies on SSD, by a rule, also where memory is enough")
    parser.add_argument("--compute", type=int, nargs=2, metavar="LAYERS", help="instead: two depths, all in memory")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.compute:
        found = []
        for layers in options.compute:
            seconds, _ = fit(layers, options.size, options.folder, options.steps)
            found.append(statistics.median(seconds[1:]))
        of_layer = (found[1] - found[0]) / (options.compute[1] - options.compute[0])
        rest = found[0] - of_layer * options.compute[0]
        print(f"{of_layer:.3f} s for a layer and {rest:.3f} s for the rest: {rest + options.layers * of_layer:.1f} s")
        return
    growth = Growth()
    growth.start()
    probe = PROBE_BYTES[options.size]
    speeds = [drive_speed(options.folder, probe)]
    tiers = {"ssd": {"path": str(options.folder / "run"), "budget": options.budget}}
    rules = {"*": {"weights": "ssd", "optimizer_state": "ssd"}} if options.everything else {}
    seconds, report = fit(options.layers, options.size, options.folder, options.steps, tiers=tiers, tier_rules=rules)
    speeds.append(drive_speed(options.folder, probe))
    growth.stop()
    count = sum(each.numel() for each in llama(options.layers, options.size).parameters())
    step = statistics.median(seconds[1:])
    used = report["ssd"]
    if not used:
        raise SystemExit("memory is enough for this model: raise --layers, lower the limit, or add --everything")
    read, written = used["read_bytes_per_step"], used["written_bytes_per_step"]
    alone = [
        nbytes / statistics.mean(each[name] for each in speeds) for name, nbytes in (("read", read), ("write", written))
    ]
    print(
        f"{count:,} parameters, memory limit {memory_limit()}, own memory at its peak {format_bytes(growth.peak)}, "
        f"step {step:.1f} s; it reads {format_bytes(read)} and writes {format_bytes(written)}: reading alone takes "
        f"{alone[0]:.1f} s, writing alone {alone[1]:.1f} s"
    )
    print(json.dumps({"seconds": seconds, "speeds": speeds, "ssd": used}, default=str))


if __name__ == "__main__":
    main()
