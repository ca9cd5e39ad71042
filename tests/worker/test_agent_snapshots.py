"""Tests of the state that an agent keeps in memory: where a process was killed, the next one continues."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from adascale import ElasticTrainer
from adascale_storage.folder import Folder
from adascale_worker.errors import UnusableCheckpointError
from adascale_worker.process.snapshot_place import make_snapshot_files
from adascale_worker.state import state as state_module
from adascale_worker.state.file import Snapshot
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from support.training import FIXED, MakeTrainer, adamw, equal, make_step, network, parameters_of, samples


class KilledError(Exception):
    """Stands for the end of a process: what it has in memory is not used any more."""


class Registered:
    """An object that accepts states up to a number only."""

    def __init__(self, accepts: float = inf) -> None:
        self._accepts = accepts
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["calls"] > self._accepts:
            raise ValueError(f"{state['calls']} calls")
        self.calls = state["calls"]


@pytest.fixture
def paths() -> Iterator[list[str]]:
    made = make_snapshot_files().split(":")
    yield made
    for path in made:
        os.close(int(Path(path).name))


Outcome = tuple[list[Tensor], dict[str, float | str]]
"""The weights and the result of training in one process."""


@pytest.fixture
def run(
    make_trainer: MakeTrainer, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Trains from one step to another, as one process after the other of the same agent does."""
    monkeypatch.setattr(state_module, "SNAPSHOT_SHARE", 1.0)
    monkeypatch.setattr(state_module, "SNAPSHOT_DELAY", 0.0)

    def run(
        begins: int,
        until: int,
        *,
        memory: SnapshotMemory | None = None,
        registered: Registered | None = None,
        after_step: Callable[[ElasticTrainer, nn.Module], None] = lambda *_: None,
        **arguments: Any,
    ) -> Outcome:
        trainer = make_trainer(**{**FIXED, **arguments})
        memory = SnapshotMemory(paths, lambda: inf) if memory is None else memory
        trainer._replica.snapshot_memory = memory
        model, registered = network(dropout=0.2), registered or Registered()
        optimizer = adamw(model)
        state = trainer.program_reentry(model, optimizer, register={"registered": registered})
        assert (state.step, state.restored) == (begins, begins > 0)
        with suppress(KilledError):
            for epoch in range(state.epoch, 10):
                for _, x, y in trainer.dataloader(samples()):
                    if trainer.steps == until:
                        raise KilledError
                    make_step(model, optimizer, x, y)
                    registered.calls += 1
                    after_step(trainer, model)
                trainer.step(epoch)
        outcome = parameters_of(model), trainer._replica.checkpointing.result
        trainer.close()
        return outcome

    return run


def test_the_next_process_continues_after_the_last_step(
    run: Callable[..., Outcome], paths: list[str]
) -> None:
    """Also if it is killed in another epoch, and before its first step. An epoch has six steps."""

    def report(trainer: ElasticTrainer, _: nn.Module) -> None:
        if trainer.steps == 2:
            trainer.report_result(accuracy=0.5)

    for begins, until in ((0, 4), (4, 4), (4, 6), (6, 13)):
        run(begins, until, after_step=report)
    weights, result = run(13, 14)
    assert result == {"accuracy": 0.5}
    SnapshotMemory(paths).release()
    undisturbed, _ = run(0, 14)
    assert equal(weights, undisturbed)


@pytest.mark.usefixtures("durable_checkpoints")
def test_a_later_checkpoint_is_used(run: Callable[..., Outcome], tmp_path: Path) -> None:
    run(0, 4, checkpoint_dir=tmp_path, checkpoint_interval=1000)
    without = make_snapshot_files().split(":")
    # Another agent, with memory of its own, continues from the checkpoint of the first step.
    run(1, 6, memory=SnapshotMemory(without, lambda: inf), checkpoint_dir=tmp_path, checkpoint_interval=0)
    run(6, 8, checkpoint_dir=tmp_path, checkpoint_interval=1000)
    run(8, 9, checkpoint_dir=tmp_path, checkpoint_interval=1000)


def info_of(number: tuple[int, int, int]) -> CheckpointInfo:
    incarnation, generation, step = number
    return CheckpointInfo(step, 1.0, 0, 1, generation, finished=False, saved_at=0.0, incarnation=incarnation)


def save_checkpoint(folder: Path, number: tuple[int, int, int]) -> None:
    snapshot = Snapshot()
    snapshot.copy({"is": "checkpoint"})
    CheckpointStore(Folder(folder)).save(snapshot, info_of(number))


