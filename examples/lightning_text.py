"""A language model of characters with Lightning, on documentation that scikit-learn ships.

    adascale run examples/lightning_text.yaml      an elastic job, whose replica count changes
    python examples/lightning_text.py              one process, without a metrics service

Two lines differ from a program of plain Lightning: the import, and the strategy. The recipe was tuned for a
batch size of 16.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import sklearn
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from adascale.lightning import ElasticStrategy

BATCH_SIZE, LENGTH, CHARACTERS = 16, 64, 128


class Windows(Dataset[Tensor]):
    """Windows of a text: LENGTH characters, and the one that follows each of them."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * LENGTH : (index + 1) * LENGTH + 1].long()


class Documentation(LightningDataModule):
    """The descriptions of scikit-learn's data sets, the last tenth for validation."""

    def setup(self, stage: str) -> None:  # noqa: ARG002
        files = sorted((Path(sklearn.__file__).parent / "datasets" / "descr").glob("*.rst"))
        text = b"".join(file.read_bytes() for file in files)
        characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp_max(CHARACTERS - 1)
        split = len(characters) * 9 // 10
        self.train, self.validation = Windows(characters[:split]), Windows(characters[split:])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, batch_size=64)


class CharacterModel(LightningModule):
    """Predicts the next character from the last 8."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.embedding = nn.Embedding(CHARACTERS, 32)
        self.context = nn.Conv1d(32, 128, kernel_size=8)
        self.head = nn.Conv1d(128, CHARACTERS, kernel_size=1)

    def forward(self, characters: Tensor) -> Tensor:
        embedded = nn.functional.pad(self.embedding(characters).transpose(1, 2), (7, 0))
        scores: Tensor = self.head(self.context(embedded).relu())
        return scores

    def loss(self, windows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(windows[:, :-1]), windows[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # noqa: ARG002
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="steps at the batch size of 16")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    strategy = ElasticStrategy(max_batch_size=256, local_bsz_bounds=(16, 128))
    trainer = Trainer(
        max_steps=steps,
        accelerator="auto",
        strategy=strategy,
        gradient_clip_val=1.0,
        val_check_interval=100,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,  # the job saves its state itself
        enable_progress_bar=False,
    )
    trainer.fit(CharacterModel(steps), datamodule=Documentation())
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["val_loss"])
        print(f"loss of validation {loss:.3f} after {trainer.global_step} steps")
        strategy.elastic_trainer.report_result(val_loss=loss)


if __name__ == "__main__":
    main()
