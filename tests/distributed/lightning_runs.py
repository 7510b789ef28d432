"""Lightning runs of several ranks, each of which has its rows of the batches that one process would get."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

import lightning_cxl
from tests.distributed.training import place, whole_weights
from tests.integration.llama import tiny_llama
from tests.integration.training import make_trainer
from tests.models import TinyTransformer

BATCH, LENGTH, VOCAB = 4, 12, 37


class Module(LightningModule):
    """Cross-entropy on the next token; parameters of its own beside those of the model where `own` says so."""

    def __init__(
        self, *, own=False, optimizer="AdamW", manual=False, llama=False, by_method=False, folder="", loading=None
    ) -> None:
        super().__init__()
        self.folder, self.loading = folder, loading or {}
        if folder:
            self.model: Any = None
        else:
            self.model = (
                tiny_llama(tie_word_embeddings=True) if llama else TinyTransformer(dropout=0.0, tied=True, scalars=True)
            )
        self.scale = nn.Parameter(torch.ones(VOCAB)) if own else None
        self.by_method = by_method  # calls its model by another method than `__call__`
        self.optimizer = optimizer
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.seen = 0
        """Micro-batches so far: the next one follows from it, also after a resume."""

    def configure_model(self) -> None:
        """Load what the files of a folder have, when the processes have met."""
        if self.model is None:
            self.model = lightning_cxl.from_pretrained(AutoModelForCausalLM, self.folder, **self.loading).train()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = (self.model.forward if self.by_method else self.model)(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        logits = logits if self.scale is None else logits * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        """Record the loss of all ranks, and return that of this one."""
        loss = self.loss(rows(self.seen))
        self.seen += 1
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(rows(batch_idx)), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.optimizer)
        options = {"eps": 1e-5} if "Adam" in self.optimizer else {"momentum": 0.9}
        optimizer = kind([each for each in self.parameters() if each.requires_grad], lr=1e-3, **options)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def rows(number: int) -> torch.Tensor:
    """Return this rank's rows of a batch that is the same whatever the number of ranks."""
    rank, world = place()
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
    return tokens.chunk(world)[rank]


def fit(
    steps, *, module=None, trainer=None, options=None, resume=None, save=None, callback=None, evaluate=False,
    kind=Module,
) -> dict[str, Any]:  # fmt: skip
    """Train on all ranks, perhaps from a checkpoint, and perhaps save one at the end."""
    _, world = place()
    seed_everything(5, verbose=False)
    task = kind(**(module or {}))
    given = {"strategy": options or {}, "devices": world, "callbacks": callback, **(trainer or {})}
    runner = make_trainer(**given, max_steps=steps, use_distributed_sampler=False)
    loader = DataLoader(TensorDataset(torch.arange(64)))
    if evaluate:
        runner.validate(task, loader, verbose=False)
    runner.fit(task, loader, loader if evaluate else None, ckpt_path=resume)
    if save is not None:
        runner.save_checkpoint(save)
        if world > 1:
            assert Path(save).is_dir()
            dist.barrier()
    return {"losses": task.losses, "weights": whole_weights(task)}
