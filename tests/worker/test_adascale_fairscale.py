"""FairScale's AdaScale and ours on the same gradients. If the two differ, the test states the reason."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import Net, backward, batches, network, squared_error, two_groups
from worker.reference import Batch

with warnings.catch_warnings():
    # Its import issues deprecation warnings about pkg_resources and autocast decorators.
    warnings.simplefilter("ignore")
    from fairscale.optim import AdaScale as FairScale


def both(micro: int = 2, **arguments: Any) -> tuple[Net, AdaScale, Net, Any]:
    model = network()
    other = copy.deepcopy(model)
    ours = AdaScale(
        torch.optim.SGD(two_groups(model), lr=0.05, momentum=0.9),
        world_size=1,
        num_gradients_to_accumulate=micro,
        sample_every=1,
        **arguments,
    )
    theirs = FairScale(
        torch.optim.SGD(two_groups(other), lr=0.05, momentum=0.9),
        world_size=1,
        num_gradients_to_accumulate=micro,
        **arguments,
    )
    return model, ours, other, theirs


def step(optimizer: Any, model: nn.Module, batches_: list[Batch], *, divided: bool = True) -> None:
    for batch in batches_:
        loss = squared_error(model, batch)
        backward(loss / len(batches_) if divided else loss)
    optimizer.step()
    optimizer.zero_grad()


def batches_with_little_noise(micro: int, seed: int) -> list[Batch]:
    """Micro-batches with most samples in common, so that the true gradient is larger than its noise."""
    (x, y), *_ = first = batches(micro, seed=seed)
    return [(torch.cat([x, x, x, own]), torch.cat([y, y, y, target])) for own, target in first]


def assert_equal_weights(left: nn.Module, right: nn.Module) -> None:
    for ours, theirs in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("micro", "smoothing", "debias"), [(2, None, True), (4, 0.0, False), (4, None, False), (2, 0.9, True)]
)
def test_gains_and_weights_are_equal_if_no_estimate_is_negative(
    *, micro: int, smoothing: float | None, debias: bool
) -> None:
    model, ours, other, theirs = both(micro, smoothing=smoothing, debias_ewma=debias)
    for number in range(10):
        data = batches_with_little_noise(micro, number)
        step(ours, model, data)
        step(theirs, other, data)
        assert ours.gain() == pytest.approx(theirs.gain(), rel=1e-5)
        assert ours.gain(0) == pytest.approx(theirs.gain(0), rel=1e-5)
        assert ours.gain(1) == pytest.approx(theirs.gain(1), rel=1e-5)
        assert ours.scale == theirs.scale
        assert ours.smoothing == pytest.approx(theirs.smoothing)
    assert_equal_weights(model, other)
    theirs.unhook()


def test_fairscale_clamps_negative_estimates_before_averaging() -> None:
    """FairScale clamps each step's estimates before averaging, so that noise raises the average of grad_sqr.

    The more noise, the larger its estimate of the true gradient, and the smaller its gain.
    """
    torch.manual_seed(0)
    weight, other_weight = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    settings: dict[str, Any] = {"scale": 16.0, "num_gradients_to_accumulate": 2, "smoothing": 0.998}
    ours = AdaScale(torch.optim.SGD([weight], lr=0.0), sample_every=1, **settings)
    theirs = FairScale(torch.optim.SGD([other_weight], lr=0.0), world_size=1, **settings)
    for _ in range(1000):
        for _ in range(2):
            noise = torch.randn(2)
            backward((weight * noise).sum() / 2)
            backward((other_weight * noise).sum() / 2)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    # The true gradient is zero, so the gain is S.
    assert ours.gain() > 14.0
    assert theirs.gain() < 12.0
    theirs.unhook()


def test_fairscale_changes_the_estimate_with_the_scale() -> None:
    """`grad_var` is the variance at the initial batch size in both; but FairScale rescales it."""
    model, ours, other, theirs = both()
    for number in range(5):
        data = batches(2, seed=number)
        step(ours, model, data)
        step(theirs, other, data)
    expected = ours.predict_gain(8.0)
    ours.set_scale(8.0)
    theirs.set_scale(8.0)
    assert ours.gain() == expected
    assert theirs.gain() < expected
    theirs.unhook()


def test_fairscale_divides_gradients_of_a_summed_loss_only_by_a_call() -> None:
    """Without `scale_grad_by_num_grads_to_accum`, FairScale uses the sum; ours divides in `step`."""
    model, ours, other, theirs = both(is_scaled_loss=False)
    for number in range(5):
        data = batches_with_little_noise(2, number)
        step(ours, model, data, divided=False)
        for batch in data:
            backward(squared_error(other, batch))
        theirs.scale_grad_by_num_grads_to_accum()
        theirs.step()
        theirs.zero_grad()
        assert ours.gain() == pytest.approx(theirs.gain(), rel=1e-4)
    assert_equal_weights(model, other)
    theirs.unhook()


def test_fairscale_refuses_a_single_worker_and_frozen_parameters() -> None:
    sgd = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="does not support a single worker"):
        FairScale(sgd, world_size=1)
    assert AdaScale(sgd).gain() == 1.0
    frozen = network()
    frozen.first.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        FairScale(torch.optim.SGD(frozen.parameters(), lr=0.1), world_size=2)
    assert AdaScale(torch.optim.SGD(frozen.parameters(), lr=0.1), world_size=2).gain() == 1.0


def test_loading_a_state_of_fairscale_warns() -> None:
    model, ours, other, theirs = both()
    step(theirs, other, batches(2))
    with pytest.warns(UserWarning, match="no AdaScale part"):
        ours.load_state_dict(theirs.state_dict())
    step(ours, model, batches(2))
    assert ours.state[model.first.weight]["momentum_buffer"] is not None
    theirs.unhook()
