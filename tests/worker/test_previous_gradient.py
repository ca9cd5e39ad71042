"""The copy of a gradient."""

import pytest
import torch
from torch import Tensor, nn

from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.previous_gradient import PreviousGradient


@pytest.mark.parametrize("gradient", [torch.ones(3), torch.ones(3, 2).t()], ids=["contiguous", "transposed"])
def test_a_copy_stays_as_it_is_when_the_gradient_changes(gradient: Tensor) -> None:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    previous = PreviousGradient(Metric())
    previous.copy_from([[parameter]], step_number=0)

    parameter.grad.fill_(2.0)

    products = previous.inner_products([[parameter]], torch.device("cpu"))
    assert products.tolist() == [2.0 * gradient.numel()]
