"""Trains an autoencoder of images, with images that a callback saves, and predicts with the best weights.

After Lightning's examples/pytorch/basics/autoencoder.py.
"""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from stand_ins import images, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

# elastic added: from adascale.lightning import ElasticStrategy


class ImageSampler(callbacks.Callback):
    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        batch, _ = next(iter(DataLoader(trainer.datamodule.val, batch_size=3)))
        with torch.no_grad():
            pl_module.eval()
            generated = pl_module(batch.view(3, -1).to(pl_module.device))
            pl_module.train()
        torch.save(generated, os.path.join(os.environ["OUTPUT"], f"generated_{trainer.current_epoch}.img"))


class LitAutoEncoder(LightningModule):
    def __init__(self, hidden_dim=32, learning_rate=10e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "val")

    def test_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self(self._prepare_batch(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _prepare_batch(self, batch):
        x, _ = batch
        return x.view(x.size(0), -1)

    def _common_step(self, batch, batch_idx, stage):
        x = self._prepare_batch(batch)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss


class MyDataModule(LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        dataset = TensorDataset(*images(160))
        self.train, self.val, self.test = random_split(dataset, [96, 32, 32])
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


seed_everything(1234)
trainer = Trainer(
    default_root_dir=os.environ["OUTPUT"],
    accelerator="cpu",
    # elastic added: strategy=ElasticStrategy(max_batch_size=32, local_bsz_bounds=(4, 16)),
    callbacks=ImageSampler(),
    max_epochs=3,
)
model, datamodule = LitAutoEncoder(), MyDataModule()
trainer.fit(model, datamodule=datamodule)
(tested,) = trainer.test(ckpt_path="best", datamodule=datamodule)
predictions = trainer.predict(ckpt_path="best", datamodule=datamodule)
record(model, loss=tested["test_loss_epoch"], mean=torch.cat(predictions).mean().item())
