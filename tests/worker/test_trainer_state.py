"""Tests of what a trainer saves and restores, on one replica, in the test's own process."""

import json
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from adascale import ElasticTrainer
from adascale_worker.errors import CheckpointError, UnusableCheckpointError, WorkerError
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    adamw,
    entered,
    equal,
    learn,
    make_step,
    network,
    parameters_of,
    samples,
    sgd,
    train,
)

pytestmark = pytest.mark.usefixtures("durable_checkpoints")

COMPARING = {**FIXED, "single_replica_gain": "consecutive"}
DIVIDING = {**FIXED, "max_batch_size": 48, "local_bsz_bounds": (8, 16)}


class CrashError(Exception):
    """Ends a loop as a kill does: nothing is saved."""


class Draws:
    """Registered state that records the random numbers that a program draws."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drawn = list(state_dict["drawn"])

    def draw(self) -> None:
        self.drawn += [random.random(), float(numpy.random.random()), torch.rand(1).item()]


def manifest(folder: Path) -> dict[str, Any]:
    """The newest checkpoint's manifest."""
    return dict(json.loads(sorted(folder.glob("*.json"))[-1].read_text()))


def program(
    make_trainer: MakeTrainer,
    folder: Path,
    bounds: dict[str, Any],
    crash_at: int | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler, Draws]:
    """Train three epochs, and draw random numbers in them and between them."""
    trainer = make_trainer(**bounds, checkpoint_dir=folder, checkpoint_interval=0)
    random.seed(1)
    numpy.random.seed(1)
    model = network(dropout=0.3)
    optimizer = make_optimizer(model)
    scheduler = MultiStepLR(optimizer, milestones=[4, 9], gamma=0.3)
    draws = Draws()
    state = trainer.program_reentry(model, optimizer, scheduler, register={"draws": draws})
    assert (state.step, state.progress) == (trainer.progress, trainer.progress)
    step = state.step
    for epoch in range(state.epoch, 3):
        for micro_batch, (_, x, y) in enumerate(trainer.dataloader(samples()), start=1):
            optimizer.zero_grad()
            draws.draw()
            learn(model, x, y)
            optimizer.step()
            scheduler.step()
            if micro_batch % trainer.accumulation == 0:
                step += 1
            if step == crash_at:
                raise CrashError
        draws.draw()
        trainer.step(epoch)
    return model, optimizer, scheduler, draws


def test_a_periodic_checkpoint_is_hardly_larger_than_the_model_and_its_optimizer(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """One replica keeps the gradient of a step to compare it with the next. No checkpoint has it."""
    options = {**FIXED, "single_replica_gain": "consecutive"}
    trainer = make_trainer(**options, checkpoint_dir=tmp_path, checkpoint_interval=0)
    model = nn.Sequential(nn.Linear(6, 1000), nn.ReLU(), nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 2))
    optimizer = adamw(model)
    trainer.program_reentry(model, optimizer)
    sizes = set()
    for epoch in range(2):
        for _, x, y in trainer.dataloader(samples()):
            sizes |= {path.stat().st_size for path in tmp_path.glob("*.safetensors")}
            make_step(model, optimizer, x, y)
        trainer.step(epoch)
    states = [value for values in optimizer.state.values() for value in values.values()]
    state = sum(tensor.nbytes for tensor in [*model.parameters(), *states] if torch.is_tensor(tensor))
    assert state > 4_000_000
    assert sizes
    assert max(sizes) < 1.05 * state


