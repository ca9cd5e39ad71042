"""The bias and the noise of the estimates, on problems with gradients in closed form."""

import math
import statistics
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import backward

DIMENSIONS = 60
"""With more dimensions, fewer steps show a bias."""
TRUE = torch.linspace(0.1, 0.6, DIMENSIONS, dtype=torch.float64)
NOISE = torch.linspace(0.5, 1.5, DIMENSIONS, dtype=torch.float64)
GRAD_SQR = float((TRUE**2).sum())
GRAD_VAR = float((NOISE**2).sum())


def noisy_gradients(batch: float, seed: int) -> Iterator[Tensor]:
    """Gradients of a batch of `batch` times B0, with mean TRUE and variance NOISE^2 / batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        noise = torch.randn(DIMENSIONS, dtype=torch.float64, generator=generator)
        yield TRUE + noise * NOISE / math.sqrt(batch)


def single_estimates(scale: float, micro: int, steps: int) -> tuple[list[float], list[float]]:
    """The estimates of single steps. The loss is linear, so the true gradient is the same everywhere."""
    weight = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))
    optimizer = AdaScale(
        torch.optim.SGD([weight], lr=0.1),
        scale=scale,
        num_gradients_to_accumulate=micro,
        smoothing=0.0,
        sample_every=1,
    )
    gradients = noisy_gradients(scale / micro, seed=int(scale) * 100 + micro)
    sqrs, variances = [], []
    for _ in range(steps):
        for _ in range(micro):
            backward((weight * next(gradients)).sum() / micro)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.estimate is not None:
            sqrs.append(optimizer.grad_sqr)
            variances.append(optimizer.grad_var)
    return sqrs, variances


def within_confidence(samples: list[float], truth: float) -> bool:
    """Whether the truth is within 3.5 standard errors of the mean; by chance it is not once in 2000."""
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    assert error < 0.25 * truth, "too few samples"
    return abs(statistics.mean(samples) - truth) < 3.5 * error


@pytest.mark.parametrize(
    ("scale", "micro"),
    [(1, 1), (1, 2), (4, 4), (8, 2), (16, 16), (64, 1)],
)
def test_estimates_are_unbiased(scale: int, micro: int) -> None:
    """At any scale and number of micro-gradients; a single one suffices if the true gradient is constant."""
    steps = 150 if scale == 1 else max(200 // scale, 40)
    sqrs, variances = single_estimates(scale, micro, steps)
    assert within_confidence(sqrs, GRAD_SQR)
    assert within_confidence(variances, GRAD_VAR)


def test_the_gain_converges_to_the_true_gain() -> None:
    true_gain = (GRAD_VAR + GRAD_SQR) / (GRAD_VAR / 16 + GRAD_SQR)
    weight = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))
    optimizer = AdaScale(torch.optim.SGD([weight], lr=0.1), scale=16.0, num_gradients_to_accumulate=4)
    gradients = noisy_gradients(4.0, seed=3)
    for _ in range(200):
        for _ in range(4):
            backward((weight * next(gradients)).sum() / 4)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.gain() == pytest.approx(true_gain, rel=0.15)


def test_the_bias_of_the_difference_estimate_is_as_documented() -> None:
    """Without noise, all of its grad_var is bias: |H d|^2 / (1/S1 + 1/S2), H the Hessian and d the step."""
    hessian, scale, lr = 0.5, 8.0, 0.1
    weight = nn.Parameter(torch.ones(DIMENSIONS, dtype=torch.float64))
    optimizer = AdaScale(torch.optim.SGD([weight], lr=lr), scale=scale, smoothing=0.0, sample_every=1)
    moved = torch.zeros_like(weight)
    for number in range(5):
        before = weight.detach().clone()
        backward(0.5 * hessian * (weight**2).sum())
        optimizer.step()
        optimizer.zero_grad()
        if number:
            bias = float((hessian * moved).pow(2).sum()) / (2 / scale)
            assert optimizer.grad_var == pytest.approx(bias)
        moved = weight.detach() - before


def test_the_difference_estimate_equals_that_of_micro_gradients_up_to_its_bias() -> None:
    """A quadratic loss with noise, so the true gradient changes."""
    hessian, scale, lr, steps = 0.3, 4.0, 0.02, 200
    estimates = []
    for micro in (1, 4):
        weight = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))
        optimizer = AdaScale(
            torch.optim.SGD([weight], lr=lr),
            scale=scale,
            num_gradients_to_accumulate=micro,
            smoothing=0.98,
            sample_every=1,
        )
        gradients = noisy_gradients(scale / micro, seed=micro)
        for _ in range(steps):
            for _ in range(micro):
                loss = 0.5 * hessian * (weight**2).sum() + (weight * (next(gradients) - TRUE)).sum()
                backward(loss / micro)
            optimizer.step()
            optimizer.zero_grad()
        estimates.append((optimizer.grad_sqr, optimizer.grad_var, optimizer.gain()))
    (_, biased, biased_gain), (_, unbiased, unbiased_gain) = estimates
    # A step is lr * gain * g with E|g|^2 about grad_var / S, so the bias is below this bound.
    bound = (hessian * lr * scale) ** 2 * GRAD_VAR
    noise = 4 * GRAD_VAR * math.sqrt(2 / DIMENSIONS / 50)
    assert abs(biased - unbiased) < bound + noise
    assert abs(biased_gain - unbiased_gain) < 0.5


@pytest.mark.slow
def test_sampling_changes_the_gain_by_less_than_its_noise() -> None:
    """The mean gain over runs differs by less than the spread of the runs."""

    def final_gain(every: int, seed: int) -> float:
        weight = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))
        optimizer = AdaScale(
            torch.optim.SGD([weight], lr=0.1),
            scale=4.0,
            num_gradients_to_accumulate=2,
            smoothing=0.99,
            sample_every=every,
        )
        gradients = noisy_gradients(2.0, seed)
        for _ in range(320):
            for _ in range(2):
                backward((weight * next(gradients)).sum() / 2)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.gain()

    all_steps = [final_gain(1, seed) for seed in range(5)]
    for every in (4, 16):
        some_steps = [final_gain(every, seed) for seed in range(5)]
        spread = statistics.stdev(all_steps + some_steps)
        assert abs(statistics.mean(all_steps) - statistics.mean(some_steps)) < spread