def what_is_loaded(make_trainer: MakeTrainer, memory: SnapshotMemory, folder: Path) -> Any:
    """Return the state that a replica of the only agent begins with."""
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, adamw(model))
    assert trainer._training is not None
    state = trainer._training.state
    state._memory = memory
    state._checkpointing = Checkpointing(folder, 30.0, trainer._replica.group)
    return state.load(wait=False)


@pytest.mark.parametrize(
    ("copy", "checkpoint", "is_copy_used"),
    [
        ((100, 3, 9), (100, 3, 8), True),
        # It may be of the end of training.
        ((100, 3, 9), (100, 3, 9), False),
        ((100, 3, 9), (100, 3, 10), False),
        ((100, 3, 9), (100, 2, 8), True),
        # The job was continued elsewhere, or on another node, with an earlier state.
        ((100, 3, 9), (100, 4, 5), False),
        # A later or an earlier job of this name has saved.
        ((100, 3, 9), (200, 1, 5), False),
        ((100, 3, 9), (50, 7, 20), True),
    ],
)
def test_a_copy_is_used_only_if_no_later_job_generation_or_step_is_saved(
    copy: tuple[int, int, int],
    checkpoint: tuple[int, int, int],
    is_copy_used: bool,
    make_trainer: MakeTrainer,
    paths: list[str],
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, checkpoint)
    memory = SnapshotMemory(paths, lambda: inf)
    memory.save({"is": "copy"}, info_of(copy), {})
    assert what_is_loaded(make_trainer, memory, tmp_path) == {"is": "copy" if is_copy_used else "checkpoint"}


@pytest.mark.parametrize(
    ("intact", "copy", "is_copy_used"), [((5,), 6, True), ((5,), 4, False), ((), 4, True)]
)
def test_a_damaged_checkpoint_does_not_count(
    intact: tuple[int, ...],
    copy: int,
    is_copy_used: bool,
    make_trainer: MakeTrainer,
    paths: list[str],
    tmp_path: Path,
) -> None:
    for step in intact:
        save_checkpoint(tmp_path, (100, 3, step))
    before = set(tmp_path.rglob("*"))
    save_checkpoint(tmp_path, (100, 3, 9))
    (state,) = (path for path in set(tmp_path.rglob("*")) - before if path.suffix == ".safetensors")
    state.write_bytes(b"damaged")
    memory = SnapshotMemory(paths, lambda: inf)
    memory.save({"is": "copy"}, info_of((100, 3, copy)), {})
    assert what_is_loaded(make_trainer, memory, tmp_path) == {"is": "copy" if is_copy_used else "checkpoint"}


def test_after_a_lack_of_memory_copies_are_made_again(
    run: Callable[..., Outcome], paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    left = [1000.0]

    def free(trainer: ElasticTrainer, _: nn.Module) -> None:
        if trainer.steps == 3:
            left[0] = inf

    run(0, 5, memory=SnapshotMemory(paths, lambda: left[0]), after_step=free)
    output = capsys.readouterr().out
    assert output.count("the agent keeps no copy of the state") == 1
    assert output.count("the agent keeps copies of the state now") == 1
    run(5, 6)


def test_memory_is_not_taken_in_the_first_minute(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "SNAPSHOT_DELAY", 3600.0)
    run(0, 3)
    run(0, 1)


@pytest.mark.usefixtures("durable_checkpoints")
def test_a_copy_that_cannot_be_restored_is_deleted_and_the_checkpoint_is_used(
    run: Callable[..., Outcome], paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(0, 4, checkpoint_dir=tmp_path, checkpoint_interval=1000)
    run(1, 1, registered=Registered(accepts=3), checkpoint_dir=tmp_path, checkpoint_interval=1000)
    assert (
        "the state that the agent has kept in memory cannot be used: the registered"
        in capsys.readouterr().out
    )


def test_without_a_checkpoint_a_copy_that_cannot_be_restored_ends_the_job(
    run: Callable[..., Outcome],
) -> None:
    """The model has loaded a part of it, so training cannot begin without a state."""
    run(0, 4)
    with pytest.raises(UnusableCheckpointError, match="the registered 'registered'"):
        run(0, 1, registered=Registered(accepts=3))


def test_weights_that_are_not_finite_are_not_kept(run: Callable[..., Outcome]) -> None:
    def spoil(trainer: ElasticTrainer, model: nn.Module) -> None:
        if trainer.steps == 3:
            next(model.parameters()).data.fill_(nan)

    run(0, 3, after_step=spoil)
    run(2, 3)


def test_without_enough_memory_training_continues_without_copies(
    run: Callable[..., Outcome], paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(0, 4, memory=SnapshotMemory(paths, lambda: 1000.0))
    output = capsys.readouterr().out
    assert output.count("adascale: the agent keeps no copy of the state: the state has") == 1
    assert "training continues from the last checkpoint" in output
    run(0, 1)
