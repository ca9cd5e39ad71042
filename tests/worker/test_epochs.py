"""Loops over `trainer.epochs`: they begin where training is, and end each epoch by themselves."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adascale import ElasticTrainer
from adascale.errors import AdaScaleError, InvalidJobError, WorkerError
from support.launch import PROGRAMS, run_program
from support.training import MakeTrainer, equal, learn, network, parameters_of, samples, sgd, train

STEPS_PER_EPOCH = 6


class Program:
    """A program with a trainer of one replica, a model and an optimizer."""

    def __init__(self, make_trainer: MakeTrainer, **options: Any) -> None:
        self.trainer = make_trainer(**{"batch_size": 8, **options})
        self.model = network()
        self.optimizer = sgd(self.model)
        self.state = self.trainer.program_reentry(self.model, self.optimizer)

    def train(self, batches: int | None = None) -> None:
        """Train the rest of an epoch, or leave its loop after some batches."""
        for number, (_, x, y) in enumerate(self.trainer.dataloader(samples()), start=1):
            self.learn(x, y)
            if number == batches:
                break

    def learn(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        learn(self.model, x, y)
        self.optimizer.step()

    def epochs(self, *arguments: Any) -> list[int]:
        """Train, and return the numbers of the epochs."""
        numbers = []
        for epoch in self.trainer.epochs(*arguments):
            self.train()
            numbers.append(epoch)
        return numbers


def test_it_trains_as_a_loop_over_a_range_with_a_call_of_step(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    plain = Program(make_trainer, epochs=3)
    train(plain.trainer, plain.model, plain.optimizer, epochs=range(plain.state.epoch, 3))
    program = Program(make_trainer, checkpoint_dir=tmp_path)
    assert program.epochs(3) == [0, 1, 2]
    assert equal(parameters_of(program.model), parameters_of(plain.model))
    assert (program.trainer.steps, program.trainer.finished) == (3 * STEPS_PER_EPOCH, True)
    assert json.loads(max(tmp_path.glob("*.json")).read_text())["finished"] is True


def test_it_begins_with_the_epoch_of_the_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path, durable_checkpoints: None
) -> None:
    first = Program(make_trainer, checkpoint_dir=tmp_path, checkpoint_interval=0)
    for epoch in first.trainer.epochs(4):
        first.train(batches=3 if epoch == 2 else None)
        if epoch == 2:
            break
    first.trainer.close()
    again = Program(make_trainer, checkpoint_dir=tmp_path)
    assert again.state.epoch == 2
    assert again.epochs(4) == [2, 3]


def test_a_finished_training_has_no_epoch_and_more_epochs_continue_it(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = Program(make_trainer, checkpoint_dir=tmp_path)
    assert first.epochs(2) == [0, 1]
    first.trainer.close()
    again = Program(make_trainer, checkpoint_dir=tmp_path)
    assert again.epochs(2) == []
    assert "adascale: training has already finished, at step 12, progress 12\n" in capfd.readouterr().out
    assert again.trainer.finished
    again.trainer.close()
    more = Program(make_trainer, checkpoint_dir=tmp_path)
    assert more.epochs(3) == [2]
    assert more.trainer.steps == 3 * STEPS_PER_EPOCH


def test_a_second_loop_after_the_end_of_training_has_no_epoch(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)
    assert program.epochs(2) == [0, 1]
    assert program.epochs(2) == program.epochs() == []


# -- the body -----------------------------------------------------------------------------------------------


def test_an_epoch_whose_data_loop_or_body_is_left_early_ends(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)
    numbers = []
    for epoch in program.trainer.epochs(3):
        numbers.append(epoch)
        program.train(batches=2 if epoch == 0 else None)
        if epoch == 1:
            continue
        assert not program.trainer.finished
    assert numbers == [0, 1, 2]
    assert program.trainer.finished


def test_the_epoch_of_a_loop_that_is_left_by_break_ends_before_the_next_loop(
    make_trainer: MakeTrainer,
) -> None:
    program = Program(make_trainer)
    for _ in program.trainer.epochs(3):
        program.train()
        break
    assert program.epochs(3) == [1, 2]


def test_the_epoch_of_a_loop_that_an_error_ends_is_not_repeated(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)

    def fail() -> None:
        for _ in program.trainer.epochs(3):
            program.train(batches=2)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert program.epochs(3) == [1, 2]


@pytest.mark.parametrize("first", [0, 1])
def test_an_epoch_that_is_left_before_its_first_batch_goes_on(make_trainer: MakeTrainer, first: int) -> None:
    """A program may notice at the beginning of an epoch that training does not improve."""
    program = Program(make_trainer)
    for epoch in program.trainer.epochs(3):
        if epoch == first:
            break
        program.train()
    program.trainer.report_result(accuracy=0.5)
    assert program.epochs(3) == list(range(first, 3))


@pytest.mark.parametrize("use", ["evaluation", "dataloader", "report_result", "finish"])
def test_the_last_epoch_of_a_loop_that_is_left_by_break_ends_when_the_trainer_is_used(
    make_trainer: MakeTrainer, tmp_path: Path, use: str
) -> None:
    program = Program(make_trainer, checkpoint_dir=tmp_path)
    trainer = program.trainer
    for _ in trainer.epochs(1):
        program.train()
        break
    assert not trainer.finished
    uses: dict[str, Callable[[], object]] = {
        "evaluation": lambda: trainer.evaluation(samples(), batch_size=8),
        "dataloader": lambda: trainer.dataloader(samples()),
        "report_result": lambda: trainer.report_result(accuracy=0.5),
        "finish": lambda: trainer.finish("no longer improves"),
    }
    uses[use]()
    assert trainer.finished
    saved = json.loads(max(tmp_path.glob("*.json")).read_text())
    assert (saved["finished"], saved["finish_reason"]) == (True, "")


def test_an_iterator_that_is_used_again_continues(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)
    epochs = program.trainer.epochs(3)
    for _ in epochs:
        program.train()
        break
    numbers = []
    for epoch in epochs:
        program.train()
        numbers.append(epoch)
    assert numbers == [1, 2]


def test_an_epoch_that_the_program_ends_itself_does_not_end_twice(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)
    numbers = []
    for epoch in program.trainer.epochs(2):
        program.train()
        program.trainer.step(epoch)
        numbers.append(epoch)
    assert numbers == [0, 1]


def test_finish_ends_the_loop(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)
    numbers = []
    for epoch in program.trainer.epochs(9):
        program.train()
        numbers.append(epoch)
        if epoch == 1:
            program.trainer.finish("no longer improves")
    assert numbers == [0, 1]


def test_an_epoch_without_a_batch_is_an_error(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer)
    epochs = program.trainer.epochs(3)
    for _ in epochs:
        program.train()
        break
    next(epochs)
    with pytest.raises(WorkerError, match=r"epoch 1 has ended, but has had no batch: call trainer"):
        next(epochs)


def nested(trainer: ElasticTrainer) -> Iterator[int]:
    for _ in trainer.epochs(2):
        yield from trainer.epochs(2)


def test_a_loop_inside_another_is_an_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(WorkerError, match=r"trainer\.epochs\(\) began inside epoch 0 of another one"):
        next(nested(Program(make_trainer).trainer))


# -- the end of training ------------------------------------------------------------------------------------


def test_the_epochs_of_the_constructor_are_the_default(make_trainer: MakeTrainer) -> None:
    program = Program(make_trainer, epochs=2)
    assert program.epochs() == [0, 1]


def test_scale_invariant_steps_take_precedence(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    program = Program(make_trainer, scale_invariant_steps=20)
    assert program.epochs(2) == [0, 1, 2, 3]
    assert program.trainer.steps == 20
    assert capfd.readouterr().out == ""


def test_steps_of_the_job_take_precedence_with_a_note(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Program(make_trainer).trainer.close()  # removes the variables of the environment first
    monkeypatch.setenv("ADASCALE_SCALE_INVARIANT_STEPS", "9")
    program = Program(make_trainer)
    assert program.epochs(5) == [0, 1]
    assert capfd.readouterr().out == (
        "adascale: the program sets epochs to 5, the job sets scale_invariant_steps to 9; the job's setting "
        "is used\n"
    )


@pytest.mark.parametrize(
    ("options", "argument", "error", "message"),
    [
        (
            {},
            None,
            WorkerError,
            "trainer.epochs() does not know when training ends: pass the number of epochs",
        ),
        ({"epochs": 3}, 4, WorkerError, "trainer.epochs(4) was called, but 3 epochs were set before"),
        ({}, 0, InvalidJobError, "epochs must be an integer of at least 1, got 0"),
        ({}, 2.0, InvalidJobError, "epochs must be an integer of at least 1, got 2.0"),
        (
            {"scale_invariant_steps": 9},
            "2",
            InvalidJobError,
            "epochs must be an integer of at least 1, got '2'",
        ),
    ],
)
def test_a_number_of_epochs_that_cannot_be_used_is_an_error_at_once(
    make_trainer: MakeTrainer,
    options: dict[str, Any],
    argument: Any,
    error: type[AdaScaleError],
    message: str,
) -> None:
    trainer = Program(make_trainer, **options).trainer
    with pytest.raises(error, match=re.escape(message)):
        trainer.epochs(argument)


def test_a_loop_before_program_reentry_is_an_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(WorkerError, match="call program_reentry"):
        make_trainer(batch_size=8).epochs(2)


# -- the end of the program ---------------------------------------------------------------------------------


def run(folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    program = PROGRAMS / "epochs.py"
    return run_program(program, ADASCALE_CHECKPOINT_DIR=folder, **options)


def require_saved_end(folder: Path, epochs: int) -> None:
    saved = json.loads(max(folder.glob("*.json")).read_text())
    assert (saved["finished"], saved["step"]) == (True, epochs * STEPS_PER_EPOCH)


def test_a_program_that_leaves_its_last_epoch_saves_the_end_of_training(tmp_path: Path) -> None:
    ended = run(tmp_path, AT=2, END="break")
    assert (ended.returncode, ended.stderr) == (0, "")
    require_saved_end(tmp_path, epochs=3)


def test_ranks_that_leave_their_last_epoch_save_the_end_of_training(tmp_path: Path) -> None:
    ended = run(tmp_path, replicas=2, AT=2, END="break")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ends after 18 steps") == 2
    require_saved_end(tmp_path, epochs=3)


@pytest.mark.slow
def test_a_program_that_calls_finish_may_leave_its_epochs(tmp_path: Path) -> None:
    ended = run(tmp_path, AT=1, END="finish")
    assert (ended.returncode, ended.stderr) == (0, "")
    require_saved_end(tmp_path, epochs=2)


def test_an_error_in_the_body_ends_the_program_without_saving_the_end(tmp_path: Path) -> None:
    ended = run(tmp_path, AT=2, END="error")
    assert ended.returncode == 1
    assert ended.stderr.endswith("ArithmeticError: raised by the program\n")
    assert not any(json.loads(file.read_text())["finished"] for file in tmp_path.glob("*.json"))
