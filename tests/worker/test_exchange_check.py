"""Gradients are compared in the first steps only: `programs/loops.py` has replicas that compare them."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from adascale_worker.gradients.exchange import CHECKED_STEPS, MAX_NONFINITE_STEPS, ExchangeCheck
from adascale_worker.membership.process_group import ReplicaGroup


class TwoEqualReplicas:
    """A group whose other replica has the same values as this one."""

    replicas = 2
    exchanges = 0

    def average(self, _: Sequence[Tensor]) -> None:
        """Leave the values, which are their means."""
        self.exchanges += 1

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values twice."""
        return values, values


def exchanges(factors: Sequence[float]) -> int:
    """Return how many of the steps are compared whose losses have `factors`."""
    model, group = nn.Linear(3, 1), TwoEqualReplicas()
    check = ExchangeCheck(model, cast("ReplicaGroup", group))
    for factor in factors:
        model.zero_grad()
        check.begin_pass()
        (factor * model(torch.ones(3))).sum().backward()
        check.end_pass()
        check.compare()
    return group.exchanges


def test_gradients_are_compared_in_the_first_steps_whose_gradients_are_finite() -> None:
    assert exchanges([float("nan"), 1.0, float("inf"), *[1.0] * 10]) == 2 + CHECKED_STEPS


def test_gradients_that_are_never_finite_are_not_read_for_ever() -> None:
    assert exchanges([float("nan")] * 2 * MAX_NONFINITE_STEPS) == MAX_NONFINITE_STEPS
