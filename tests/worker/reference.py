"""AdaScale in a readable form: plain functions on lists of gradients, slow and in float64.

A gradient is a list of numbers. A step has n micro-gradients per parameter group. The fast optimizer is
tested to equal this reference. Formulas as in AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105). `Adam`
is that of Kingma and Ba (arXiv 1412.6980), with the scaling of Malladi et al. 2022 (arXiv 2205.10287).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Gradient = list[float]
Sample = tuple[float, float]
"""(grad_sqr, grad_var) from one step."""

Batch = tuple[Tensor, Tensor]


def squared_norm(gradient: Gradient) -> float:
    return sum(x * x for x in gradient)


def mean(gradients: Sequence[Gradient], weights: Sequence[float] | None = None) -> Gradient:
    weights = [1.0] * len(gradients) if weights is None else weights
    total = sum(weights)
    return [
        sum(w * x for w, x in zip(weights, column, strict=True)) / total
        for column in zip(*gradients, strict=True)
    ]


def sample(
    micro_gradients: Sequence[Gradient], scale: float, weights: Sequence[float] | None = None
) -> Sample:
    """Return the unbiased estimates from the n >= 2 micro-gradients of a step at `scale`.

    With weights, the step's gradient is their weighted mean, and a micro-gradient of weight w has 1/w of the
    variance of one of weight 1, as a mean over w tokens has. Those of weight 0 do not count. Then
    E[L] = |G|^2 + n V / W and E[M] = |G|^2 + V / W, with L the weighted mean of |g|^2, M the square of the
    weighted mean, V the variance at weight 1, and W the sum of the weights. So the formulas are those of
    equal weights.
    """
    weights = [1.0] * len(micro_gradients) if weights is None else weights
    n = sum(w > 0 for w in weights)
    weighted = [w * squared_norm(g) for w, g in zip(weights, micro_gradients, strict=True)]
    mean_of_sqr = sum(weighted) / sum(weights)
    sqr_of_mean = squared_norm(mean(micro_gradients, weights))
    grad_sqr = (n * sqr_of_mean - mean_of_sqr) / (n - 1)
    grad_var = (mean_of_sqr - sqr_of_mean) * scale / (n - 1)
    return grad_sqr, grad_var


def difference_sample(before: Gradient, now: Gradient, scale_before: float, scale: float) -> Sample:
    """Return the estimates from two consecutive gradients of one replica, biased by the step between them."""
    product = sum(a * b for a, b in zip(before, now, strict=True))
    difference = sum((a - b) ** 2 for a, b in zip(before, now, strict=True))
    return product, difference / (1 / scale_before + 1 / scale)


def average(samples: Sequence[Sample], smoothings: Sequence[float]) -> Sample:
    """Return the mean weighted by (1 - theta_i) times the product of all later theta."""
    weights = []
    later = 1.0
    for theta in reversed(smoothings):
        weights.append((1 - theta) * later)
        later *= theta
    weights.reverse()
    total = sum(weights)
    return (
        sum(w * sqr for w, (sqr, _) in zip(weights, samples, strict=True)) / total,
        sum(w * var for w, (_, var) in zip(weights, samples, strict=True)) / total,
    )


def standard_error(values: Sequence[float], smoothings: Sequence[float]) -> float:
    """Return the standard error of the mean of `average`, from the spread of the values around it.

    A weighted mean has the error of the mean of m values of equal weight, m = (sum w)^2 / sum(w^2). The
    spread around the mean itself is too small by (m - 1) / m.
    """
    samples = [(value, value**2) for value in values]
    mean, square = average(samples, smoothings)
    weights, later = [], 1.0
    for theta in reversed(smoothings):
        weights.append((1 - theta) * later)
        later *= theta
    m = sum(weights) ** 2 / sum(w**2 for w in weights)
    return math.sqrt(max(square - mean**2, 0.0) / (m - 1))


def division_interval(number: int) -> int:
    """Return the interval between divided steps at a step: 8 divided steps while the steps double."""
    interval, end = 1, 16
    while number >= end and interval < 128:
        interval, end = 2 * interval, 2 * end
    return interval


def divided_smoothing(number: int) -> float:
    """Return the smoothing of the measurement of a divided step at S = 1, which stands for its interval.

    The window is that of the paper, 1,000 steps, or a quarter of the steps so far.
    """
    window = max(1000, number / 4)
    return (1 - 1 / window) ** division_interval(number)


def gain(estimate: Sample, scale: float) -> float:
    sqr, var = max(estimate[0], 0.0), max(estimate[1], 0.0)
    return 1.0 if sqr + var == 0.0 else (var + sqr) / (var / scale + sqr)


def smoothing(scale: float) -> float:
    return max(1 - scale / 1000, 0.0)


class Adam:
    """Adam or AdamW whose step is worth `gain` steps, in the form of the papers.

    Takes the groups, and the options in them, of an optimizer of torch that makes no steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.is_decoupled = isinstance(optimizer, torch.optim.AdamW)
        parameters = [p for group in self.groups for p in group["params"]]
        self.m = {p: torch.zeros_like(p) for p in parameters}
        self.v = {p: torch.zeros_like(p) for p in parameters}
        self.max_v = {p: torch.zeros_like(p) for p in parameters}
        self.progress = dict.fromkeys(parameters, 0.0)
        self.eps = [group["eps"] for group in self.groups]

    @torch.no_grad()
    def step(self, gains: Sequence[float]) -> None:
        for number, (group, gain) in enumerate(zip(self.groups, gains, strict=True)):
            beta1, beta2 = group["betas"]
            first = max(beta1**gain, min(beta1, 0.6))
            lr, decay = group["lr"], group["weight_decay"]
            self.eps[number] = group["eps"] / gain**0.5
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if self.is_decoupled:
                    p -= gain * lr * decay * p
                else:
                    g = g + decay * p
                self.progress[p] += gain
                self.m[p] = first * self.m[p] + (1 - first) * g
                self.v[p] = beta2**gain * self.v[p] + (1 - beta2**gain) * g**2
                self.max_v[p] = torch.maximum(self.max_v[p], self.v[p])
                m = self.m[p] / (1 - first ** (self.progress[p] / gain))
                p -= gain**0.5 * lr * m / (self.second_moment(group, p).sqrt() + self.eps[number])

    def second_moment(self, group: dict[str, Any], p: Tensor) -> Tensor:
        v: Tensor = self.max_v[p] if group["amsgrad"] else self.v[p]
        moment: Tensor = v / (1 - group["betas"][1] ** self.progress[p])
        return moment

    def divisors(self) -> list[list[float]] | None:
        """Return what each coordinate of a measured gradient is divided by; None before the first step."""
        if not any(self.progress.values()):
            return None
        whole: list[list[float]] = []
        for number, group in enumerate(self.groups):
            moments = {p: self.second_moment(group, p).double().flatten() for p in group["params"]}
            mean = torch.cat([moments[p] for p in moments if self.progress[p]]).mean()
            v = torch.cat([moments[p] if self.progress[p] else mean.expand(p.numel()) for p in moments])
            whole.append((v + 1e-3 * mean + self.eps[number] ** 2).sqrt().tolist())
        return whole


