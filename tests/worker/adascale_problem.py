"""The small problem that the tests of the optimizer train on, and its comparison with the reference."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.adascale import AdaScale
from worker.reference import Batch, Reference

PUBLIC_VALUES = [
    ([1.0, 0.0], [0.0, 1.0], 4 / 3),
    ([-1.0, 1.0], [1.0, -1.0], 2.0),
    ([1.0, 4.0], [5.0, 0.5], 1.4688796680),
    ([-0.2, 3.0], [5.0, 0.5], 1.8472893902),
]
"""Inputs of two micro-gradients of Linear(2, 2) with loss = out.sum(), and the gain after one step."""


def backward(loss: Tensor) -> None:
    """Call `loss.backward()`, which has no types in torch."""
    loss.backward()


class Net(nn.Module):
    """Two layers, in float64 so that rounding is far below the tolerances."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    error: Tensor = model(x) - y
    return (error**2).mean()


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def matrices() -> nn.Module:
    """A tall matrix and a wide one, for Muon."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False)
    return nn.Sequential(first, nn.Tanh(), second).double()


def batches(count: int, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4, 3, dtype=torch.float64, generator=generator),
            torch.randn(4, 2, dtype=torch.float64, generator=generator),
        )
        for _ in range(count)
    ]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, Net)
    return [
        {"params": list(model.first.parameters())},
        {"params": list(model.second.parameters()), "lr": 0.02},
    ]


def with_empty_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups without parameters, as for a network that has no parameters of a kind."""
    return [{"params": []}, *one_group(model), {"params": []}]


Groups = Callable[[nn.Module], list[dict[str, Any]]]
Loop = Callable[[AdaScale, nn.Module, list[Batch]], None]


def train_step(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
    """Make a step of some micro-batches; DDP averages their gradients in the last one."""
    for number, batch in enumerate(step):
        is_last = number == len(step) - 1
        with nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            backward(squared_error(model, batch) / len(step))
    optimizer.step()
    optimizer.zero_grad()


def assert_matches_reference(
    loop: Loop = train_step,
    *,
    micro: int = 1,
    steps: int = 12,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    groups: Groups = one_group,
    options: dict[str, Any] | None = None,
    scale: float | None = None,
    rescale: float | None = None,
    clip: float | None = None,
    model: nn.Module | None = None,
    reference_model: nn.Module | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    model_given: bool = False,
    data: Callable[[int], list[Batch]] = batches,
    tolerance: float = 1e-9,
    **arguments: Any,
) -> AdaScale:
    """Train with `loop`, on all ranks if there are several, and with the reference; compare each step.

    Args:
        loop: makes a step of the micro-batches of this rank.
        micro: micro-batches of a rank in a step.
        kind: makes the inner optimizer; the reference has SGD, unless this is Adam, AdamW or Muon.
        rescale: the scale in the second half of the steps.
        model_given: whether AdaScale gets the wrapped model.
        arguments: of AdaScale.
    """
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    has_rule = kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon)
    settings = {"lr": 0.05, **({} if has_rule else {"momentum": 0.9}), **(options or {})}
    model = network() if model is None else model
    reference_model = copy.deepcopy(model) if reference_model is None else reference_model
    wrapped = wrap(model)
    optimizer = AdaScale(
        kind(groups(model), **settings),
        num_gradients_to_accumulate=micro,
        scale=scale,
        model=wrapped if model_given else None,
        **arguments,
    )
    plain = (kind if has_rule else torch.optim.SGD)(groups(reference_model), **copy.deepcopy(settings))
    reference = Reference(reference_model, plain, squared_error, optimizer.scale, clip=clip)
    stream = iter(data(micro * ranks * steps))
    for number in range(steps):
        if rescale is not None and number == steps // 2:
            optimizer.set_scale(rescale)
            reference.scale = rescale
        step = [next(stream) for _ in range(micro * ranks)]
        loop(optimizer, wrapped, step[rank * micro :][:micro])
        reference.step(step)
        assert_equal(optimizer, model, reference, tolerance)
    if ranks == 1:
        assert optimizer.grad_sqr == pytest.approx(reference.estimate()[0], rel=tolerance)
        assert optimizer.grad_var == pytest.approx(reference.estimate()[1], rel=tolerance)
    assert optimizer.gain() != 1.0 or optimizer.scale == 1.0
    return optimizer


def assert_equal(
    optimizer: AdaScale, model: nn.Module, reference: Reference, tolerance: float = 1e-9
) -> None:
    """Assert the gains and weights of the reference, and that the gains of all ranks are equal to the bit."""
    for number in (None, *range(len(optimizer.param_groups))):
        assert optimizer.gain(number) == pytest.approx(reference.gain(number), rel=tolerance)
    for ours, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    if dist.is_initialized():
        gains: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gains, optimizer.gain())
        assert len(set(gains)) == 1