@pytest.mark.parametrize(
    ("bounds", "crashes", "make_optimizer"),
    [
        pytest.param(FIXED, [5], sgd, id="plain"),
        pytest.param(COMPARING, [6], adamw, id="comparing"),
        pytest.param(DIVIDING, [3, 3, 9, 11], adamw, id="dividing"),
        pytest.param(ACCUMULATING, [3, 3, 9, 11], sgd, id="accumulating"),
    ],
)
def test_after_crashes_training_ends_with_the_same_state_bit_for_bit(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    bounds: dict[str, Any],
    crashes: list[int],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    undisturbed = program(make_trainer, tmp_path / "undisturbed", bounds, None, make_optimizer)
    for crash_at in crashes:
        with pytest.raises(CrashError):
            program(make_trainer, tmp_path / "disturbed", bounds, crash_at, make_optimizer)
    model, optimizer, scheduler, draws = program(
        make_trainer, tmp_path / "disturbed", bounds, None, make_optimizer
    )
    assert equal(parameters_of(model), parameters_of(undisturbed[0]))
    states, others = (
        [tensor for state in each.state.values() for tensor in state.values()]
        for each in (optimizer, undisturbed[1])
    )
    assert states
    assert equal(states, others)
    assert scheduler.state_dict() == undisturbed[2].state_dict()
    assert draws.drawn == undisturbed[3].drawn


def test_program_reentry_returns_where_to_resume(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def enter() -> tuple[ElasticTrainer, Any, nn.Module, torch.optim.SGD]:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0)
        model = network()
        optimizer = sgd(model)
        return trainer, trainer.program_reentry(model, optimizer), model, optimizer

    trainer, state, model, optimizer = enter()
    assert (state.epoch, state.step, state.progress, state.restored) == (0, 0, 0.0, False)
    train(trainer, model, optimizer, epochs=range(2))
    trainer, state, model, optimizer = enter()
    assert (state.epoch, state.step, state.progress, state.restored) == (1, 12, 12.0, True)
    assert train(trainer, model, optimizer, epochs=range(1, 2)) == [], "saved at the end of the epoch"


def test_results_reported_before_and_after_the_final_checkpoint_are_in_its_manifest(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, scale_invariant_steps=6)
    trainer.report_result(note="reported before the end")
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    train(trainer, model, optimizer)
    assert manifest(tmp_path)["finished"]
    trainer.report_result(accuracy=0.5)
    assert manifest(tmp_path)["result"] == {"note": "reported before the end", "accuracy": 0.5}


def test_a_result_is_a_number_or_text(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "a": torch.tensor(0.5),
        "b": torch.tensor([7]),
        "c": numpy.float32(0.5),
        "d": numpy.int64(7),
        "e": True,
        "f": "large",
        "g": float("nan"),
        "h": torch.tensor(float("inf")),
    }
    expected = {"a": 0.5, "b": 7, "c": 0.5, "d": 7, "e": 1, "f": "large", "g": "nan", "h": "inf"}
    trainer, model, optimizer = entered(
        make_trainer, **FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0, scale_invariant_steps=6
    )
    trainer.report_result(**given)
    train(trainer, model, optimizer)
    assert manifest(tmp_path)["result"] == expected
    trainer.report_result(**{f"late_{name}": value for name, value in given.items()})
    late = {f"late_{name}": value for name, value in expected.items()}
    assert manifest(tmp_path)["result"] == expected | late
    with pytest.raises(WorkerError, match=r"report_result\(\) got a tensor of shape \(2,\) for x: pass a n"):
        trainer.report_result(x=torch.zeros(2))
    with pytest.raises(WorkerError, match="got NoneType for x"):
        trainer.report_result(x=None)  # type: ignore[arg-type]


def test_a_registered_object_that_refuses_its_state_is_named(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def enter(*, enabled: bool) -> tuple[ElasticTrainer, nn.Module, torch.optim.SGD]:
        trainer, model = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0), network()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        trainer.program_reentry(model, optimizer, register={"scaler": scaler})
        return trainer, model, optimizer

    train(*enter(enabled=False), epochs=range(1))
    with pytest.raises(
        UnusableCheckpointError, match=r"the registered 'scaler' \(GradScaler\) refuses the state"
    ):
        enter(enabled=True)


def test_the_result_of_an_end_after_which_training_goes_on_is_not_kept(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def run(steps: int, **result: float) -> dict[str, Any]:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, scale_invariant_steps=steps)
        trainer.report_result(begun=steps)
        model = network()
        optimizer = sgd(model)
        state = trainer.program_reentry(model, optimizer)
        train(trainer, model, optimizer, epochs=range(state.epoch, 5))
        trainer.report_result(**result)
        return dict(manifest(tmp_path)["result"])

    assert run(6, accuracy=0.5, loss=1.0) == {"begun": 6, "accuracy": 0.5, "loss": 1.0}
    assert run(10, accuracy=0.6) == {"begun": 10, "accuracy": 0.6}
    assert run(10, f1=0.4) == {"begun": 10, "accuracy": 0.6, "f1": 0.4}


def test_a_finished_job_makes_no_more_steps(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def run() -> tuple[int, nn.Module]:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, scale_invariant_steps=10)
        model = network()
        optimizer = sgd(model)
        state = trainer.program_reentry(model, optimizer)
        return len(train(trainer, model, optimizer, epochs=range(state.epoch, 5))), model

    steps, model = run()
    steps_again, model_again = run()
    assert (steps, steps_again) == (10, 0)
    assert equal(parameters_of(model), parameters_of(model_again))


@pytest.mark.parametrize(
    "required",
    [{"scale_invariant_steps": 14}, {"epochs": 2}, {"epochs": 1}],
    ids=["steps", "epochs", "fewer"],
)
def test_a_finished_job_that_is_given_another_end_saves_that_end(
    make_trainer: MakeTrainer, tmp_path: Path, required: dict[str, Any]
) -> None:
    def run(**required: Any) -> int:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=3600, **required)
        model = network()
        optimizer = sgd(model)
        state = trainer.program_reentry(model, optimizer)
        epochs = range(state.epoch, required.get("epochs", 5))
        made = len(train(trainer, model, optimizer, epochs=epochs))
        trainer.report_result(required=json.dumps(required))
        return made

    made = run(scale_invariant_steps=10)
    made += run(**required)
    saved = manifest(tmp_path)
    assert (saved["step"], saved["finished"]) == (made, True)
    assert saved["result"]["required"] == json.dumps(required)
    assert run(**required) == 0


