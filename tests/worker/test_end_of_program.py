"""Tests of a program that ends before its training does, or declares its end."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.fast_python import PYTHON
from support.launch import PROGRAMS, TESTS, AgentProcess, run_program, run_python
from support.service import Service

PROGRAM = str(PROGRAMS / "finishes.py")
PERMANENT = 78


def run(folder: Path, ranks: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_program(PROGRAM, replicas=ranks, ADASCALE_CHECKPOINT_DIR=folder, **options)


def manifest(folder: Path) -> dict[str, Any]:
    newest: dict[str, Any] = json.loads(max(folder.glob("*.json")).read_text())
    return newest


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "break", "raise main"])
def test_a_program_that_ends_before_its_required_steps_fails(tmp_path: Path, end: str) -> None:
    ended = run(tmp_path, END=end, STEPS=100_000)
    assert ended.returncode == PERMANENT, ended.stderr
    assert ended.stderr == (
        "adascale: the program ended at progress 3 of 100,000 scale-invariant steps. Train until "
        "trainer.finished is true, or call trainer.finish(reason) to end training earlier\n"
    )


@pytest.mark.slow
def test_a_program_that_ends_before_its_required_epochs_fails(tmp_path: Path) -> None:
    ended = run(tmp_path, END="exit", AT=8, REQUIRED=1)
    assert ended.returncode == PERMANENT
    assert "adascale: the program ended at epoch 1 of 3. Train until trainer.finished is true" in ended.stderr


@pytest.mark.slow
def test_a_program_without_a_required_end_ends_when_it_wants_to(tmp_path: Path) -> None:
    ended = run(tmp_path, END="exit")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("error", 1), ("exit 3", 3)])
def test_a_program_that_fails_keeps_its_exit_code(tmp_path: Path, end: str, code: int) -> None:
    ended = run(tmp_path, END=end, STEPS=100)
    assert ended.returncode == code
    assert "the program ended at" not in ended.stderr


@pytest.mark.slow
def test_finish_saves_the_end_of_training_with_its_reason(tmp_path: Path) -> None:
    ended = run(tmp_path, END="finish", STEPS=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "rank 0 ends after 3 steps, finished: True\n"
    saved = manifest(tmp_path)
    assert (saved["step"], saved["finished"], saved["finish_reason"]) == (3, True, "no longer improves")
    assert saved["result"] == {"accuracy": 0.5}
    again = run(tmp_path, END="finish", STEPS=100)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(
        "adascale: training has already finished, at step 3, progress 3 (no longer improves)\n"
    )


@pytest.mark.slow
def test_the_last_of_the_required_epochs_saves_the_end_of_training(tmp_path: Path) -> None:
    ended = run(tmp_path, REQUIRED=1)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "rank 0 ends after 18 steps, finished: True\n"
    saved = manifest(tmp_path)
    assert (saved["step"], saved["finished"], saved["result"]) == (18, True, {"accuracy": 0.5})
    again = run(tmp_path, REQUIRED=1)
    assert "adascale: training has already finished, at step 18, progress 18\n" in again.stdout
    more = run(tmp_path, REQUIRED=1, EPOCHS=4)
    assert more.stdout == "rank 0 ends after 24 steps, finished: True\n", more.stderr


def require_ends(output: str, end: str) -> None:
    """Check that each of two ranks has printed its end once. They share a pipe, so lines may be mixed."""
    for rank in range(2):
        assert output.count(f"rank {rank} {end}") == 1, output


@pytest.mark.slow
def test_a_finish_on_one_rank_ends_training_on_all_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, END="finish", ON_RANK=1, STEPS=100_000, EPOCHS=10_000)
    assert ended.returncode == 0, ended.stderr
    steps = manifest(tmp_path)["step"]
    require_ends(ended.stdout, f"ends after {steps} steps, finished: True")
    assert manifest(tmp_path)["finish_reason"] == "no longer improves"


@pytest.mark.slow
def test_a_finish_on_one_rank_that_then_leaves_its_loop_is_refused(tmp_path: Path) -> None:
    ended = run(
        tmp_path, 2, END="finish and break", ON_RANK=0, STEPS=100_000, EPOCHS=10_000,
        FINISH_TIMEOUT=1,
    )  # fmt: skip
    assert ended.returncode == 1, "torchrun's own code"
    line = next(n for n, text in enumerate(Path(PROGRAM).read_text().splitlines(), 1) if ".finish(" in text)
    message = (
        f"adascale: rank 0 called trainer.finish ({PROGRAM}, line {line}) and left its loop, but rank "
        f"1 did not call it. After trainer.finish(reason) on some of the replicas, continue the loop"
    )
    assert message in ended.stderr
    assert f"exitcode  : {PERMANENT}" in ended.stderr
    assert not any(json.loads(path.read_text())["finished"] for path in sorted(tmp_path.glob("*.json"))[-1:])


@pytest.mark.slow
@pytest.mark.parametrize(("end", "rank", "other", "processes"), [("next epoch", 1, 0, 1), ("break", 0, 1, 2)])
def test_a_rank_that_leaves_its_loop_alone_is_named_with_its_line(
    tmp_path: Path, end: str, rank: int, other: int, processes: int
) -> None:
    sharded = {"ADASCALE_PROCESSES_PER_REPLICA": processes} if processes > 1 else {}
    ended = run(tmp_path, 2 * processes, END=end, ON_RANK=rank, EPOCHS=10_000, **sharded)
    assert ended.returncode == 1, "torchrun's own code"
    condition = {"break": "if ends():", "next epoch": 'if end == "next epoch"'}[end]
    lines = Path(PROGRAM).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 2) if text.strip().startswith(condition))
    message = (
        f"adascale: rank {rank} left its loop over trainer.dataloader() ({PROGRAM}, line {line}) after step "
        f"3, but rank {other} is in step 4, which needs all 2 replicas. Leave the loop on all replicas"
    )
    assert message in ended.stderr
    assert 'Traceback (most recent call last):\n  File "' + PROGRAM not in ended.stderr


@pytest.mark.slow
def test_sharded_replicas_that_train_different_parameters_stop_with_the_name_of_one(tmp_path: Path) -> None:
    ended = run(tmp_path, 4, END="freeze", ON_RANK=1, EPOCHS=10_000, ADASCALE_PROCESSES_PER_REPLICA=2)
    assert ended.returncode == 1, "torchrun's own code"
    message = "adascale: the 2 replicas train different parameters after step 3: requires_grad of 'bias'"
    assert message in ended.stderr


@pytest.mark.slow
def test_an_error_on_one_rank_shows_its_own_traceback_and_one_line_on_the_other(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, END="error", ON_RANK=1, STEPS=100_000)
    assert ended.returncode == 1
    assert "ArithmeticError: raised by the program" in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert "ValueError" not in ended.stderr


def test_an_agent_exits_as_its_program_ends(tmp_path: Path, service: Service) -> None:
    service.allocate(1, 1)
    options = {"PYTHONPATH": TESTS, "END": "exit", "STEPS": 100_000}
    agent = AgentProcess(0, tmp_path, service.environ, [*PYTHON, PROGRAM], **options)
    assert agent.wait() == PERMANENT, agent.log.read_text()
    latest = service.job()["latest"]
    assert (latest["step"], latest["target"]) == (3, 100_000.0), "the last step is reported"


def test_a_trainer_that_the_program_has_closed_is_gone_and_does_not_fail_it() -> None:
    """As one whose training has failed, and that another one replaces."""
    program = """
import gc, weakref, torch
from adascale import ElasticTrainer
def train():
    trainer = ElasticTrainer(batch_size=4, scale_invariant_steps=100)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    for x in trainer.dataloader([torch.ones(2)] * 8):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        break
    trainer.close()
    return weakref.ref(model)
model = train()
gc.collect()
print(model())
"""
    assert run_python("-c", program).splitlines()[-1] == "None"
