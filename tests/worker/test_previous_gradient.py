"""The copy of a gradient, and the memory that it uses."""

import torch
from torch import Tensor, nn

from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.previous_gradient import PreviousGradient


def parameter_with(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def copied(previous: PreviousGradient) -> Tensor:
    (group,) = previous._gradients or []
    (gradient,) = group
    assert gradient is not None
    return gradient


def test_a_gradient_is_copied_into_the_memory_of_the_copy_before() -> None:
    previous = PreviousGradient(Metric())
    previous.copy_from([[parameter_with(torch.ones(3))]], step_number=0)
    memory = copied(previous).data_ptr()

    previous.copy_from([[parameter_with(torch.tensor([1.0, 2.0, 3.0]))]], step_number=1)

    assert copied(previous).data_ptr() == memory
    assert copied(previous).tolist() == [1.0, 2.0, 3.0]


def test_memory_of_another_layout_or_type_is_not_used() -> None:
    for before in (torch.ones(3, 2).t(), torch.ones(3), torch.ones(2, 3, dtype=torch.float64)):
        previous = PreviousGradient(Metric())
        previous.copy_from([[parameter_with(before)]], step_number=0)
        memory = copied(previous).data_ptr()
        parameter = parameter_with(torch.full((2, 3), 1 / 3))

        previous.copy_from([[parameter]], step_number=1)

        assert copied(previous).data_ptr() != memory
        assert copied(previous).equal(parameter.grad)  # type: ignore[arg-type]
