"""Training on streams: iterable data sets without a length or an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from adascale import ElasticTrainer
from adascale.errors import DatasetError
from support.members import Members
from support.streams import Numbers, Sharded, WithState
from support.training import (
    FIXED,
    MakeTrainer,
    concatenate,
    make_step,
    network,
    parameters_of,
    samples,
    sgd,
    train,
)

ELASTIC = json.dumps({"batch_size": 8, "max_batch_size": 24, "local_bsz_bounds": [2, 8]})


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The samples of the small program, in their order."""

    def __init__(self, count: int = 44) -> None:
        self.samples = samples(count)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        yield from map(self.samples.__getitem__, range(len(self.samples)))


def reenter(trainer: ElasticTrainer) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    return model, optimizer


# -- one replica ------------------------------------------------------------------------------------------


def test_a_stream_trains_as_a_data_set_with_items_in_the_same_order(make_trainer: MakeTrainer) -> None:
    """The last step of an epoch takes samples of the next pass, because 8 does not divide 44."""
    results = []
    for data in (Stream(), samples(44)):
        trainer = make_trainer(**FIXED)
        model, optimizer = reenter(trainer)
        batches = []
        for _ in trainer.epochs(3):
            for index, x, y in trainer.dataloader(data, shuffle=False):
                make_step(model, optimizer, x, y)
                batches.append((trainer.progress, index.tolist()))
        results.append((batches, [each.tolist() for each in parameters_of(model)], trainer.samples))
        assert trainer.finished
    assert results[0] == results[1]
    assert results[0][2] == 17 * 8