# -- exiting --------------------------------------------------------------------------------------------


def train_and_signal(
    trainer: ElasticTrainer, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, within: int
) -> None:
    """Train, and send this process a signal in the micro-batch `within`, counted from 0.

    Twice, as a terminal and a launcher do, or `timeout` to a process and to its group.
    """
    for micro_batch, (_, x, y) in enumerate(trainer.dataloader(samples())):
        optimizer.zero_grad()
        learn(model, x, y)
        if micro_batch == within:
            signal.raise_signal(number)
            signal.raise_signal(number)
        optimizer.step()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_shutdown_signal_saves_after_the_current_step_and_exits(
    make_trainer: MakeTrainer, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, model, optimizer = entered(make_trainer, **ACCUMULATING, checkpoint_dir=tmp_path)
    with pytest.raises(SystemExit) as exited:
        train_and_signal(trainer, model, optimizer, number, within=4)
    assert exited.value.code == 128 + number
    assert manifest(tmp_path)["step"] == 2
    assert "saved a checkpoint at step 2; run the same command to resume" in capsys.readouterr().out


def test_the_state_is_saved_before_the_handler_of_the_program_ends_it(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def handle(_number: int, _frame: object) -> NoReturn:
        sys.exit(f"exit at step {manifest(tmp_path)['step']}")

    original = signal.getsignal(signal.SIGTERM)
    trainer, model, optimizer = entered(make_trainer, **FIXED, checkpoint_dir=tmp_path)
    signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(SystemExit, match="exit at step 3"):
            train_and_signal(trainer, model, optimizer, signal.SIGTERM, within=2)
    finally:
        signal.signal(signal.SIGTERM, original)


def test_a_program_that_nohup_has_started_ignores_the_end_of_its_terminal(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    original = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        entered(make_trainer, **FIXED, checkpoint_dir=tmp_path)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, original)


def test_ctrl_c_interrupts_at_once_after_the_final_checkpoint(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer, model, optimizer = entered(
        make_trainer, **FIXED, checkpoint_dir=tmp_path, scale_invariant_steps=6
    )
    train(trainer, model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_signal_handlers_are_unchanged_without_a_checkpoint_folder(make_trainer: MakeTrainer) -> None:
    before = signal.getsignal(signal.SIGTERM)
    entered(make_trainer, **FIXED)
    assert signal.getsignal(signal.SIGTERM) is before


# -- checkpoints of other programs ----------------------------------------------------------------------


class Refusing(nn.Sequential):
    """A model that checks its state itself."""

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise ValueError("refused by the model")


EACH_STEP = partial(StepLR, step_size=1)


@dataclass
class Program:
    """What a program passes to `program_reentry`; by default, that of the checkpoint."""

    model: Callable[[], Any] = network
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = EACH_STEP
    register: dict[str, Any] = field(default_factory=dict)

    def enter(self, trainer: ElasticTrainer) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.model()
        optimizer = self.optimizer(model)
        scheduler = self.scheduler(optimizer) if self.scheduler is not None else None
        trainer.program_reentry(model, optimizer, scheduler, register=self.register)
        return model, optimizer


def save_checkpoint(make_trainer: MakeTrainer, folder: Path) -> None:
    trainer = make_trainer(**FIXED, checkpoint_dir=folder, checkpoint_interval=0)
    train(trainer, *Program().enter(trainer))


SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            Program(optimizer=lambda model: SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)),
            "from another optimizer: parameter 0 of group 0 was 0.weight, and is 3.bias now. Give the opt",
        ),
        (
            Program(lambda: Refusing(*network())),
            "the model refuses the state of the checkpoint: ValueError: refused by the model. Use the model",
        ),
        (
            Program(optimizer=lambda model: AdamW(model.parameters(), lr=0.1)),
            "from another optimizer: the parameter groups of the state have momentum, those of AdamW do not",
        ),
        (
            Program(lambda: nn.Linear(6, 2)),
            r"from another model: weight is missing; bias is missing; 0.weight is not in",
        ),
        (
            Program(lambda: torch.compile(network())),
            r"changed the names of one of the two: .* by model\.compile\(\), which k",
        ),
        (
            Program(optimizer=lambda model: SGD([{"params": [each]} for each in model.parameters()], lr=0.1)),
            "was saved from another optimizer: .*parameter groups",
        ),
        (
            Program(scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 10)),
            "was saved with a StepLR, program_reentry got a CosineAnnealingLR",
        ),
        (Program(scheduler=None), "was saved with a StepLR, program_reentry got no scheduler"),
        (Program(register={"draws": Draws()}), r"has nothing registered, the program registers \['draws'\]"),
    ],
)
def test_a_checkpoint_of_another_program_is_an_error(
    make_trainer: MakeTrainer, tmp_path: Path, program: Program, message: str
) -> None:
    save_checkpoint(make_trainer, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        program.enter(make_trainer(**FIXED, checkpoint_dir=tmp_path))


class Growing(nn.Linear):
    """Its extra state grows with each forward pass, as the serialized state of some quantized layers does."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.history.append(1.0)
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.history)

    def set_extra_state(self, state: Any) -> None:
        self.history = state.tolist()


def test_the_shape_of_a_modules_extra_state_may_change(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def enter() -> tuple[ElasticTrainer, Growing, torch.optim.Optimizer]:
        trainer, model = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0), Growing()
        optimizer = sgd(model)
        trainer.program_reentry(model, optimizer)
        return trainer, model, optimizer

    train(*enter(), epochs=range(1))
    _, restored, _ = enter()
    assert len(restored.history) > 1


def test_a_scheduler_with_fewer_parts_than_that_of_the_checkpoint_is_an_error(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def enter(parts: int) -> tuple[ElasticTrainer, nn.Module, torch.optim.Optimizer]:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0)
        model = network()
        optimizer = sgd(model)
        schedulers: list[LRScheduler] = [StepLR(optimizer, 5) for _ in range(parts)]
        ends = [5 * (part + 1) for part in range(parts - 1)]
        trainer.program_reentry(model, optimizer, SequentialLR(optimizer, schedulers, milestones=ends))
        return trainer, model, optimizer

    train(*enter(3), epochs=range(1))
    with pytest.raises(CheckpointError, match=r"the scheduler SequentialLR refuses the state.*IndexError"):
        enter(2)


def test_a_checkpoint_of_another_batch_size_is_an_error(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    save_checkpoint(make_trainer, tmp_path)
    trainer = make_trainer(batch_size=12, checkpoint_dir=tmp_path)
    model = network()
    optimizer = sgd(model)
    with pytest.raises(CheckpointError, match="was saved with batch_size 8, but batch_size is now 12"):
        trainer.program_reentry(model, optimizer, StepLR(optimizer, 1))


def test_changed_bounds_apply_after_reentry(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plans = []
    for upper in (12, 4):
        trainer, model, optimizer = entered(
            make_trainer, batch_size=12, local_bsz_bounds=(2, upper), checkpoint_dir=tmp_path
        )
        plans.append((trainer.get_local_bsz(), trainer.accumulation))
        with pytest.raises(SystemExit):
            train_and_signal(trainer, model, optimizer, signal.SIGTERM, within=0)
        trainer.close()  # Else the next one calls its handler, for which this is a second signal.
    assert plans == [(12, 1), (4, 3)]


# -- contents of checkpoints ----------------------------------------------------------------------------


def test_a_scheduler_that_is_stepped_with_a_metric_is_restored(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The others are in test_schedulers.py."""

    def enter() -> tuple[ElasticTrainer, nn.Module, torch.optim.SGD, ReduceLROnPlateau]:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0)
        model = network()
        optimizer = sgd(model)
        scheduler = ReduceLROnPlateau(optimizer)
        trainer.program_reentry(model, optimizer, scheduler)
        return trainer, model, optimizer, scheduler

    trainer, model, optimizer, scheduler = enter()
    train(trainer, model, optimizer)
    _, _, restored, found = enter()
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert found.last_epoch == scheduler.last_epoch


class Opaque(Draws):
    """Its state can be saved, but not loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("somewhere")}


class Stateless(Draws):
    """Its method forgets to return the state."""

    def state_dict(self) -> Any:
        self.drawn.clear()


def test_a_registered_object_that_returns_no_state_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED, checkpoint_dir="unused"), network()
    with pytest.raises(
        WorkerError, match=r"register\['x'\].state_dict\(\) returned NoneType: it must return"
    ):
        trainer.program_reentry(model, sgd(model), register={"x": Stateless()})


def test_state_that_could_not_be_loaded_again_is_an_error_at_program_reentry(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path)
    model = network()
    with pytest.raises(WorkerError, match=r"'opaque' .*\['path'\] is of type pathlib.PosixPath.*use tensors"):
        trainer.program_reentry(model, sgd(model), register={"draws": Draws(), "opaque": Opaque()})
