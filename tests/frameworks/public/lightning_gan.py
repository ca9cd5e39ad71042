"""Trains a generator and a discriminator of images, with manual optimization.

After Lightning's examples/pytorch/domain_templates/generative_adversarial_net.py.
"""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from stand_ins import images, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# elastic added: from adascale.lightning import ElasticStrategy


class GAN(LightningModule):
    def __init__(self, lr=0.002, b1=0.5, b2=0.999, latent_dim=8):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.validation_z = torch.randn(4, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z)

    @staticmethod
    def adversarial_loss(y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs = batch[0].flatten(1)
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)

        self.toggle_optimizer(opt_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return opt_g, opt_d

    def on_train_epoch_end(self):
        sample_imgs = self(self.validation_z.type_as(self.generator[0].weight)).view(-1, 1, 8, 8)
        for logger in self.loggers:
            logger.experiment.add_image("generated_images", sample_imgs[0], self.current_epoch)


class MNISTDataModule(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(*images(96)), batch_size=8)


seed_everything(1234)
trainer = Trainer(
    default_root_dir=os.environ["OUTPUT"],
    accelerator="cpu",
    # elastic added: strategy=ElasticStrategy(max_batch_size=32, local_bsz_bounds=(4, 16)),
    logger=TensorBoardLogger(os.environ["OUTPUT"]),
    max_epochs=3,
)
model = GAN()
trainer.fit(model, MNISTDataModule())
record(model, mean=model(model.validation_z).mean().item())
