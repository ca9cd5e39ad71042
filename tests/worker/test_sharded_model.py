"""What `program_reentry` refuses of models and programs if a replica has several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module

from adascale import ElasticTrainer
from adascale_core.errors import InvalidJobError
from adascale_worker.errors import WorkerError
from adascale_worker.process.environment import RankAssignment, read_assignment
from adascale_worker.program.parts import require_sharded
from support.training import FIXED, MakeTrainer, network, samples, sgd


@pytest.fixture
def trainer(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> ElasticTrainer:
    monkeypatch.setenv("ADASCALE_PROCESSES_PER_REPLICA", "1")
    return make_trainer(**FIXED)


def leave_out_a_part(model: nn.Sequential, trainer: ElasticTrainer) -> None:
    fully_shard(model, mesh=trainer.mesh, ignored_params=set(model[0].parameters()))


def shard_tensors(model: nn.Sequential, trainer: ElasticTrainer) -> None:
    distribute_module(model[0], trainer.mesh)
    fully_shard(model[3], mesh=trainer.mesh)


def divide_by_nothing(model: nn.Sequential, trainer: ElasticTrainer) -> None:
    fully_shard(model, mesh=trainer.mesh).set_gradient_divide_factor(0.5)


def leave_whole(model: nn.Sequential, trainer: ElasticTrainer) -> None:
    del model, trainer


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (leave_whole, r"is not sharded, but a replica has 1 processes"),
        (leave_out_a_part, r"parameter '0\.weight' is not sharded.* without ignored_params"),
        (divide_by_nothing, r"set_gradient_divide_factor\(0\.5\).*set_gradient_divide_factor\(1\)"),
        (shard_tensors, r"parameter '0\.weight' is a DTensor .* tensor parallelism .* not supported"),
    ],
)
def test_a_model_is_refused_that_is_not_sharded_over_the_processes_of_the_replica(
    trainer: ElasticTrainer, shard: Callable[[nn.Sequential, ElasticTrainer], None], message: str
) -> None:
    model = network()
    shard(model, trainer)
    with pytest.raises(WorkerError, match=message):
        trainer.program_reentry(model, sgd(model))


def test_a_mesh_is_refused_that_has_other_processes_than_the_replica(trainer: ElasticTrainer) -> None:
    model = sharded(trainer)
    group: Any = SimpleNamespace(processes=2, device=torch.device("cpu"))
    message = r"over a mesh of the processes \[0\], but a replica has 2 processes: .*mesh=trainer\.mesh"
    with pytest.raises(WorkerError, match=message):
        require_sharded(model, group)


def sharded(trainer: ElasticTrainer) -> nn.Sequential:
    model = network()
    fully_shard(model, mesh=trainer.mesh)
    return model


def whole_weights(model: nn.Module) -> list[torch.Tensor]:
    parameters: list[Any] = list(model.parameters())
    return [parameter.full_tensor().detach().clone() for parameter in parameters]


def gather_weight(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the whole weight into the state, as torchtitan's fused projections do."""
    del module
    state[f"{prefix}weight"] = state[f"{prefix}weight"].redistribute(placements=[Replicate()])


def test_a_module_may_have_whole_tensors_in_its_state(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ADASCALE_PROCESSES_PER_REPLICA", "1")

    def train(steps: int) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
        trainer = make_trainer(**FIXED, scale_invariant_steps=steps, checkpoint_dir=str(tmp_path))
        model = sharded(trainer)
        model[0].register_state_dict_post_hook(gather_weight)
        optimizer = sgd(model)
        state = trainer.program_reentry(model, optimizer)
        first = whole_weights(model)
        for _ in trainer.epochs():
            for _, x, y in trainer.dataloader(samples()):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        last = whole_weights(model)
        trainer.close()
        return state.restored, first, last

    _, _, saved = train(3)
    is_restored, first, _ = train(5)
    assert is_restored
    for one, other in zip(saved, first, strict=True):
        assert torch.equal(one, other)


def test_several_optimizers_scalers_and_the_best_weights_are_refused(trainer: ElasticTrainer) -> None:
    model = sharded(trainer)
    with pytest.raises(WorkerError, match="several models or optimizers, and a replica has 1 processes"):
        trainer.program_reentry({"a": (other := network())}, {"a": sgd(other)})
    with pytest.raises(WorkerError, match=r"got a GradScaler, .* use bfloat16"):
        trainer.program_reentry(model, sgd(model), register={"scaler": torch.amp.GradScaler("cpu")})
    with pytest.raises(WorkerError, match=r"keep_best.* does not support a model that is sharded"):
        trainer.keep_best("loss")


def test_the_mesh_needs_processes_per_replica(make_trainer: MakeTrainer) -> None:
    with pytest.raises(WorkerError, match=r"trainer\.mesh is .* set processesPerReplica in the job file"):
        _ = make_trainer(**FIXED).mesh


def test_gradients_that_were_not_deleted_are_refused(trainer: ElasticTrainer) -> None:
    model = sharded(trainer)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    batches = iter(trainer.dataloader(samples()))
    for _ in range(2):
        _, x, y = next(batches)
        nn.functional.cross_entropy(model(x), y).backward()
        if trainer.steps == 0:
            optimizer.step()
    with pytest.raises(WorkerError, match="the gradients of the step before were not deleted"):
        optimizer.step()


def test_two_backward_passes_for_a_batch_give_the_sum_of_their_gradients(trainer: ElasticTrainer) -> None:
    plain, model = network(), sharded(trainer)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    batches = trainer.dataloader(samples())
    _, x, y = next(batches)
    for each in (plain, model):
        for part in (slice(0, 4), slice(4, 8)):
            nn.functional.cross_entropy(each(x[part]), y[part]).backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        gradient: Any = found.grad
        torch.testing.assert_close(gradient.full_tensor(), expected.grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 7}, "batch_size 7 is not a multiple of processes_per_replica 2"),
        (
            {"batch_size": 8, "max_batch_size": 16, "local_bsz_bounds": (3, 3)},
            "local_bsz_bounds 3 to 3 have no multiple of processes_per_replica 2",
        ),
    ],
)
def test_batches_are_refused_that_the_processes_cannot_divide(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("ADASCALE_PROCESSES_PER_REPLICA", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidJobError, match=message):
        make_trainer(**arguments)


def test_a_number_of_processes_is_refused_that_replicas_do_not_divide() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "6", "ADASCALE_PROCESSES_PER_REPLICA": "2"}
    assert read_assignment(environ, has_agent=False) == RankAssignment(1, 3, process=1, processes=2)
    with pytest.raises(Exception, match=r"WORLD_SIZE is 6, which is not a multiple .* start 4 processes"):
        read_assignment({**environ, "ADASCALE_PROCESSES_PER_REPLICA": "4"}, has_agent=False)
