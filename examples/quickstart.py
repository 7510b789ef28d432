"""Any LightningModule under `strategy="cxl_offload"`: weights, optimizer state and activations on host memory tiers."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_cxl  # noqa: F401  registers the strategy


class Regression(pl.LightningModule):
    """Residual blocks; nothing here knows about offload."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
            for _ in range(depth)
        )

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        inputs, targets = batch
        for block in self.blocks:
            inputs = inputs + block(inputs)
        loss = torch.nn.functional.mse_loss(inputs, targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Return a plain torch optimizer; the strategy swaps in its CPU Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    inputs = torch.randn(512, 256)
    data = DataLoader(TensorDataset(inputs, inputs.roll(1, dims=1)), batch_size=32)
    trainer = pl.Trainer(strategy="cxl_offload", max_epochs=2, devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(Regression(), data)
    print(trainer.strategy)


if __name__ == "__main__":
    main()
