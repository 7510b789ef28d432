"""Small models and data for the integration tests."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TINY_LLAMA = {  # arguments of transformers' LlamaConfig
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Block(nn.Module):
    """A pre-norm transformer block with dropout, causal attention by SDPA; a gate without dimensions if `scalars`."""

    def __init__(self, width, dropout, *, scalars=False):
        super().__init__()
        self.gate = nn.Parameter(torch.rand(())) if scalars else None
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x, *, scale=1.0):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 4, width // 4).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape)) * scale
        mlp = self.mlp(self.norm2(x))
        return x + (mlp if self.gate is None else self.gate * mlp)


class TinyTransformer(nn.Module):
    """Token model; `tied` shares embedding and head, `twice` runs the first block again at the end.

    With `scalars` it has parameters without dimensions, in blocks and outside of them.
    """

    def __init__(self, vocab=37, width=32, depth=3, *, dropout=0.1, tied=False, twice=False, scalars=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, dropout, scalars=scalars) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.logit_scale = nn.Parameter(torch.rand(())) if scalars else None
        self.head = nn.Linear(width, vocab, bias=False)
        self.unused = nn.Linear(width, 3)  # never gets a gradient
        if tied:
            self.head.weight = self.embed.weight
        self.twice = twice

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        if self.twice:
            x = self.blocks[0](x, scale=1.0)
        logits = self.head(self.norm(x))
        return logits if self.logit_scale is None else logits * self.logit_scale.exp()


def no_dropout():
    return TinyTransformer(dropout=0.0)


class TinyConvNet(nn.Module):
    """Residual convolution blocks with BatchNorm in a ModuleList, channels-last weights."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Task(LightningModule):
    """Cross-entropy on a model; records every training loss."""

    def __init__(self, model, optimizer="adamw", *, scheduler=True, **kwargs):
        super().__init__()
        self.model = model
        self.optimizer, self.scheduler, self.kwargs = optimizer, scheduler, kwargs
        self._losses: list[torch.Tensor] = []  # on the device: to look at one would wait for it
        self.lrs: list[float] = []

    @property
    def losses(self):
        """Every loss that was recorded."""
        return [loss.item() for loss in self._losses]

    def record(self, loss):
        self._losses.append(loss.detach())

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x).flatten(0, -2).float(), y.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.record(loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        decay = [p for p in params if p.dim() > 1]
        rest = [p for p in params if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        optimizer = kinds[self.optimizer](groups, **{"lr": 3e-3, **self.kwargs})
        if not self.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class InStep:
    """For a Task: takes the batch that belongs to the step, also where a run was resumed."""

    def training_step(self, batch, batch_idx):
        batch = [each.to(self.device) for each in list(token_data())[self.global_step % 20]]
        return super().training_step(batch, batch_idx)


def token_data(num_batches=20, batch=2, length=12, vocab=37):
    data = torch.randint(0, vocab, (num_batches * batch, length + 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=batch)


def image_data(num_batches=20, batch=4):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num_batches * batch, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 5, (num_batches * batch,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=batch)
