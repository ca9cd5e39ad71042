"""The comparison of training loops on several ranks with `worker.reference`."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import (
    backward,
    batches,
    network,
    one_group,
    squared_error,
)
from worker.reference import Batch, Reference

Wrapped = DistributedDataParallel
Groups = Callable[[nn.Module], list[dict[str, Any]]]
Loop = Callable[[AdaScale, nn.Module, list[Batch]], None]


def plain(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
    for number, batch in enumerate(step):
        last = number == len(step) - 1
        with nullcontext() if last or not isinstance(model, Wrapped) else model.no_sync():
            backward(squared_error(model, batch) / len(step))
    optimizer.step()
    optimizer.zero_grad()


def assert_matches_reference(
    loop: Loop = plain,
    *,
    micro: int = 1,
    steps: int = 5,
    groups: Groups = one_group,
    model_given: bool = True,
    model: nn.Module | None = None,
    reference_model: nn.Module | None = None,
    wrap: Callable[[nn.Module], nn.Module] = Wrapped,
    sgd: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    adam: type[torch.optim.Adam] | type[torch.optim.AdamW] | None = None,
    options: dict[str, Any] | None = None,
    clip: float | None = None,
    tolerance: float = 1e-9,
    data: Callable[[int], list[Batch]] = batches,
    **arguments: Any,
) -> AdaScale:
    """Train with `loop` on all ranks and with the reference; assert equality after every step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = network() if model is None else model
    reference_model = copy.deepcopy(model) if reference_model is None else reference_model
    settings = {"lr": 0.05, **({} if adam else {"momentum": 0.9}), **(options or {})}
    wrapped = wrap(model)
    optimizer = AdaScale(
        (adam or sgd)(groups(model), **settings),
        num_gradients_to_accumulate=micro,
        model=wrapped if model_given else None,
        **arguments,
    )
    reference = Reference(
        reference_model,
        (adam or torch.optim.SGD)(groups(reference_model), **settings),
        squared_error,
        optimizer.scale,
        smoothing=optimizer.smoothing,
        clip=clip,
    )
    stream = iter(data(steps * micro * ranks))
    for _ in range(steps):
        step = [next(stream) for _ in range(micro * ranks)]
        loop(optimizer, wrapped, step[rank * micro : (rank + 1) * micro])
        reference.step(step)
        assert_equal(optimizer, model, reference, tolerance)
    return optimizer


def assert_equal(
    optimizer: AdaScale, model: nn.Module, reference: Reference, tolerance: float = 1e-9
) -> None:
    """Assert the gains and weights of the reference, and that the gains of all ranks are equal to the bit."""
    for number in (None, *range(len(optimizer.param_groups))):
        assert optimizer.gain(number) == pytest.approx(reference.gain(number), rel=tolerance)
    for ours, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    gains = torch.tensor([optimizer.gain()], dtype=torch.float64)
    every = [torch.zeros_like(gains) for _ in range(dist.get_world_size())]
    dist.all_gather(every, gains)
    assert all(torch.equal(gain, gains) for gain in every)
