"""A small training program: data, a model, an optimizer and a loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

MakeTrainer = Callable[..., ElasticTrainer]

FIXED = {"batch_size": 8}
ACCUMULATING = {"batch_size": 12, "local_bsz_bounds": (2, 4)}
"""A step has three micro-batches of 4 samples."""
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
"""Calls of CUDA that wait for the GPU, in the profiler's names."""


def samples(count: int = 48) -> TensorDataset:
    """Return a data set of index, features and class."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(count, 6, generator=generator)
    return TensorDataset(torch.arange(count), features, (features.sum(1) > 0).long())


def network(*, dropout: float = 0.0) -> nn.Sequential:
    """Return a network that always has the same initial weights."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Return an optimizer with momentum and weight decay, so that small deviations accumulate."""
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **options}
    )


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return an AdamW whose averages have much weight, so that small deviations accumulate."""
    return torch.optim.AdamW(
        model.parameters(), **{"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
    )


def entered(make_trainer: MakeTrainer, **options: Any) -> tuple[ElasticTrainer, nn.Module, torch.optim.SGD]:
    """Return a trainer after program_reentry, the network, and its optimizer."""
    trainer, model = make_trainer(**options), network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    return trainer, model, optimizer


def learn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Do a forward and a backward pass."""
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Make a step, or the part of one for a micro-batch."""
    optimizer.zero_grad()
    learn(model, x, y)
    optimizer.step()


def train_without(
    left_out: Collection[int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[list[int]],
) -> None:
    """Train on micro-batches of `samples(36)`, three in a step, without some of them, by their numbers.

    A step whose last one is left out is not made.
    """
    for step in range(len(batches) // 3):
        if 3 * step + 2 not in left_out:
            kept = [batches[number] for number in range(3 * step, 3 * step + 3) if number not in left_out]
            _, x, y = samples(36)[concatenate(kept)]
            make_step(model, optimizer, x, y)


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """Return samples that are moved in the direction of the gradient of the outputs."""
    moved = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(moved).square().sum(), moved)
    return x + 0.1 * gradient.sign()


def train(
    trainer: ElasticTrainer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    epochs: range = range(1),
    data: TensorDataset | None = None,
) -> list[list[int]]:
    """Train some epochs, and return the sample indices of each micro-batch."""
    batches = []
    for epoch in epochs:
        for index, x, y in trainer.dataloader(data or samples()):
            optimizer.zero_grad()
            trainer.log(loss=learn(model, x, y))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            batches.append(index.tolist())
        trainer.step(epoch)
    return batches


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return all(map(torch.equal, left, right)) and len(left) == len(right)


def concatenate(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def placed_on(mesh: DeviceMesh, parameters: Sequence[object]) -> Callable[[nn.Parameter], Any]:
    """Return a function for `fully_shard` with which it shards some parameters over a mesh of their own."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    if not hasattr(_fsdp_common, "ShardPlacementResult"):  # in older versions of torch
        return lambda _: None
    on_mesh = _fsdp_common.ShardPlacementResult(
        None, _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    return lambda parameter: on_mesh if any(parameter is each for each in parameters) else None
