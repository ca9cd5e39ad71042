"""An encoder and two heads, each with an optimizer of its own; a batch may have no samples of a head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adascale import ElasticTrainer, ReentryState
from support.training import FIXED, samples

HeadsOf = Callable[[int, int, int], str]
"""The heads in the loss of a batch: of a step, a replica and a micro-batch of this step."""

MICRO_BATCHES = {"batch_size": 12, "local_bsz_bounds": (2, 3)}
"""On two replicas, a step has two micro-batches of 3 samples."""

CASES: dict[str, tuple[dict[str, Any], HeadsOf]] = {
    "one replica without a head": (FIXED, lambda step, rank, _: "a" if step % 2 and not rank else "ab"),
    "another head on each replica": (FIXED, lambda step, rank, _: "ab"[rank] if step % 2 else "ab"),
    "one replica without gradients": (FIXED, lambda step, rank, _: "" if step % 2 and rank else "ab"),
    "no replica with a head": (FIXED, lambda step, *_: "a" if step % 2 else "ab"),
    "one replica for long without a head": (FIXED, lambda step, rank, _: "a" if step and rank else "ab"),
    "the last micro-batch of one replica": (MICRO_BATCHES, lambda _, rank, m: "a" if rank and m else "ab"),
    "the last micro-batch of both": (MICRO_BATCHES, lambda _, __, micro: "ba"[: 2 - micro]),
    "another micro-batch on each replica": (MICRO_BATCHES, lambda _, rank, m: "a" if rank == m else "ab"),
    "an encoder frozen at first": (FIXED, lambda step, *_: "-ab" if step == 0 else "ab"),
    "an encoder frozen in one micro-batch": (MICRO_BATCHES, lambda _, __, micro: "-ab" if micro else "ab"),
    "the first micro-batch": (MICRO_BATCHES, lambda _, __, micro: "ab" if micro else "a"),
}
"""For two replicas: the arguments of the trainer, and the heads."""

CASES_OF_ONE: dict[str, HeadsOf] = {
    "all": lambda *_: "ab",
    "the last two": lambda _, __, micro: "ab" if micro else "a",
    "the first two": lambda _, __, micro: "a" if micro == 2 else "ab",
    "the first": lambda _, __, micro: "a" if micro else "ab",
    "not in each step": lambda step, *_: "a" if step == 1 else "ab",
    "in some steps": lambda step, _, micro: "a" if step % 2 and micro == 2 else "ab",
}
"""For one replica and three micro-batches."""


class Heads:
    """Models and optimizers that always begin with the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.models = {"encoder": nn.Linear(6, 8), "a": nn.Linear(8, 2), "b": nn.Linear(8, 2)}
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for name, model in self.models.items()
        }

    def enter(self, trainer: ElasticTrainer) -> ReentryState:
        models: dict[str, nn.Module] = dict(self.models)
        return trainer.program_reentry(models, self.optimizers)

    def loss(self, x: Tensor, y: Tensor, heads: str) -> Tensor:
        """Return the loss of some heads; without any, a number that depends on no parameter.

        "-" freezes the encoder.
        """
        self.models["encoder"].requires_grad_("-" not in heads)
        heads = heads.strip("-")
        hidden = self.models["encoder"](x)
        losses = [nn.functional.cross_entropy(self.models[head](hidden), y) for head in heads]
        return torch.stack(losses).sum() if losses else torch.zeros((), requires_grad=True)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def step(self) -> None:
        """Make a step of each optimizer, with clipped gradients."""
        for name, optimizer in self.optimizers.items():
            nn.utils.clip_grad_norm_(self.models[name].parameters(), 0.1)
            optimizer.step()

    def learn(self, micro_batches: Sequence[tuple[Tensor, str]]) -> None:
        """Make a step as a plain program, with the mean gradient of batches of indices and heads."""
        self.zero_grad()
        for index, heads in micro_batches:
            _, x, y = samples()[index]
            (self.loss(x, y, heads) / len(micro_batches)).backward()
        self.step()

    def train(
        self, trainer: ElasticTrainer, heads_of: HeadsOf, pause: float = 0.0
    ) -> list[tuple[int, Tensor, str]]:
        """Train one epoch, and return the step, the indices and the heads of each micro-batch.

        With a pause on one replica, in seconds, the other one looks after each step for what the first has
        not announced yet.
        """
        done: list[tuple[int, Tensor, str]] = []
        for index, x, y in trainer.dataloader(samples()):
            step = trainer.steps
            heads = heads_of(step, trainer.rank, len(done) % trainer.accumulation)
            self.zero_grad()
            self.loss(x, y, heads).backward()
            self.step()
            time.sleep(pause)
            done.append((step, index, heads))
        return done

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for model in self.models.values() for p in model.parameters()]


def plain_parameters(steps: dict[int, list[tuple[Tensor, str]]]) -> list[Tensor]:
    """Return the parameters after plain steps with these micro-batches."""
    plain = Heads()
    for step in sorted(steps):
        plain.learn(steps[step])
    return plain.parameters()
