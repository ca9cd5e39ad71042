"""Trains a head on a frozen feature extractor, whose layers are trained from milestones on.

After Lightning's examples/pytorch/domain_templates/computer_vision_fine_tuning.py.
"""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from stand_ins import images, record
from torch import nn, optim
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy

# elastic added: from adascale.lightning import ElasticStrategy


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones=(1, 2), train_bn=False):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch in self.milestones:
            first = epoch == self.milestones[0]
            layers = pl_module.feature_extractor[-3:] if first else pl_module.feature_extractor[:-3]
            self.unfreeze_and_add_param_group(
                modules=layers,
                optimizer=optimizer,
                train_bn=self.train_bn,
            )


class TransferLearningModel(LightningModule):
    def __init__(self, milestones=(1, 2), lr=1e-2, lr_scheduler_gamma=1e-1):
        super().__init__()
        self.save_hyperparameters()
        self.feature_extractor = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
        )
        self.fc = nn.Sequential(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 1))
        self.train_acc = Accuracy(task="binary")
        self.valid_acc = Accuracy(task="binary")

    def forward(self, x):
        return self.fc(self.feature_extractor(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_logits, y_true = self.forward(x), (y > 4).view((-1, 1)).type_as(x)
        self.log("train_acc", self.train_acc(torch.sigmoid(y_logits), y_true.int()), prog_bar=True)
        return F.binary_cross_entropy_with_logits(y_logits, y_true)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_logits, y_true = self.forward(x), (y > 4).view((-1, 1)).type_as(x)
        self.log("val_loss", F.binary_cross_entropy_with_logits(y_logits, y_true), prog_bar=True)
        self.log("val_acc", self.valid_acc(torch.sigmoid(y_logits), y_true.int()), prog_bar=True)

    def configure_optimizers(self):
        trainable_parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = optim.Adam(trainable_parameters, lr=self.hparams.lr)
        gamma = self.hparams.lr_scheduler_gamma
        scheduler = MultiStepLR(optimizer, milestones=self.hparams.milestones, gamma=gamma)
        return [optimizer], [scheduler]


class MyDataModule(LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        dataset = TensorDataset(*images(128))
        self.train, self.val = random_split(dataset, [96, 32])
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


seed_everything(1234)
trainer = Trainer(
    default_root_dir=os.environ["OUTPUT"],
    accelerator="cpu",
    # elastic added: strategy=ElasticStrategy(max_batch_size=32, local_bsz_bounds=(4, 16)),
    callbacks=[MilestonesFinetuning()],
    max_epochs=3,
    num_sanity_val_steps=0,
)
model = TransferLearningModel()
trainer.fit(model, datamodule=MyDataModule())
record(model, loss=trainer.callback_metrics["val_loss"].item())
