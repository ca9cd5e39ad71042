"""Training that goes on with another data set, or with another order of it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adascale import ElasticTrainer
from adascale_worker.errors import DatasetError
from support.members import Members
from support.training import FIXED, MakeTrainer, entered, make_step, samples

pytestmark = pytest.mark.usefixtures("durable_checkpoints")


def resumed(make_trainer: MakeTrainer, folder: Path) -> tuple[ElasticTrainer, nn.Module, torch.optim.SGD]:
    return entered(make_trainer, **FIXED, epochs=4, checkpoint_dir=folder, checkpoint_interval=0)


def train_until(
    trainer: ElasticTrainer,
    model: nn.Module,
    optimizer: torch.optim.SGD,
    epochs: range,
    count: int = 48,
    *,
    last_step: int = -1,
    **options: Any,
) -> list[int]:
    """Train, and return the samples. After `last_step`, the program ends as by a kill."""
    seen: list[int] = []
    for epoch in epochs:
        for index, x, y in trainer.dataloader(samples(count), **options):
            make_step(model, optimizer, x, y)
            seen += index.tolist()
            if trainer.steps == last_step:
                trainer.close()
                return seen
        trainer.step(epoch)
    return seen


def test_a_checkpoint_of_another_data_set_is_an_error_that_names_the_way_on(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    train_until(*resumed(make_trainer, tmp_path), range(2), last_step=10)
    trainer, *_ = resumed(make_trainer, tmp_path)
    seen = trainer.samples - 48
    with pytest.raises(
        DatasetError,
        match=rf"has 64 samples, but had 48 when the checkpoint was saved; {seen} of the 48 samples of pass "
        r"1 .* call trainer.dataloader\(dataset, allow_other_length=True\)",
    ):
        trainer.dataloader(samples(64))


def test_training_goes_on_with_more_data_at_the_next_pass(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_until(*resumed(make_trainer, tmp_path), range(2), last_step=10)
    capfd.readouterr()
    program = resumed(make_trainer, tmp_path)
    begin, steps = program[0].samples, program[0].steps
    seen = train_until(*program, range(1, 4), 64, last_step=steps + 4, allow_other_length=True)
    printed = capfd.readouterr().err
    assert (
        f"has 64 samples, and had 48 before: {begin - 48} of the 48 samples of pass 1 (counted from 0) have "
        "been seen. Pass 2 and epoch 1 begin now with the present data set"
    ) in printed

    program = resumed(make_trainer, tmp_path)  # the new position is a part of the checkpoint
    del seen[program[0].samples - begin :]
    assert 0 < len(seen) < 64
    seen += train_until(*program, range(1, 4), 64)
    assert len(seen) == 3 * 64
    for start in range(0, len(seen), 64):
        assert sorted(seen[start : start + 64]) == list(range(64))
    assert program[0].finished
    assert program[0].steps == steps + 3 * 8


@pytest.mark.parametrize("allowed", [False, True])
def test_the_same_data_set_goes_on_exactly(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str], allowed: bool
) -> None:
    whole = train_until(*resumed(make_trainer, tmp_path / "whole"), range(2))
    train_until(*resumed(make_trainer, tmp_path / "parts"), range(2), last_step=10)
    capfd.readouterr()
    program = resumed(make_trainer, tmp_path / "parts")
    begin = program[0].samples
    assert train_until(*program, range(1, 2), allow_other_length=allowed) == whole[begin:]
    assert capfd.readouterr().err == ""


def test_another_kind_of_order_is_reported(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_until(*resumed(make_trainer, tmp_path), range(2), last_step=10)
    trainer, *_ = resumed(make_trainer, tmp_path)
    capfd.readouterr()
    trainer.dataloader(samples(), lengths=range(48))
    expected = "was shuffled, and is now grouped by length"
    assert expected in capfd.readouterr().err


def test_an_order_of_the_program_goes_on_at_the_same_position(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def order(_number: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(torch.arange(48.0), 40, replacement=True, generator=generator)

    whole = train_until(*resumed(make_trainer, tmp_path / "whole"), range(3), order=order)
    assert len(whole) == 3 * 40
    assert len(set(whole[:40])) < 40
    train_until(*resumed(make_trainer, tmp_path / "parts"), range(2), last_step=8, order=order)
    program = resumed(make_trainer, tmp_path / "parts")
    begin = program[0].samples
    assert 40 < begin < 80
    assert train_until(*program, range(1, 3), order=order) == whole[begin:]


def test_replicas_that_resume_and_one_that_joins_later_share_the_longer_data_set(
    make_members: Callable[..., Members], tmp_path: Path
) -> None:
    bounds = {"batch_size": 12, "checkpoint_dir": f"{tmp_path}/checkpoints", "checkpoint_interval": 0}
    job = make_members(BOUNDS=json.dumps(bounds), EPOCHS=6, STEP_SECONDS=0.01)
    before = job.start(2)
    job.activate(before)
    job.wait_step(6)
    for trainer in before:
        trainer.kill()
    job.options |= {"SAMPLES": 60, "LOADER": json.dumps({"allow_other_length": True})}
    first, second, third = job.start(3)
    job.activate([first, second])
    job.wait(lambda: any(record["generation"] == 2 for record in job.records()), "a step with more data")
    step = job.last_step()
    job.activate([first, second, third])
    job.wait_step(step + 5)
    assert len(job.finish()) == 1

    resumed = [record for record in job.records() if record["generation"] > 1]
    assert max(record["replicas"] for record in resumed) == 3
    begin = min(record["samples"][0] for record in resumed)
    epochs = 6 - min(record["epoch"] for record in resumed)
    assert max(record["samples"][1] for record in resumed) == begin + 60 * epochs
    passes: dict[int, Counter[int]] = {}
    for record in resumed:
        passes.setdefault((record["samples"][0] - begin) // 60, Counter()).update(record["indices"])
    assert passes == {number: Counter(range(60)) for number in range(epochs)}