class MatrixMoments:
    """The second moment C = E[g gᵀ] of each matrix, that the gradients of Muon are measured with.

    |g|² = tr(gᵀ (C + c)⁻¹ g), which is the squared Euclidean norm of L⁻¹ g with L Lᵀ = C + c, and c a
    thousandth of the mean of the diagonal. The mean is over all steps, and from the 20th on a moving average.
    """

    def __init__(self, groups: list[list[torch.nn.Parameter]]) -> None:
        self.groups = groups
        self.moments: dict[Tensor, Tensor] = {}
        self.steps = 0

    def add(self) -> None:
        """Add the gradients of a step."""
        self.steps += 1
        for p in (p for group in self.groups for p in group):
            assert p.grad is not None
            g = p.grad.double() if len(p) <= p.shape[1] else p.grad.double().T
            old = self.moments.get(p, torch.zeros(len(g), len(g), dtype=torch.float64))
            self.moments[p] = old + (g @ g.T - old) / min(self.steps, 20)

    def measured(self, gradient: Gradient, group: list[torch.nn.Parameter]) -> Gradient:
        """Return the gradient of a group, each matrix g as L⁻¹ g."""
        whole: Gradient = []
        parts = torch.tensor(gradient, dtype=torch.float64).split([p.numel() for p in group])
        for p, part in zip(group, parts, strict=True):
            g = part.view(p.shape) if len(p) <= p.shape[1] else part.view(p.shape).T
            c = 1e-3 * self.moments[p].diagonal().mean() * torch.eye(len(g), dtype=torch.float64)
            root = torch.linalg.cholesky(self.moments[p] + c)
            whole += (torch.linalg.inv(root) @ g).flatten().tolist()
        return whole


Groups = list[list[torch.nn.Parameter]]
Loss = Callable[[torch.nn.Module, Batch], Tensor]