def test_an_endless_stream_ends_after_the_requested_steps(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(batch_size=8, max_batch_size=64, local_bsz_bounds=(8, 8), scale_invariant_steps=25)
    model, optimizer = reenter(trainer)
    seen: list[int] = []
    epochs = []
    for epoch in trainer.epochs():
        epochs.append(epoch)
        for index, x, y in trainer.dataloader(Numbers(None), map=lambda number: samples()[number % 48]):
            make_step(model, optimizer, x, y)
            seen += index.tolist()
    assert epochs == [0]
    assert 25 <= trainer.progress < 25 + 1
    assert seen == [number % 48 for number in range(8 * 25)]


def test_the_plan_is_chosen_again_inside_an_epoch_of_a_stream(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adascale_worker.batches.planning.REPLAN_INTERVAL", 0.0)
    trainer = make_trainer(batch_size=8, max_batch_size=64, local_bsz_bounds=(8, 8), scale_invariant_steps=25)
    model, optimizer = reenter(trainer)
    planner = trainer._replica.planner
    choices: list[int] = []
    choose = planner._choose

    def count_choices(*arguments: Any) -> Any:
        choices.append(trainer.steps)
        return choose(*arguments)

    monkeypatch.setattr(planner, "_choose", count_choices)
    for _ in trainer.epochs():
        for _, x, y in trainer.dataloader(Numbers(None), map=lambda number: samples()[number % 48]):
            make_step(model, optimizer, x, y)
    assert len(choices) > 1
    assert trainer.samples == 8 * 25


@pytest.mark.parametrize(("kind", "workers"), [("plain", 0), ("states", 2), ("shards", 0)])
@pytest.mark.usefixtures("durable_checkpoints")
def test_a_stream_continues_from_a_checkpoint_bit_for_bit(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, workers: int
) -> None:
    def run(trainer: ElasticTrainer, last: int) -> tuple[list[int], list[Tensor]]:
        kinds = {"states": WithState(44), "shards": Sharded(44, 7)}
        data = kinds.get(kind, Numbers(44, shuffles=True))
        options: dict[str, Any] = {"num_workers": workers}
        if workers:
            options["multiprocessing_context"] = "fork"
        model, optimizer = reenter(trainer)
        seen: list[int] = []
        for _ in trainer.epochs(3):
            for index, x, y in trainer.dataloader(data, map=samples(44).__getitem__, **options):
                make_step(model, optimizer, x, y)
                seen += index.tolist()
                if trainer.steps == last:
                    return seen, parameters_of(model)
        return seen, parameters_of(model)

    expected, weights = run(make_trainer(**FIXED), 0)
    options = {**FIXED, "checkpoint_dir": tmp_path, "checkpoint_interval": 1e-6}
    run(make_trainer(**options), 8)
    resumed = make_trainer(**options)
    rest, found = run(resumed, 0)
    assert 0 < len(rest) < len(expected)
    assert expected[-len(rest) :] == rest
    assert all(map(torch.equal, found, weights))


def test_a_loop_over_a_range_of_epochs_trains_a_stream(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model, optimizer = reenter(trainer)
    stream: Any = Stream(16)
    assert concatenate(train(trainer, model, optimizer, epochs=range(3), data=stream)) == 3 * list(range(16))


def test_a_function_that_returns_shards_is_a_stream(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model, optimizer = reenter(trainer)
    data = samples()
    seen: list[int] = []
    for _ in trainer.epochs(2):
        batches = trainer.dataloader(
            lambda shard: range(shard, 48, 5), shards=5, map=data.__getitem__, shuffle_buffer=4
        )
        for index, x, y in batches:
            make_step(model, optimizer, x, y)
            seen += index.tolist()
    assert sorted(seen[:48]) == sorted(seen[48:]) == list(range(48))
    assert seen[:48] != seen[48:]


def test_data_of_another_kind_are_an_error_also_after_a_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    options = {**FIXED, "checkpoint_dir": tmp_path}
    trainer = make_trainer(**options)
    model, optimizer = reenter(trainer)
    train(trainer, model, optimizer)
    with pytest.raises(
        DatasetError, match="is a stream, but had 48 samples by index before: a job trains on one"
    ):
        trainer.dataloader(Stream())
    trainer.finish("enough")
    resumed = make_trainer(**options)
    reenter(resumed)
    with pytest.raises(DatasetError, match="had 48 samples by index when the checkpoint was saved"):
        resumed.dataloader(Stream())


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (iter(range(9)), {}, r"an iterator \(type range_iterator\), which can be read only once"),
        (Numbers(9), {"order": lambda number, seed: [1]}, "got order=, which needs items by index"),
        (Numbers(9), {"lengths": [1]}, "got lengths=, which needs items by index"),
        (Numbers(9), {"batch_size": 4}, "got batch_size, but the trainer chooses the batches"),
        (Numbers(9), {"shuffle_buffer": -1}, "got shuffle_buffer=-1: it must be an integer of at least 0"),
        (Numbers(9), {"in_order": False}, "got in_order=False, which changes the order"),
        (list, {"shards": 0}, "got shards=0: it must be an integer of at least 1"),
        (
            samples(),
            {"shards": 4},
            r"got shards=4 and a data set of type TensorDataset: shards= needs a function",
        ),
        (list, {"shards": 4, "exactly_once": False}, r"got shards=4 and exactly_once=False: shards= needs"),
        (samples(), {"map": len, "exactly_once": False}, r"got map=, exactly_once=, which is for streams"),
    ],
)
def test_wrong_arguments_for_a_stream_are_errors(
    make_trainer: MakeTrainer, data: Any, options: dict[str, Any], message: str
) -> None:
    trainer = make_trainer(**FIXED)
    reenter(trainer)
    with pytest.raises(DatasetError, match=message):
        trainer.dataloader(data, **options)


def test_an_evaluation_of_a_stream_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    reenter(trainer)
    with pytest.raises(DatasetError, match=r"\(type Numbers\) has no length: pass one with __len__"):
        trainer.evaluation(Numbers(9), batch_size=4)  # type: ignore[arg-type]


# -- several replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", pytest.param("shards", marks=pytest.mark.slow)])
def test_a_stream_is_trained_once_over_changes_of_size_and_a_loss(
    make_members: Callable[..., Members], kind: str
) -> None:
    job = make_members(BOUNDS=ELASTIC, EPOCHS=30, STEP_SECONDS=0.01, STREAM=kind)
    trainers = job.start(3)
    for count in (1, 2, 3):
        job.train(trainers[:count], 5)
    trainers[1].kill()
    members = [trainers[0], trainers[2]]
    job.wait_holding(members)
    job.train(members, 5)
    job.finish()
    job.require_complete_stream()
    assert len({record["file"] for record in job.records() if record["rank"] == 0}) == 1


def test_replicas_that_read_different_records_are_an_error(make_members: Callable[..., Members]) -> None:
    job = make_members(EPOCHS=3, STREAM="unequal")
    trainers = job.start(2)
    job.activate(trainers, wait=False)
    with pytest.raises(
        AssertionError, match="rank 0 and rank 1 read different records of the stream: after 12"
    ):
        job.wait(lambda: all(trainer.code is not None for trainer in trainers), "an error")


def test_replicas_with_streams_of_their_own_end_an_epoch_together(
    make_members: Callable[..., Members],
) -> None:
    """Each trains 48 samples of its own in a pass, in another order."""
    job = make_members(EPOCHS=2, STREAM="unequal", EXACTLY_ONCE=0)
    assert len(job.complete(2)) == 1
    seen: dict[int, list[int]] = {0: [], 1: []}
    for record in job.records():
        seen[record["rank"]] += record["indices"]
    # Of each epoch of 96 samples, rounded up to steps of 12 samples.
    assert all(len(indices) == 2 * 48 for indices in seen.values())
    for indices in seen.values():
        assert sorted(indices[:48]) == sorted(indices[48:]) == list(range(48))
