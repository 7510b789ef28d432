"""Models that ranks load from files, each its part, and what they hold of them on the way.

    python -m tests.distributed.loading_runs make FOLDER [--layers 8]
    python -m tests.distributed.loading_runs load FOLDER [--ranks 2] [--dtype bfloat16] [--in-memory]

The second prints what loading a folder, and the start of a run, add to the memory of ranks.
"""

import argparse
import copy
import gc
import json
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lightning_cxl
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.session import Session
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.fsdp import cut
from lightning_cxl.streaming.units import find_units
from lightning_cxl.weights.files import UnreadWeight
from tests.distributed.training import device, loss_of, place, whole
from tests.models import TINY_LLAMA

MIB = 2**20


def load(folder: Path, kind: str = "AutoModelForCausalLM", **options: Any) -> Any:
    """Return the model of a folder."""
    import transformers

    return lightning_cxl.from_pretrained(getattr(transformers, kind), folder, **options)


def prepared(model: nn.Module) -> dict[str, torch.Tensor]:
    """Cut a model, let a run begin and end; return the whole weights by name."""
    _, world = place()
    session = Session()
    if world > 1:
        mesh = init_device_mesh(device().type, (world,), mesh_dim_names=("shard",))
        cut(model, find_units(model), mesh, session.host_on(device()).engine)
    loop = UserLoop(session, device(), Loop())
    try:
        loop.prepare(model, [])
        return {name: whole(each) for name, each in model.named_parameters()}
    finally:
        loop.close()


def changed(model: Any, change: str) -> Any:
    """Return a model as users change one before they train it."""
    torch.manual_seed(7)
    if change == "adapters":
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name that peft uses
            return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    if change == "more words":
        model.resize_token_embeddings(TINY_LLAMA["vocab_size"] + 5, mean_resizing=False)
    if change == "half frozen":
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
    return model


def weights(folder: Path, change: str = "", late_s: float = 0, **options: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights that a run begins with; rank 1 comes late."""
    time.sleep(late_s * place()[0])
    return prepared(changed(load(folder, **options), change))


def kinds(folder: Path, **options: Any) -> list[str]:
    """Return how each parameter is there once it is loaded."""
    model = load(folder, **options)
    return ["unread" if isinstance(each, UnreadWeight) else "there" for each in model.parameters()]


def uses(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Return what is seen of a model that has been loaded and nothing else, and save it."""
    model = load(folder, **options)
    tokens = torch.arange(12).view(2, 6)
    lightning_cxl.save_weights(model, out / f"saved-{place()[0]}")
    model.load_state_dict(model.state_dict(), strict=True, assign=True)
    model.to(model.dtype).to("cpu").lm_head.weight.data = model.lm_head.weight.data  # nothing to convert
    return {
        "text": str(model),
        "loss": loss_of(model, tokens).item(),
        "generated": model.generate(tokens, max_new_tokens=3, do_sample=False).tolist(),
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "copy": {name: value.clone() for name, value in copy.deepcopy(model).state_dict().items()},
        "double": {name: value.clone() for name, value in model.double().state_dict().items()},
        "saved": lightning_cxl.load_weights(load(folder, **options), out / f"saved-{place()[0]}").missing_keys,
    }


def refusals(folder: Path) -> list[str]:
    """Return what is said to who wants what an unread weight does not have."""
    weight = load(folder, dtype=torch.bfloat16).lm_head.weight
    said = []
    for act in (weight.detach().zero_, lambda: weight.data[0].fill_(1), weight.data_ptr):
        try:
            act()
        except lightning_cxl.UnsupportedError as error:
            said.append(str(error))
    return said


def into_cut(folder: Path) -> str:
    """Return what is said to who loads files into a model that is cut."""
    model = load(folder)
    prepared(model)
    try:
        lightning_cxl.load_weights(model, folder)
    except lightning_cxl.UnsupportedError as error:
        return str(error)
    return "loaded"


class Loads(LightningModule):
    """Loads its model when the processes have met."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        super().__init__()
        self.folder, self.options = folder, options
        self.model: Any = None

    def configure_model(self) -> None:
        """Load."""
        if self.model is None:
            self.model = load(self.folder, **self.options).train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(folder: Path, precision: Any = "32-true", **options: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights after two steps of the Trainer."""
    task = Loads(folder, options)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    tokens = torch.randint(0, TINY_LLAMA["vocab_size"], (8, 12), generator=torch.Generator().manual_seed(2))
    trainer = Trainer(
        accelerator="cpu", devices=place()[1], max_steps=2, strategy="cxl_offload", precision=precision,
        **dict.fromkeys(off, False),
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(tokens, batch_size=2))
    return {name: whole(each) for name, each in task.named_parameters()}


class Memory:
    """Samples what this process holds that no file backs, in bytes, while a region runs."""

    def __enter__(self) -> "Memory":
        self._over, self._before = threading.Event(), _anonymous_bytes()
        self.grown = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.look()

    def look(self) -> int:
        """Return by how much it has grown."""
        now = _anonymous_bytes() - self._before
        self.grown = max(self.grown, now)
        return now

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines)}
    return found["Pss_Anon"] + found["Pss_Shmem"]  # a page that several processes map counts once in all


def memory(folder: Path, **options: Any) -> dict[str, int]:
    """Return the bytes that loading a model has added, and those at the peak until a run has begun."""
    gc.collect()  # models of earlier tests would leave meanwhile
    dist.barrier()  # and another process's share of a page would become this one's
    with Memory() as seen:
        model = load(folder, **options)
        loaded = seen.look()
        session = Session()
        mesh = init_device_mesh("cpu", (place()[1],), mesh_dim_names=("shard",))
        cut(model, find_units(model), mesh, session.host_on(device()).engine)
        loop = UserLoop(session, device(), Loop())
        loop.prepare(model, [])
        begun = seen.look()
        dist.barrier()  # another process may still read
        loop.close()
    return {"loaded": loaded, "begun": begun, "peak": seen.grown}


def save(folder: Path, num_layers: int, width: int, **config: Any) -> int:
    """Write a Llama of several files; return its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": num_layers}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8 * width, num_attention_heads=8, **{**shape, **config}))
    nbytes = sum(each.nbytes for each in model.parameters())
    lightning_cxl.save_pretrained(model, folder, max_shard_bytes=nbytes // 4)
    return nbytes


def main() -> None:
    """Do what the command line says."""
    from tests.distributed.ranks import Processes, Ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("make", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype")
    parser.add_argument("--in-memory", action="store_true")
    given = parser.parse_args()
    if given.act == "make":
        print(f"{save(given.folder, given.layers, 1024) / MIB:.0f} MiB")
        return
    options = {"mapped": False if given.in_memory else None, "dtype": given.dtype and getattr(torch, given.dtype)}
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes("cpu", Path(folder))
        ranks = Ranks(processes, given.ranks)
        try:
            ranks.run(memory, given.folder, **options)  # modules are imported
            found = ranks.run(memory, given.folder, **options)
        finally:
            processes.close()
    print(json.dumps([{key: round(value / MIB) for key, value in each.items()} for each in found]))


if __name__ == "__main__":
    main()
