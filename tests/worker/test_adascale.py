"""The optimizer in one process, compared with `worker.reference` and with published values."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adascale.errors import SparseGradientError
from adascale_core.batch.gain import GradientEstimate
from adascale_worker.adascale import AdaScale
from worker.adascale_problem import (
    PUBLIC_VALUES,
    Net,
    assert_matches_reference,
    backward,
    batches,
    network,
    one_group,
    squared_error,
    train_step,
    two_groups,
    with_empty_groups,
)
from worker.reference import Batch, Reference

# -- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "gain"), PUBLIC_VALUES)
def test_published_gains_by_accumulation(first: list[float], second: list[float], gain: float) -> None:
    model = nn.Linear(2, 2)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    for x in (first, second):
        backward(model(torch.tensor(x)).sum() / 2)
    assert optimizer.gain() == pytest.approx(gain, abs=1e-6)
    optimizer.step()
    assert optimizer.gain() == pytest.approx(gain, abs=1e-6)


def test_the_gain_is_one_without_an_estimate() -> None:
    optimizer = AdaScale(torch.optim.SGD(network().parameters(), lr=0.1), scale=8.0)
    assert optimizer.gain() == 1.0
    assert optimizer.estimate is None
    assert optimizer.grad_sqr == 0.0
    assert optimizer.grad_var == 0.0
    assert optimizer.predict_gain(64.0) == 1.0


def test_predict_gain_uses_the_estimate_of_all_groups() -> None:
    optimizer = assert_matches_reference(micro=2, groups=two_groups)
    estimate = optimizer.estimate
    assert estimate is not None
    assert not estimate.biased
    assert (estimate.grad_sqr, estimate.grad_var) == (optimizer.grad_sqr, optimizer.grad_var)
    assert optimizer.predict_gain(16.0) == estimate.gain(16.0)


def limited(gain: float, max_gain: float) -> float:
    return 1 / (1 / max_gain + (1 - 1 / max_gain) / gain)


def test_a_limit_holds_for_steps_groups_predictions_and_estimates() -> None:
    models, scale, max_gain = (network(), network()), 16.0, 4.0
    free, optimizer = (
        AdaScale(
            torch.optim.SGD(two_groups(model), lr=0.05),
            num_gradients_to_accumulate=2,
            scale=scale,
            max_gain=limit,
        )
        for model, limit in zip(models, (None, max_gain), strict=True)
    )
    rates: list[float] = []
    optimizer.optimizer.register_step_pre_hook(
        lambda sgd, *_: rates.extend(group["lr"] for group in sgd.param_groups)
    )
    for each, model in zip((free, optimizer), models, strict=True):
        train_step(each, model, batches(2))
    for number in (0, 1, None):
        assert optimizer.gain(number) == pytest.approx(limited(free.gain(number), max_gain), rel=1e-9)
    for number, group in enumerate(optimizer.param_groups):
        assert rates[number] == pytest.approx(group["lr"] * optimizer.gain(number), rel=1e-9)
    assert optimizer.gain() < free.gain()
    assert optimizer.predict_gain(1e9) <= max_gain
    assert optimizer.estimate is not None
    assert optimizer.estimate.gain(64.0) == optimizer.predict_gain(64.0)
    assert GradientEstimate(optimizer.grad_sqr, optimizer.grad_var).gain(scale) == optimizer.gain()


def test_a_checkpoint_has_estimates_without_a_limit() -> None:
    model = network()
    saved = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2, scale=16.0, max_gain=4.0
    )
    train_step(saved, model, batches(2))
    resumed = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=16.0, max_gain=4.0)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.gain() == saved.gain()
    without = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=16.0)
    without.load_state_dict(saved.state_dict())
    assert saved.gain() == pytest.approx(limited(without.gain(), 4.0), rel=1e-9)


@pytest.mark.parametrize("max_gain", [1.0, math.inf, math.nan])
def test_a_limit_out_of_range_is_rejected(max_gain: float) -> None:
    with pytest.raises(ValueError, match=r"got max_gain .*above 1 and finite"):
        AdaScale(torch.optim.SGD(network().parameters(), lr=0.1), max_gain=max_gain)


# -- loops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro", "groups"), [(5, one_group), (2, two_groups), (2, with_empty_groups)])
def test_accumulation_with_a_scaled_loss(
    micro: int, groups: Callable[[nn.Module], list[dict[str, Any]]]
) -> None:
    assert_matches_reference(micro=micro, groups=groups)


def test_accumulation_with_a_summed_loss_divides_the_gradients() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    assert_matches_reference(loop, micro=3, is_scaled_loss=False)


def test_gradients_of_a_summed_loss_may_be_divided_before_the_step() -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch))
        optimizer.scale_grad_by_num_grads_to_accum()
        optimizer.step()
        optimizer.zero_grad()

    assert_matches_reference(loop, micro=3, is_scaled_loss=False)


def test_dividing_the_gradients_of_a_scaled_loss_raises() -> None:
    optimizer = AdaScale(torch.optim.SGD(network().parameters(), lr=0.1), num_gradients_to_accumulate=2)
    with pytest.raises(RuntimeError, match=r"is_scaled_loss=True, so the loss is already divided"):
        optimizer.scale_grad_by_num_grads_to_accum()


@pytest.mark.parametrize(("set_to_none", "micro"), [(True, 1), (False, 2)])
def test_zero_grad_with_both_values_of_set_to_none(*, set_to_none: bool, micro: int) -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        optimizer.step()

    assert_matches_reference(loop, micro=micro, scale=4.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model(*, set_to_none: bool) -> None:
    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        for batch in step:
            backward(squared_error(model, batch) / len(step))
        optimizer.step()
        model.zero_grad(set_to_none=set_to_none)

    assert_matches_reference(loop, micro=2)


@pytest.mark.parametrize("micro", [1, 3])
def test_a_closure_is_called_once_and_its_loss_returned(micro: int) -> None:
    calls = []

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        def closure() -> float:
            calls.append(len(step))
            optimizer.zero_grad()
            value = 0.0
            for batch in step:
                loss = squared_error(model, batch) / len(step)
                backward(loss)
                value += loss.item()
            return value

        returned = optimizer.step(closure)
        assert isinstance(returned, float)

    assert_matches_reference(loop, micro=micro, scale=4.0)
    assert calls == [micro] * 12


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"maximize": True, "lr": 0.001},
        {"foreach": True, "momentum": 0.9},
        {"foreach": False, "momentum": 0.9},
        {"fused": True, "momentum": 0.9},
        {"lr": torch.tensor(0.05, dtype=torch.float64)},
        {"lr": torch.tensor(0.05, dtype=torch.float64), "momentum": 0.9, "foreach": False},
    ],
    ids=str,
)
def test_options_of_sgd(options: dict[str, Any]) -> None:
    assert_matches_reference(micro=2, options=options)


def test_one_replica_measures_the_difference_of_consecutive_gradients() -> None:
    optimizer = assert_matches_reference(micro=1, scale=8.0, groups=two_groups)
    assert optimizer.estimate is not None
    assert optimizer.estimate.biased


def test_one_replica_measures_a_group_beside_groups_without_parameters() -> None:
    assert_matches_reference(micro=1, scale=8.0, groups=with_empty_groups)


def test_unbiased_estimates_replace_biased_estimates() -> None:
    model = network()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.01), scale=2.0)
    data = batches(8)
    for batch in data[:6]:
        train_step(optimizer, model, [batch])
    assert optimizer.estimate is not None
    assert optimizer.estimate.biased

    optimizer.set_num_gradients_to_accumulate(2)
    optimizer.set_scale(4.0)
    reference_model = copy.deepcopy(model)
    reference = Reference(
        reference_model, torch.optim.SGD(reference_model.parameters(), lr=0.01), squared_error, 4.0
    )
    train_step(optimizer, model, data[6:])
    reference.step(data[6:])

    assert not optimizer.estimate.biased
    assert (optimizer.grad_sqr, optimizer.grad_var) == pytest.approx(reference.estimate(), rel=1e-9)


# -- parameters of all kinds -------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 2])
def test_frozen_parameters_are_measured_after_they_are_unfrozen(micro: int) -> None:
    model = network()
    model.first.weight.requires_grad_(False)
    steps = iter(range(100))

    def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
        train_step(optimizer, model, step)
        assert model.first.weight.grad is None  # type: ignore[union-attr]
        next(steps)

    optimizer = assert_matches_reference(loop, micro=micro, model=model, scale=4.0)
    estimate_before = optimizer.estimate

    model.first.weight.requires_grad_(True)
    train_step(optimizer, model, batches(micro, seed=5))
    if micro > 1:
        assert optimizer.estimate == estimate_before, (
            "the step in which the parameter was unfrozen is left out"
        )
    train_step(optimizer, model, batches(micro, seed=6))
    assert optimizer.estimate != estimate_before


LATER: tuple[tuple[float, float], ...] = (
    *[(0.0, 0.0)] * 3,
    *[(0.0, 0.02)] * 4,
    *[(0.01, 0.02)] * 4,
    *[(0.01, 0.0)] * 3,
)
"""The learning rates of two groups: a warm-up that begins at 0, layers that are trained later, and an end."""


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    ("kind", "tensor"), [(torch.optim.SGD, False), (torch.optim.SGD, True), (torch.optim.AdamW, False)]
)
def test_groups_with_lr_0_do_not_count_unless_all_have_it(
    *, micro: int, kind: type[torch.optim.Optimizer], tensor: bool
) -> None:
    model, reference_model = network(), network()
    adascale = AdaScale(
        kind(two_groups(model), lr=0.0),  # type: ignore[call-arg]
        num_gradients_to_accumulate=micro,
        scale=8.0,
    )
    reference = Reference(
        reference_model,
        kind(two_groups(reference_model), lr=0.0),  # type: ignore[call-arg]
        squared_error,
        scale=8.0,
    )
    data = iter(batches(micro * len(LATER)))
    for rates in LATER:
        for group, twin, rate in zip(adascale.param_groups, reference.sgd.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float64) if tensor else rate
            twin["lr"] = rate
        step = [next(data) for _ in range(micro)]
        train_step(adascale, model, step)
        reference.step(step)
        for number in (None, 0, 1):
            assert adascale.gain(number) == pytest.approx(reference.gain(number), rel=1e-6)
        if adascale.estimate is not None:
            assert (adascale.grad_sqr, adascale.grad_var) == pytest.approx(reference.estimate(), rel=1e-6)
        for ours, theirs in zip(model.parameters(), reference_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    first, second = adascale.gain(0), adascale.gain(1)
    assert adascale.gain() == first != second


def test_a_frozen_group_does_not_count() -> None:
    model = network()
    adascale = AdaScale(torch.optim.SGD(two_groups(model), lr=0.05), num_gradients_to_accumulate=2)
    train_step(adascale, model, batches(2))
    assert adascale.gain() not in (adascale.gain(0), adascale.gain(1))
    model.first.requires_grad_(False)
    train_step(adascale, model, batches(2, seed=2))
    assert adascale.gain() == adascale.gain(1)
    model.second.requires_grad_(False)
    assert adascale.gain() == adascale.gain(1), (
        "as while a program trains the parameters of another optimizer"
    )


@pytest.mark.parametrize("micro", [1, 2])
def test_parameters_used_by_some_batches_only(micro: int) -> None:
    class Sometimes(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            out: Tensor = self.second(hidden) if float(x[0, 0]) > 0 else hidden[:, :2]
            return out

    torch.manual_seed(0)
    assert_matches_reference(micro=micro, model=Sometimes().double(), scale=4.0)


def test_a_shared_parameter_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(3, 3)
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.tanh(self.inside(torch.tanh(self.inside(x)))))
            return out

    torch.manual_seed(0)
    assert_matches_reference(micro=2, model=Tied().double())


def test_a_group_added_later_is_measured_from_then_on() -> None:
    model = network()
    optimizer = AdaScale(
        torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.9), num_gradients_to_accumulate=2
    )
    data = batches(8)
    train_step(optimizer, model, data[:2])
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.01})
    assert optimizer.gain(1) == 1.0
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.param_groups[1]["momentum"] == 0.9
    before = optimizer.gain(0)
    model.zero_grad()
    train_step(optimizer, model, data[2:4])
    assert optimizer.gain(1) > 1.0
    assert optimizer.gain(0) != before
    with pytest.raises(IndexError, match="pg_idx=2; there are 2"):
        optimizer.gain(2)


@pytest.mark.parametrize("micro", [1, 2])
def test_sparse_gradients_raise(micro: int) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    inner = torch.optim.SGD(embedding.parameters(), lr=0.1)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=micro, scale=2.0)
    with pytest.raises(SparseGradientError, match=r"sparse_coo.*shape \(10, 3\).*sparse=False"):
        backward(embedding(torch.tensor([1, 2])).sum())
    optimizer.unhook()


@pytest.mark.parametrize(
    ("micro", "reentrant", "whole"), [(1, True, True), (2, True, False), (2, False, True), (1, False, False)]
)
def test_activation_checkpointing_is_measured_unless_it_is_reentrant(
    *, reentrant: bool, micro: int, whole: bool
) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            hidden = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=reentrant)
            if whole:
                last: Tensor = checkpoint(self.second, hidden, use_reentrant=reentrant)
                return last
            out: Tensor = self.second(hidden)
            return out

    torch.manual_seed(0)
    model = Checkpointed().double()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=micro, scale=4.0
    )
    plain = network()
    reference = Reference(plain, torch.optim.SGD(plain.parameters(), lr=0.05), squared_error, 4.0)
    data = iter(batches(6 * micro))
    expected = pytest.warns(RuntimeWarning, match="use_reentrant=False") if reentrant else nullcontext()
    with expected:
        for _ in range(6):
            step = [next(data) for _ in range(micro)]
            train_step(optimizer, model, [(x.clone(), y) for x, y in step])
            reference.step(step)
            assert optimizer.gain() == pytest.approx(1.0 if reentrant else reference.gain(), rel=1e-9)
