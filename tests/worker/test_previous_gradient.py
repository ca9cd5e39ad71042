"""The copy of a gradient, and the memory that it uses."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.scaling.statistics.metric import EuclideanMetric
from adascale_worker.scaling.statistics.previous_gradient import PreviousGradient
from adascale_worker.torch_private.distributed import local_process_group
from worker.adascale_problem import backward, batches, network, squared_error

HOST = torch.device("cpu")


def parameter_with(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def copied(previous: PreviousGradient) -> Tensor:
    (group,) = previous._gradients or []
    (gradient,) = group
    assert gradient is not None
    return gradient


def test_a_gradient_is_copied_into_the_memory_that_is_kept() -> None:
    previous, memory = PreviousGradient(EuclideanMetric()), torch.ones(3)
    parameter = parameter_with(memory)
    previous.keep_memory([[parameter]])
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])

    previous.copy_from([[parameter]], step_number=0)

    assert copied(previous).data_ptr() == memory.data_ptr()
    assert copied(previous).tolist() == [1.0, 2.0, 3.0]


def test_a_gradient_that_is_still_in_the_memory_that_is_kept_is_copied_elsewhere() -> None:
    previous = PreviousGradient(EuclideanMetric())
    parameter = parameter_with(torch.ones(3))
    previous.keep_memory([[parameter]])

    previous.copy_from([[parameter]], step_number=0)
    parameter.grad.zero_()  # type: ignore[union-attr]

    assert copied(previous).tolist() == [1.0, 1.0, 1.0]


def test_memory_of_another_layout_or_type_is_not_used() -> None:
    for memory in (torch.ones(3, 2).t(), torch.ones(3), torch.ones(2, 3, dtype=torch.float64)):
        previous, parameter = PreviousGradient(EuclideanMetric()), nn.Parameter(torch.zeros(2, 3))
        previous.keep_memory([[parameter_with(memory)]])
        parameter.grad = torch.full((2, 3), 1 / 3)

        previous.copy_from([[parameter]], step_number=0)

        assert copied(previous).data_ptr() != memory.data_ptr()
        assert copied(previous).equal(parameter.grad)


def test_memory_is_used_for_one_copy_and_released() -> None:
    previous, memory = PreviousGradient(EuclideanMetric()), torch.ones(3)
    parameter = parameter_with(memory)
    previous.keep_memory([[parameter]])
    parameter.grad = torch.ones(3)
    previous.copy_from([[parameter]], step_number=0)
    previous.clear()

    previous.copy_from([[parameter]], step_number=1)

    assert copied(previous).data_ptr() != memory.data_ptr()


def test_the_last_replica_copies_gradients_into_the_memory_of_the_buckets_of_ddp() -> None:
    model = network()
    ddp = DistributedDataParallel(model, process_group=local_process_group(), gradient_as_bucket_view=True)
    optimizer = ElasticAdaScale(torch.optim.SGD(model.parameters(), lr=0.01), scale=1.0)
    first, second = batches(2)
    optimizer.change_model(ddp)
    backward(squared_error(ddp, first))
    optimizer.update_scale(2.0, 2)
    buckets = {parameter.grad.data_ptr() for parameter in model.parameters()}  # type: ignore[union-attr]

    optimizer.change_model(None)
    optimizer.set_num_gradients_to_accumulate(1)
    optimizer.update_scale(1.0, 1)
    optimizer.zero_grad()
    backward(squared_error(model, second))
    optimizer.step()

    copy = optimizer.state_dict()["adascale"]["statistics"]["previous_gradient"]
    assert {gradient.data_ptr() for group in copy["gradients"] for gradient in group} == buckets
