"""Elastic training of a GAN: two models, each with its own Adam.

    adascale run examples/gan.yaml                  an elastic job, whose replica count changes
    python examples/gan.py                          one process, without a metrics service
    torchrun --nproc-per-node 2 examples/gan.py

The generator learns to draw the handwritten digits of scikit-learn, 1,797 images of 8x8 pixels, each from
its class and noise. The result is the share of generated digits that a classifier, trained on the real ones,
takes for the class that was asked for. The recipe was tuned for a batch size of 32.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

NOISE, CLASSES = 16, 10

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(
    torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
)


class Generator(nn.Module):
    """From noise and a class to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE + CLASSES, 64 * 4),
            nn.Unflatten(1, (64, 2, 2)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        image: Tensor = self.layers(torch.cat([noise, one_hot(label, CLASSES).float()], 1))
        return image


class Discriminator(nn.Module):
    """From an image and a class to the logit that the image is real."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1 + CLASSES, 32, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(64 * 4, 1),
        )

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        planes = one_hot(label, CLASSES).float()[:, :, None, None].expand(-1, -1, 8, 8)
        logit: Tensor = self.layers(torch.cat([image, planes], 1))
        return logit


def loss_of(logits: Tensor, target: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


trainer = ElasticTrainer(
    batch_size=32, max_batch_size=256, local_bsz_bounds=(16, 128), scale_invariant_steps=4_000
)

torch.manual_seed(0)
generator, discriminator = Generator().to(trainer.device), Discriminator().to(trainer.device)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))

trainer.program_reentry(
    {"discriminator": discriminator, "generator": generator},
    {"discriminator": optimizer_d, "generator": optimizer_g},
)
for _ in trainer.epochs():
    for real, label in trainer.dataloader(dataset):
        real, label = real.to(trainer.device), label.to(trainer.device)
        fake = generator(torch.randn(len(real), NOISE, device=trainer.device), label)

        optimizer_d.zero_grad()
        loss_d = loss_of(discriminator(real, label), 0.9) + loss_of(discriminator(fake.detach(), label), 0.0)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = loss_of(discriminator(fake, label), 1.0)
        loss_g.backward()
        optimizer_g.step()

        trainer.log(loss=loss_d, generator_loss=loss_g)

classifier = LogisticRegression(max_iter=1000).fit(images / 8 - 1, labels)
generator.eval()
wanted = TensorDataset(
    torch.arange(1000) % CLASSES, torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
)
with torch.no_grad():
    evaluation = trainer.evaluation(wanted, batch_size=250, model=generator)
    for label, noise in evaluation:
        drawn = generator(noise.to(trainer.device), label.to(trainer.device)).cpu()
        found = classifier.predict(drawn.flatten(1).numpy())
        evaluation.add(recognized=int((torch.tensor(found) == label).sum()))
if trainer.is_main:
    recognized = evaluation.means["recognized"]
    trainer.report_result(recognized=recognized)
    print(
        f"recognized {recognized:.1%} of the generated digits after {trainer.progress:.0f} steps at batch "
        "size 32",
        flush=True,
    )
