"""A small GAN and its training loop, for a trainer and as a plain program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adascale import ElasticTrainer, ReentryState

BCE = nn.functional.binary_cross_entropy_with_logits
NOISE = 3


class Generator(nn.Module):
    """From noise to samples of 6 features."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(NOISE, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(16, 6))

    def forward(self, z: Tensor) -> Tensor:
        made: Tensor = self.layers(z)
        return made


class Discriminator(nn.Module):
    """From samples to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Gan:
    """Models and optimizers that always begin with the same weights."""

    def __init__(self, *, norm: bool = False, seed: int = 2, adam: bool = True) -> None:
        torch.manual_seed(seed)
        self.generator, self.discriminator = Generator(norm=norm), Discriminator()
        self.optimizers: dict[str, Optimizer]
        if adam:
            make: Any = torch.optim.Adam
            self.optimizers = {
                "discriminator": make(self.discriminator.parameters(), lr=4e-3, betas=(0.5, 0.99)),
                "generator": make(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.99)),
            }
        else:
            self.optimizers = {
                "discriminator": torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
                "generator": torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9),
            }
        self.schedulers = {
            name: torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
            for name, optimizer in self.optimizers.items()
        }

    @property
    def models(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminator": self.discriminator}

    def enter(self, trainer: ElasticTrainer, **options: Any) -> ReentryState:
        return trainer.program_reentry(self.models, self.optimizers, self.schedulers, **options)

    def learn(
        self,
        x: Tensor,
        noise: Tensor,
        *,
        loop: str = "alternating",
        between: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Tensor]:
        """Make a step of both optimizers, in the way that `loop` names; call `between` between them."""
        d, g = self.optimizers["discriminator"], self.optimizers["generator"]
        if loop == "generator first":
            g.zero_grad()
            loss_g = self.generator_loss(self.generator(noise))
            loss_g.backward()
            g.step()
            between()
            d.zero_grad()
            loss_d = self.discriminator_loss(x, self.generator(noise).detach())
            loss_d.backward()
            d.step()
            return loss_d, loss_g
        if loop in ("two backward passes", "changed between two passes"):
            self.discriminator.zero_grad()
            real, fake = self.discriminator(x), self.generator(noise)
            loss_d = BCE(real, torch.ones_like(real))
            loss_d.backward()
            if loop == "changed between two passes":
                for parameter in self.discriminator.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad + 0.05 * parameter.detach()
                torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.2)
            found = self.discriminator(fake.detach())
            BCE(found, torch.zeros_like(found)).backward()
            torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.5)
            d.step()
            between()
            self.generator.zero_grad()
        elif loop in ("deleted by hand", "zeroed by another module"):
            d.zero_grad()
            fake = self.generator(noise)
            # It reaches the generator too.
            loss_d = self.discriminator_loss(x, fake)
            loss_d.backward(retain_graph=True)
            d.step()
            between()
            if loop == "zeroed by another module":
                nn.ModuleList([self.generator, self.discriminator]).zero_grad()
            for parameter in self.generator.parameters():
                parameter.grad = None
        elif loop == "zeroed together":
            d.zero_grad()
            g.zero_grad()
            fake = self.generator(noise)
            loss_d = self.discriminator_loss(x, fake.detach())
            loss_d.backward()
            d.step()
            between()
        elif loop == "frozen":
            d.zero_grad()
            with torch.no_grad():
                fake = self.generator(noise)
            loss_d = self.discriminator_loss(x, fake)
            loss_d.backward()
            d.step()
            between()
            self.discriminator.requires_grad_(False)
            g.zero_grad()
            fake = self.generator(noise)
        else:
            d.zero_grad()
            fake = self.generator(noise)
            loss_d = self.discriminator_loss(x, fake.detach())
            if loop == "gradient penalty":
                real = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(self.discriminator(real).sum(), real, create_graph=True)
                loss_d = loss_d + 0.1 * slope.square().sum(1).mean()
            loss_d.backward()
            torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.5)
            d.step()
            between()
            g.zero_grad()
        loss_g = self.generator_loss(fake)
        loss_g.backward()
        g.step()
        self.discriminator.requires_grad_(True)
        return loss_d, loss_g

    def discriminator_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        scores = torch.cat([self.discriminator(real), self.discriminator(fake)])
        return BCE(scores, torch.cat([scores.new_ones(len(real), 1), scores.new_zeros(len(fake), 1)]))

    def generator_loss(self, fake: Tensor) -> Tensor:
        scores = self.discriminator(fake)
        return BCE(scores, torch.ones_like(scores))

    def step_schedulers(self) -> None:
        for scheduler in self.schedulers.values():
            scheduler.step()

    def parameters(self) -> list[Tensor]:
        models: Iterable[nn.Module] = self.models.values()
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def noise_of(indices: Tensor) -> Tensor:
    """Return noise that depends on the samples alone."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(48, NOISE, generator=generator)[indices]
