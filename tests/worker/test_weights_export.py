"""The weights with the best value of a metric, and files with plain weights."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale import ElasticTrainer
from adascale_controller.local.run_history import RunRecord, record_start
from adascale_controller.local.state_dir import StateDir, delete_checkpoints
from adascale_worker.errors import CheckpointError, WorkerError
from adascale_worker.state.weights import export, main
from e2e.local_run import adascale
from support.training import FIXED, MakeTrainer, make_step, network, samples, sgd, train

safetensors = pytest.importorskip("safetensors.torch")


def begin(
    make_trainer: MakeTrainer, folder: Path, model: nn.Module, **arguments: Any
) -> tuple[ElasticTrainer, torch.optim.SGD]:
    trainer = make_trainer(**FIXED, checkpoint_dir=folder, **arguments)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    return trainer, optimizer


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def only_best_file(folder: Path) -> Path:
    (path,) = folder.glob("best-*")
    return path


@pytest.mark.parametrize(
    ("mode", "values", "best"), [("min", [3, 1.5, 2, float("nan"), 1.5], 1), ("max", [3, 1.5, 7, 5, 7], 2)]
)
def test_the_weights_with_the_best_value_are_kept(
    make_trainer: MakeTrainer, tmp_path: Path, mode: Any, values: list[float], best: int
) -> None:
    model = network()
    trainer, optimizer = begin(make_trainer, tmp_path, model)
    trainer.keep_best("score", mode=mode)
    seen = []
    for epoch, value in enumerate(values):
        train(trainer, model, optimizer, epochs=range(epoch, epoch + 1))
        seen.append(copy_of(model))
        trainer.log(score=torch.tensor(value), loss=0.0)
    trainer.close()
    require_equal(safetensors.load_file(only_best_file(tmp_path)), seen[best])
    described = export(str(tmp_path), tmp_path / "model.safetensors", best=True)
    assert described.startswith(f"the weights of step {6 * (best + 1)}, with score {values[best]:.6g}, ")
    require_equal(safetensors.load_file(tmp_path / "model.safetensors"), seen[best])


def test_a_later_process_replaces_the_best_weights_only_by_better_ones(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    kept = []
    for value in (2.0, 3.0, 1.0):
        model = network()
        trainer, optimizer = begin(make_trainer, tmp_path, model, checkpoint_interval=1000)
        trainer.keep_best("score")
        for _, x, y in trainer.dataloader(samples()):
            make_step(model, optimizer, x, y)
            break
        trainer.log(score=value)
        trainer.close()
        kept.append(only_best_file(tmp_path).name)
    assert kept[0] == kept[1] != kept[2]
    (tmp_path / "best-00000009-01234567.safetensors.01234567.draft").write_bytes(b"half")
    (tmp_path / "notes.txt").touch()
    delete_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_storage_that_cannot_be_written_is_reported_once(
    make_trainer: MakeTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = network()
    trainer, _ = begin(make_trainer, tmp_path / "file" / "folder", model)
    trainer.keep_best("score")
    (tmp_path / "file").touch()
    for value in (3, 2):
        trainer.log(score=value)
        trainer.close()
    assert capfd.readouterr().out.count("with the best score, cannot be saved in") == 1


def test_the_draft_of_a_process_that_was_killed_is_not_the_best(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The header of a file comes first, so that of a draft can be read."""
    model = network()
    trainer, optimizer = begin(make_trainer, tmp_path, model)
    trainer.keep_best("score", mode="min")
    train(trainer, model, optimizer)
    trainer.log(score=1.0)
    trainer.close()
    whole = only_best_file(tmp_path)
    draft = tmp_path / f"{whole.name.replace('best-0', 'best-9')}.0123abcd.draft"
    draft.write_bytes(whole.read_bytes()[:-8])
    whole.unlink()
    with pytest.raises(CheckpointError, match="best"):
        export(str(tmp_path), tmp_path / "model.safetensors", best=True)
    again, _ = begin(make_trainer, tmp_path, model)
    again.keep_best("score", mode="min")
    again.log(score=1.0)
    again.close()
    assert only_best_file(tmp_path).suffix == ".safetensors"


def test_keep_best_refuses_what_it_cannot_do(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    with pytest.raises(WorkerError, match=r"got mode='least': it must be \"min\" or \"max\""):
        trainer.keep_best("loss", mode="least")  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="name"):
        trainer.keep_best("a loss")
    with pytest.warns(RuntimeWarning, match="keeps nothing, because there is no folder for checkpoints"):
        trainer.keep_best("loss")
    trainer.log(loss=1.0)  # nothing is saved without a folder, and before program_reentry
    with pytest.raises(WorkerError, match=r"keep_best\('score'\) was called after keep_best\('loss'\)"):
        trainer.keep_best("score")


class Tied(nn.Module):
    """Has tied weights, a buffer of another type, an empty one, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(6, 2).t())
        self.lowered = nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x)) @ self.transposed.t()
        return output


@pytest.mark.parametrize("compiled", [False, True])
def test_the_newest_checkpoint_is_exported_with_the_names_of_the_model(
    make_trainer: MakeTrainer, tmp_path: Path, compiled: bool
) -> None:
    model = Tied()
    used: Any = torch.compile(model, backend="eager") if compiled else model
    trainer, optimizer = begin(make_trainer, tmp_path / "checkpoints", used, epochs=1)
    train(trainer, used, optimizer)
    assert trainer.finished
    trainer.close()
    file = tmp_path / "model.safetensors"
    assert export(str(tmp_path / "checkpoints"), file, best=False).startswith("7 tensors of step 6, ")
    found = safetensors.load_file(file)
    require_equal(found, copy_of(model))
    again = Tied()
    again.load_state_dict(found)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


@pytest.mark.slow
def test_the_command_exports_a_job_by_its_name(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    folder, model = StateDir(tmp_path / "state"), network()
    folder.create()
    record_start(folder, RunRecord("default.digits", time.time(), 18, None))
    trainer, optimizer = begin(make_trainer, folder.checkpoints, model, epochs=1)
    train(trainer, model, optimizer)
    exported = adascale("export", "digits", tmp_path / "a.safetensors", "--state-dir", folder.path)
    assert exported.stdout.startswith("Exported 4 tensors of step 6, "), exported.stderr
    require_equal(safetensors.load_file(tmp_path / "a.safetensors"), copy_of(model))


def test_without_a_checkpoint_or_best_weights_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in "):
        export(str(tmp_path), tmp_path / "a.safetensors", best=False)
    with pytest.raises(CheckpointError, match=r"there are no best weights in .*: call trainer\.keep_best"):
        export(str(tmp_path), tmp_path / "a.safetensors", best=True)
    assert not (tmp_path / "a.safetensors").exists()


def test_a_file_that_cannot_be_written_is_an_error(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = network()
    trainer, optimizer = begin(make_trainer, tmp_path, model, epochs=1)
    train(trainer, model, optimizer)
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path), str(tmp_path / "no" / "a.safetensors")])
    assert main() == os.EX_IOERR
    assert "a.safetensors cannot be written: No such file or directory" in capfd.readouterr().err