@dataclass
class Reference:
    """A training program in the simplest form: each micro-gradient by itself, then one plain SGD step.

    Attributes:
        model: a copy of the model that the fast optimizer trains.
        sgd: a plain optimizer over it, with the same groups and options. With an Adam or AdamW, the steps are
            made by the `Adam` of this module. A Muon makes its steps itself.
        loss: of one micro-batch, not divided.
        compares_steps: whether steps of one micro-gradient are compared with the step before.
    """

    model: torch.nn.Module
    sgd: torch.optim.Optimizer
    loss: Loss
    scale: float
    smoothing: float | None = None
    clip: float | None = None
    samples: list[list[Sample]] = field(default_factory=list)
    smoothings: list[float] = field(default_factory=list)
    previous: tuple[list[Gradient], float] | None = None
    adam: Adam | None = None
    matrices: MatrixMoments | None = None
    compares_steps: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.sgd, torch.optim.Muon):
            self.matrices = MatrixMoments(self.groups())
        elif not isinstance(self.sgd, torch.optim.SGD):
            self.adam = Adam(self.sgd)

    def groups(self) -> Groups:
        return [list(group["params"]) for group in self.sgd.param_groups]

    def micro_gradients(self, batch: Batch) -> list[list[Tensor | None]]:
        """Return the gradients by group and parameter."""
        parameters = [p for group in self.groups() for p in group if p.requires_grad]
        found = torch.autograd.grad(self.loss(self.model, batch), parameters, allow_unused=True)
        by_parameter = dict(zip(map(id, parameters), found, strict=True))
        return [[by_parameter.get(id(p)) for p in group] for group in self.groups()]

    def step(
        self,
        batches: Sequence[Batch],
        weights: Sequence[float] | None = None,
        theta: float | None = None,
    ) -> None:
        groups = self.groups()
        gradients = [self.micro_gradients(batch) for batch in batches]
        self.measure(
            [[_flat(group, own) for group, own in zip(g, groups, strict=True)] for g in gradients],
            weights,
            theta,
        )
        shares = [1.0] * len(batches) if weights is None else weights
        for number, parameters in enumerate(groups):
            for index, parameter in enumerate(parameters):
                parts = [(w, g[number][index]) for w, g in zip(shares, gradients, strict=True)]
                present = [w * part for w, part in parts if part is not None]
                parameter.grad = sum(present, torch.zeros_like(parameter)) / sum(shares) if present else None
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.adam is not None:
            self.adam.step([self.gain(number) for number in range(len(groups))])
            return
        rates = [group["lr"] for group in self.sgd.param_groups]
        for number, group in enumerate(self.sgd.param_groups):
            group["lr"] = group["lr"] * self.gain(number)
        self.sgd.step()
        for group, rate in zip(self.sgd.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.matrices is not None:
            self.matrices.add()

    def measure(
        self,
        micro_gradients: Sequence[Sequence[Gradient]],
        weights: Sequence[float] | None = None,
        theta: float | None = None,
    ) -> None:
        """Add the estimates of a step, from its gradients by micro-batch and group.

        With the smoothing `theta`, if the step stands for others.
        """
        if self.adam is not None:
            divisors = self.adam.divisors()
            if divisors is None:
                return
            micro_gradients = [
                [[x / d for x, d in zip(g, own, strict=True)] for g, own in zip(each, divisors, strict=True)]
                for each in micro_gradients
            ]
        if self.matrices is not None:
            if not self.matrices.steps:
                return
            micro_gradients = [
                [self.matrices.measured(g, own) for g, own in zip(each, self.groups(), strict=True)]
                for each in micro_gradients
            ]
        if theta is None:
            theta = smoothing(self.scale) if self.smoothing is None else self.smoothing
        groups = len(micro_gradients[0])
        if len(micro_gradients) > 1:
            self.samples.append(
                [sample([g[i] for g in micro_gradients], self.scale, weights) for i in range(groups)]
            )
            self.smoothings.append(theta)
            return
        if not self.compares_steps:
            return
        if self.previous is not None:
            before, scale_before = self.previous
            self.samples.append(
                [
                    difference_sample(before[i], micro_gradients[0][i], scale_before, self.scale)
                    for i in range(groups)
                ]
            )
            self.smoothings.append(theta)
        self.previous = (list(micro_gradients[0]), self.scale)

    def estimate(self, group: int | None = None) -> Sample:
        if group is None:
            rates = [group["lr"] for group in self.sgd.param_groups]
            counted = [i for i, lr in enumerate(rates) if lr != 0 or not any(rates)]
            estimates = [self.estimate(i) for i in counted]
            return sum(sqr for sqr, _ in estimates), sum(var for _, var in estimates)
        return average([step[group] for step in self.samples], self.smoothings)

    def grad_sqr_error(self, group: int = 0) -> float:
        return standard_error([step[group][0] for step in self.samples], self.smoothings)

    def gain(self, group: int | None = None) -> float:
        return gain(self.estimate(group), self.scale) if self.samples else 1.0


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Gradient:
    """Return the gradients of a group as one list, with zeros for a parameter that was not used."""
    whole: Gradient = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        present = torch.zeros_like(parameter) if gradient is None else gradient
        whole += present.detach().double().flatten().tolist()
    return whole
