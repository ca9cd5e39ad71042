"""Trains a classifier of images with a learning rate that falls, and tests the most accurate weights.

After Lightning's examples/pytorch/domain_templates/imagenet.py.
"""

import os

import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from stand_ins import images, record
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy

# elastic added: from adascale.lightning import ElasticStrategy


class ImageNetLightningModel(LightningModule):
    def __init__(self, lr=0.1, momentum=0.9, weight_decay=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        self.train_acc1 = Accuracy(task="multiclass", num_classes=10, top_k=1)
        self.eval_acc1 = Accuracy(task="multiclass", num_classes=10, top_k=1)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        images, target = batch
        output = self.model(images)
        loss_train = F.cross_entropy(output, target)
        self.log("train_loss", loss_train)
        self.train_acc1(output, target)
        self.log("train_acc1", self.train_acc1, prog_bar=True)
        return loss_train

    def eval_step(self, batch, batch_idx, prefix):
        images, target = batch
        output = self.model(images)
        self.log(f"{prefix}_loss", F.cross_entropy(output, target))
        self.eval_acc1(output, target)
        self.log(f"{prefix}_acc1", self.eval_acc1, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        return self.eval_step(batch, batch_idx, "val")

    def test_step(self, batch, batch_idx):
        return self.eval_step(batch, batch_idx, "test")

    def configure_optimizers(self):
        hparams = self.hparams
        optimizer = optim.SGD(
            self.parameters(), lr=hparams.lr, momentum=hparams.momentum, weight_decay=hparams.weight_decay
        )
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1 ** (epoch // 2))
        return [optimizer], [scheduler]


class MyDataModule(LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        dataset = TensorDataset(*images(160))
        self.train, self.val, self.test = random_split(dataset, [96, 32, 32])
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

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
    callbacks=[
        ModelCheckpoint(monitor="val_acc1", mode="max"),
        EarlyStopping(monitor="val_loss", patience=2),
        LearningRateMonitor(),
    ],
    max_epochs=3,
)
model, datamodule = ImageNetLightningModel(), MyDataModule()
trainer.fit(model, datamodule=datamodule)
(tested,) = trainer.test(ckpt_path="best", datamodule=datamodule)
record(model, loss=tested["test_loss"], accuracy=tested["test_acc1"])
