"""Other data parallelism around a model of the trainer is refused: `programs/loops.py` has two replicas."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from adascale_worker.errors import WorkerError
from support.gan import Gan
from support.training import FIXED, MakeTrainer, network, sgd, train

REMEDY = r"program_reentry makes the model data-parallel itself.* With Accelerate, leave it out of"


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, DataParallel])
@pytest.mark.parametrize("part", ["model", "layer", "container"])
def test_a_wrapper_that_is_made_later_is_refused(make_trainer: MakeTrainer, wrapper: type, part: str) -> None:
    trainer, model = make_trainer(**FIXED), network()
    trainer.program_reentry(model, sgd(model))
    wrapped = {"model": model, "layer": model[0], "container": nn.Sequential(model, nn.Linear(2, 2))}[part]
    with pytest.raises(WorkerError, match=f"or a part of it, was wrapped in .*DataParallel, .*{REMEDY}"):
        wrapper(wrapped)


def test_a_model_with_a_wrapped_part_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = nn.Sequential(nn.Linear(6, 3), DistributedDataParallel(nn.Linear(3, 2)))
    message = f"a model whose part '1' is of type DistributedDataParallel: .*{REMEDY}"
    with pytest.raises(WorkerError, match=message):
        trainer.program_reentry(model, sgd(model))


def test_one_of_several_models_cannot_be_wrapped(make_trainer: MakeTrainer) -> None:
    gan = Gan()
    gan.enter(make_trainer(**FIXED))
    with pytest.raises(WorkerError, match=re.escape("was wrapped in DistributedDataParallel")):
        DistributedDataParallel(gan.generator)


def test_other_models_may_be_wrapped_also_with_a_frozen_part_of_this_one(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED), network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    others = [copy.deepcopy(model), nn.Sequential(model[0], nn.Linear(16, 1))]
    for other in others:
        assert DistributedDataParallel(other)(torch.zeros(1, 6)).shape
    train(trainer, model, optimizer)


def test_wrappers_are_refused_until_the_trainer_is_closed(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED), network()
    trainer.program_reentry(model, sgd(model))
    trainer.close()
    DataParallel(model)


def shard_fully(model: nn.Sequential) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def shard_a_part_fully(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    return model


def shard_tensors(model: nn.Sequential) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


WHOLE = (
    "ElasticTrainer supports models that each replica has as a whole.* processesPerReplica in the job file"
)


@pytest.mark.parametrize(
    ("shard", "found"),
    [
        (shard_fully, "a model with FSDP"),
        (shard_a_part_fully, "a model with FSDP on its part '0'"),
        (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), "a model with FSDP"),
        (shard_tensors, r"a model whose parameter '0\.weight' is a DTensor, as of tensor parallelism"),
    ],
)
# FSDP warns that it is slow without a GPU.
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_is_refused(
    make_trainer: MakeTrainer, shard: Callable[[nn.Sequential], nn.Module], found: str
) -> None:
    trainer = make_trainer(**FIXED)
    model = shard(network())
    with pytest.raises(WorkerError, match=rf"program_reentry got {found}\. {WHOLE}"):
        trainer.program_reentry(model, sgd(model))
