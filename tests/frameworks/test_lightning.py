"""`ElasticStrategy` on one replica, compared with plain Lightning."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning_package
import pytest
import pytorch_lightning as older_package
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from adascale.errors import AdaScaleError, DatasetError, WorkerError
from adascale.lightning import ElasticStrategy
from adascale_core.errors import MissingExtraError
from adascale_frameworks.lightning.states import LightningStates
from adascale_frameworks.lightning.strategy import PACKAGES
from support.streams import Items

# Lightning warns of few worker processes, short epochs and folders that exist.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCH_SIZE = 8
SAMPLES = 48
VALIDATED = 13  # samples in a batch of validation, the last of which has fewer
FIXED = {"max_batch_size": BATCH_SIZE, "local_bsz_bounds": (BATCH_SIZE, BATCH_SIZE)}
LIGHTNING, OLDER = PACKAGES
callbacks = lightning_package.callbacks


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(features, features.sum(1, keepdim=True).tanh())


def loader(batch_size: int = BATCH_SIZE, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=batch_size, **options)


def stream(batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    return DataLoader(Items(data()), batch_size=batch_size)


class StepsMixin:
    """A module of either package, whose loss is a mean over a batch."""

    def __init__(self, mode: str = "automatic", optimizer: str = "SGD", interval: str = "step") -> None:
        super().__init__()
        self.mode, self.optimizer, self.interval = mode, optimizer, interval
        self.automatic_optimization = mode == "automatic"
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)
        self.clipped: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.forward(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)  # type: ignore[attr-defined]
        if self.mode == "automatic":
            return loss
        optimizers: Any = self.optimizers()  # type: ignore[attr-defined]
        for number, each in enumerate(optimizers if self.mode == "several" else [optimizers]):
            each.zero_grad()
            loss = nn.functional.mse_loss(self.forward(x), y) * (number + 1)
            self.manual_backward(loss)  # type: ignore[attr-defined]
            each.step()
        schedulers: Any = self.lr_schedulers()  # type: ignore[attr-defined]
        for each in schedulers if self.mode == "several" else [schedulers]:
            each.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clipped.append(float(next(self.head.parameters()).grad.norm()))  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.forward(x), y), sync_dist=True)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        owners: list[Any] = [self.body, self.head] if self.mode == "several" else [self]
        make = getattr(torch.optim, self.optimizer)
        optimizers = [make(each.parameters(), lr=0.05) for each in owners]
        return optimizers, [
            {"scheduler": torch.optim.lr_scheduler.StepLR(each, 4, 0.9), "interval": self.interval}
            for each in optimizers
        ]


class Steps(StepsMixin, lightning_package.LightningModule):
    pass


class OlderSteps(StepsMixin, older_package.LightningModule):
    pass


class Recorder:
    """Records what the callbacks see."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []
        self.every_4: list[int] = []
        self.validations: list[tuple[int, float]] = []
        self.epochs: list[int] = []

    def callback(self, package: str) -> Any:
        record = self

        class Recording(import_module(package).Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                lr = trainer.optimizers[0].param_groups[0]["lr"]
                record.steps.append((int(trainer.global_step), trainer.fit_loop.batch_idx, lr))
                if trainer.global_step % 4 == 0:
                    record.every_4.append(int(trainer.global_step))

            def on_validation_end(self, trainer: Any, module: Any) -> None:
                if not trainer.sanity_checking:
                    value = float(trainer.callback_metrics["val_loss"])
                    record.validations.append((int(trainer.global_step), value))

            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                record.epochs.append(trainer.current_epoch)

        return Recording()


class Fit:
    """Trains with Lightning, plain or elastic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.strategies: list[Any] = []
        self.record = Recorder()
        self.trainer: Any = None

    def strategy(self, **options: Any) -> Any:
        self.strategies.append(ElasticStrategy(**{"package": LIGHTNING, **options}))
        return self.strategies[-1]

    def __call__(
        self,
        module: Any = None,
        strategy: Any = None,
        package: str = LIGHTNING,
        train: Any = None,
        callbacks: tuple[Any, ...] = (),
        ckpt_path: Any = None,
        **options: Any,
    ) -> Any:
        module = Steps() if module is None else module
        self.record = Recorder()
        kinds: Any = import_module(f"{package}.callbacks")
        folder = self.folder / str(len(list(self.folder.iterdir())))
        self.trainer = import_module(package).Trainer(
            accelerator="cpu",
            **({} if strategy is None else {"strategy": strategy}),
            callbacks=[
                self.record.callback(package),
                kinds.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1),
                *callbacks,
            ],
            logger=import_module(f"{package}.loggers").CSVLogger(str(folder)),
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"max_epochs": 3, "log_every_n_steps": 4, "val_check_interval": 0.5, **options},
        )
        if isinstance(train, lightning_package.LightningDataModule):
            self.trainer.fit(module, train)
        else:
            self.trainer.fit(
                module, loader() if train is None else train, loader(VALIDATED), ckpt_path=ckpt_path
            )
        self.checkpoints = sorted(int(path.stem.split("=")[1]) for path in folder.glob("step=*.ckpt"))
        with next(folder.rglob("metrics.csv")).open() as file:
            self.logged = [
                (int(row["step"]), sorted(k for k in row if row[k])) for row in csv.DictReader(file)
            ]
        return module


@pytest.fixture
def fit(tmp_path: Path, no_job: None) -> Iterator[Fit]:
    folder = tmp_path / "fits"
    folder.mkdir()
    made = Fit(folder)
    yield made
    for strategy in made.strategies:
        if strategy._elastic is not None:
            strategy.elastic_trainer.close()


class Values:
    """A tracker that keeps the last values."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def begin(self, run: str, step: int, progress: float) -> None:
        pass

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        self.values.update(values)

    def close(self) -> None:
        pass


def test_the_loss_and_the_logged_values_are_reported(fit: Fit) -> None:
    values = Values()
    fit(strategy=fit.strategy(**FIXED, tracker=values))
    fit.strategies[-1].elastic_trainer.close()
    assert values.values["loss"] > 0
    validated = [value for _, value in fit.record.validations]
    assert min(validated) <= values.values["val_loss"] <= max(validated)


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def require_equal(left: nn.Module, right: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


# -- the same as plain Lightning ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({"optimizer": "AdamW"}, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
        ({"interval": "epoch"}, {"max_epochs": -1, "max_steps": 15}),
        ({"mode": "manual"}, {"package": OLDER}),
        ({"mode": "several"}, {"check_val_every_n_epoch": 2}),
    ],
)
def test_with_fixed_bounds_everything_is_that_of_plain_lightning(
    fit: Fit, made: dict[str, Any], options: dict[str, Any]
) -> None:
    package = options.get("package", LIGHTNING)
    kind: Any = Steps if package == LIGHTNING else OlderSteps
    plain = fit(kind(**made), **options)
    record, checkpoints, logged = fit.record, fit.checkpoints, fit.logged
    steps = [(step, idx, lr) for step, idx, lr in record.steps]
    elastic = fit(kind(**made), fit.strategy(**FIXED, package=package), **options)
    require_equal(elastic, plain)
    assert fit.record.epochs == record.epochs
    assert [loss for _, loss in fit.record.validations] == pytest.approx([v for _, v in record.validations])
    if made.get("mode") == "several":  # Lightning counts the steps of both optimizers
        assert [step for step, _, _ in fit.record.steps] == [step // 2 for step, _, _ in steps]
        return
    assert elastic.clipped == plain.clipped
    assert fit.record.steps == steps
    assert [step for step, _ in fit.record.validations] == [step for step, _ in record.validations]
    assert fit.checkpoints == checkpoints
    assert fit.logged == logged


def test_a_data_module_and_a_shuffled_loader_train_each_sample_once_in_an_epoch(fit: Fit) -> None:
    seen: list[list[int]] = []

    class Indexed(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[2].tolist())
            return super().training_step(batch[:2], batch_idx)

    class Data(lightning_package.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.samples = TensorDataset(*data().tensors, torch.arange(SAMPLES))

        def train_dataloader(self) -> Any:
            return DataLoader(self.samples, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)

    trainer = lightning_package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        strategy=fit.strategy(**FIXED),
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Indexed(), datamodule=Data())
    epochs = [list(chain(*seen[:6])), list(chain(*seen[6:]))]
    assert [sorted(each) for each in epochs] == [list(range(SAMPLES))] * 2
    assert epochs[0] != epochs[1]


def test_training_may_end_by_samples_in_place_of_epochs(fit: Fit) -> None:
    fit(Steps(), fit.strategy(**FIXED, train_samples=SAMPLES + 1), max_epochs=7)
    elastic = fit.strategies[-1].elastic_trainer
    steps = SAMPLES // BATCH_SIZE + 1
    assert (elastic.steps, elastic.samples, elastic.finished) == (steps, steps * BATCH_SIZE, True)
    assert [step for step, _, _ in fit.record.steps][-1] == steps


def test_the_data_may_be_a_stream_which_is_begun_again(fit: Fit) -> None:
    options: dict[str, Any] = {
        "max_epochs": -1,
        "max_steps": 15,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
    }
    plain = fit(Steps(interval="epoch"), train=stream(), **options)
    record, logged = fit.record, fit.logged
    elastic = fit(Steps(interval="epoch"), fit.strategy(**FIXED), train=stream(), **options)
    require_equal(elastic, plain)
    assert fit.record.steps == record.steps
    assert [step for step, _ in fit.record.validations] == [step for step, _ in record.validations] != []
    assert fit.logged == logged


# -- accumulation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "by_epoch"), [(1.0, 1), (0.7, 1), (4, 1), (1.0, None)])
def test_accumulation_and_a_limit_mean_what_they_mean_in_plain_lightning(
    fit: Fit, limit: float, by_epoch: int | None
) -> None:
    class Estimates(Steps):
        def configure_optimizers(self) -> Any:
            self.estimated = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "limit_train_batches": limit,
        "val_check_interval": 4,
        "check_val_every_n_epoch": by_epoch,
    }
    plain = fit(Estimates(), **options)
    record, checkpoints, logged = fit.record, fit.checkpoints, fit.logged
    strategy = fit.strategy(max_batch_size=16, local_bsz_bounds=(16, 16))
    elastic = fit(Estimates(), strategy, **options)
    assert elastic.estimated == plain.estimated
    assert fit.strategies[-1].elastic_trainer.batch_size == 16
    for a, b in zip(weights(elastic), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    completed = {step: (idx, lr) for step, idx, lr in reversed(record.steps) if step}
    assert {step: (idx, lr) for step, idx, lr in fit.record.steps} == completed
    assert fit.record.epochs == record.epochs
    assert [step for step, _ in fit.record.validations] == [step for step, _ in record.validations]
    assert fit.checkpoints == checkpoints
    assert fit.logged == logged


@pytest.mark.parametrize("mode", ["automatic", "manual"])
def test_divided_steps_are_counted_as_whole_ones(fit: Fit, mode: str) -> None:
    """On one replica, some steps are divided to measure the gain. Hooks are called once for each step."""
    options: dict[str, Any] = {"max_epochs": 4, "gradient_clip_val": 0.1 if mode == "automatic" else None}
    plain = fit(Steps(mode), **options)
    record, checkpoints, logged = fit.record, fit.checkpoints, fit.logged
    elastic = fit(Steps(mode), fit.strategy(max_batch_size=48, local_bsz_bounds=(8, 8)), **options)
    for a, b in zip(weights(elastic), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert len(fit.record.steps) > len(record.steps) == 24, "no step was divided"
    assert [loss for _, loss in fit.record.validations] == pytest.approx(
        [loss for _, loss in record.validations], rel=1e-4
    )
    completed: dict[int, Any] = {step: (idx, lr) for step, idx, lr in reversed(fit.record.steps) if step}
    assert completed == {step: (idx, pytest.approx(lr)) for step, idx, lr in record.steps}
    assert fit.checkpoints == checkpoints
    assert fit.logged == logged
    if mode == "automatic":
        assert elastic.clipped == pytest.approx(plain.clipped, rel=1e-3)


def test_manual_optimization_makes_each_nth_step_also_with_larger_batches(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 32 samples is worth four at the initial batch size: counts pass over multiples."""
    monkeypatch.setenv("ADASCALE_ELASTIC_SINGLE_REPLICA", "1")
    made: dict[int, tuple[bool, bool]] = {}

    class Alternating(Steps):
        def on_train_start(self) -> None:
            planner = fit.strategies[-1].elastic_trainer._replica.planner
            planner.load_state_dict({"batch_size": 8, "plan": [1, 16, 2], "fitting": 16})

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            x, y = batch
            steps = fit.strategies[-1].elastic_trainer.steps
            made[steps] = self.global_step % 3 == 0, batch_idx % 3 == 0
            for optimizer in self.optimizers()[: 1 + made[steps][0]]:  # type: ignore[index]
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(self.forward(x), y))
                optimizer.step()

    bounds = {"max_batch_size": 32, "local_bsz_bounds": (4, 16)}
    fit(Alternating("several"), fit.strategy(**bounds, train_samples=320), max_epochs=12)
    assert fit.record.steps[-1][0] == 40 > len(made)
    assert made == {step: (step % 3 == 0,) * 2 for step in range(len(made))}


# -- the end and resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [FIXED, {"max_batch_size": 16, "local_bsz_bounds": (2, 4)}])
def test_an_evaluation_has_at_most_the_batches_of_its_limit(fit: Fit, bounds: dict[str, Any]) -> None:
    class Counting(Steps):
        seen = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.seen += len(batch[0])

    module = fit(Counting(), fit.strategy(**bounds), limit_val_batches=2, num_sanity_val_steps=0)
    assert module.seen == len(fit.record.validations) * 2 * VALIDATED

    before = module.seen
    fit.trainer.validate(module, loader(VALIDATED), verbose=False)
    assert module.seen - before == 2 * VALIDATED
    x, y = data()[: 2 * VALIDATED]
    expected = float(nn.functional.mse_loss(module(x), y))
    assert float(fit.trainer.callback_metrics["val_loss"]) == pytest.approx(expected)


def test_early_stopping_ends_training_for_good(fit: Fit) -> None:
    stops = callbacks.EarlyStopping("val_loss", stopping_threshold=1e9)
    fit(strategy=fit.strategy(**FIXED), callbacks=(stops,), max_epochs=50)
    assert fit.trainer.strategy.elastic_trainer.finished
    assert fit.record.steps[-1][0] == 3
    with pytest.raises(WorkerError, match="called twice"):
        fit.trainer.fit(Steps(), loader())


class Remembers(Steps):
    """A module whose own hooks save and restore what it counts, and what its data module counts."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.fails_at, self.temperature, self.last = fails_at, 1.0, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.fails_at:
            raise KeyboardInterrupt

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.temperature *= 0.9
        self.last = self.trainer.global_step
        self.trainer.datamodule.seen += len(batch[0])  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = [self.temperature, self.last]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.temperature, self.last = checkpoint["counted"]
        assert type(self.last) is int
        assert checkpoint["global_step"] == self.last
        assert torch.equal(checkpoint["current_model_state"]["head.bias"], self.head.bias)


class CountingData(lightning_package.LightningDataModule):
    seen = 0

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(VALIDATED)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_resumed_fit_continues_with_counters_and_states_of_hooks(fit: Fit, tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        stops = callbacks.EarlyStopping("val_loss", patience=100, min_delta=1e9)
        # Keeps a step in its state, and an average of the weights, in a hook.
        return stops, callbacks.EMAWeightAveraging(decay=0.9, update_every_n_steps=2)

    options = {**FIXED, "checkpoint_dir": tmp_path / "job", "checkpoint_interval": 0}
    whole = fit(Remembers(), fit.strategy(**FIXED), train=CountingData(), callbacks=made())
    validations = fit.record.validations

    with pytest.raises(BaseException, match=""):  # noqa: PT011
        fit(Remembers(10), fit.strategy(**options), train=CountingData(), callbacks=made())
    fit.strategies[-1].elastic_trainer.close()
    first = fit.record.validations
    stops, average = made()
    resumed = fit(Remembers(), fit.strategy(**options), train=CountingData(), callbacks=(stops, average))
    assert fit.record.steps[0][0] > 1
    require_equal(resumed, whole)  # the averages, at the end
    assert (resumed.temperature, resumed.last) == (whole.temperature, whole.last)
    assert fit.trainer.datamodule.seen == 3 * SAMPLES
    assert fit.record.validations[-1] == validations[-1]
    assert stops.wait_count == len(validations) - 1
    assert len(first) < len(validations)


# -- refusals -----------------------------------------------------------------------------------------------


class ReadsAhead(Steps):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError


class Twice(Steps):
    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        return optimizers, [schedulers[0], {**schedulers[0], "scheduler": _step_lr(optimizers[0])}]


class EveryOther(Steps):
    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        return optimizers, [{**schedulers[0], "frequency": 2}]


class Nothing(Steps):
    def configure_optimizers(self) -> Any:
        return None


def _step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"train": lambda: stream(), "limit_train_batches": 3}, DatasetError, "pass max_steps"),
        ({"train": lambda: stream()}, WorkerError, "pass max_steps to the Trainer, without max_epochs"),
        ({"limit_train_batches": 0.1}, DatasetError, "has no batches"),
        (
            {"train": lambda: stream(), "max_epochs": -1, "max_steps": 9, "val_check_interval": 1.0},
            WorkerError,
            "pass val_check_interval=n",
        ),
        ({"overfit_batches": 2}, WorkerError, "Subset"),
        ({"reload_dataloaders_every_n_epochs": 1}, WorkerError, "leave it out"),
        ({"sync_batchnorm": True}, WorkerError, "convert_sync_batchnorm"),
        ({"devices": 2}, WorkerError, "Leave devices out"),
        ({"num_nodes": 2}, WorkerError, "Leave num_nodes out"),
        ({"ckpt_path": "some.ckpt"}, WorkerError, "resumes by itself"),
        ({"module": lambda: ReadsAhead()}, WorkerError, "take batch and batch_idx"),
        ({"module": lambda: Twice()}, WorkerError, "SequentialLR"),
        ({"module": lambda: EveryOther()}, WorkerError, "frequency=1"),
        ({"module": lambda: Nothing()}, WorkerError, "returned no optimizer"),
        ({"module": lambda: Steps("several"), "max_steps": 9}, WorkerError, "pass max_epochs"),
        ({"callbacks": (callbacks.StochasticWeightAveraging(0.1),)}, WorkerError, "WeightAveraging"),
        ({"callbacks": (callbacks.GradientAccumulationScheduler({0: 2}),)}, WorkerError, "accumulates"),
        ({"train": lambda: loader(sampler=_some())}, DatasetError, "ElasticStrategy(order=...)"),
        ({"train": lambda: [loader(), loader()]}, DatasetError, "2 train dataloaders"),
        ({"train": lambda: [1, 2, 3]}, DatasetError, "torch.utils.data.DataLoader"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_way(
    fit: Fit, options: dict[str, Any], error: type[AdaScaleError], says: str
) -> None:
    options = {name: value() if isinstance(value, type(_some)) else value for name, value in options.items()}
    with pytest.raises(error) as raised:
        fit(strategy=fit.strategy(**FIXED), **options)
    assert says in str(raised.value)


def _some() -> SubsetRandomSampler:
    return SubsetRandomSampler(range(8))


def test_what_a_hook_adds_and_cannot_be_saved_is_refused() -> None:
    class Adds(Steps):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["made"] = [SimpleNamespace()]

    module = Adds()
    parts: dict[str, Any] = {"loggers": [], "callbacks": [], "datamodule": None, "lightning_module": module}
    states = LightningStates(SimpleNamespace(**parts, current_epoch=0, global_step=1))
    assert states.state_dict()["checkpoint"] == {"callbacks": {}}, "before training, no hook is called"
    states.begin()
    with pytest.raises(WorkerError, match=r"\['made'\]\[0\] is of type types.SimpleNamespace.* Leave out"):
        states.state_dict()


def test_the_program_says_which_package_it_uses_if_it_imports_both() -> None:
    with pytest.raises(WorkerError, match="imported both"):
        ElasticStrategy()
    with pytest.raises(WorkerError, match="must be"):
        ElasticStrategy(package="lightning")  # type: ignore[arg-type]


# -- files of loggers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("version", [None, 0])
def test_the_next_rank_0_continues_the_file_of_a_csv_logger(
    tmp_path: Path, package: str, version: int | None
) -> None:
    """Processes that start together may have chosen the same version. The first one is killed in a write."""
    loggers = import_module(f"{package}.loggers")
    first, second = (loggers.CSVLogger(str(tmp_path), version=each) for each in (None, version))
    _ = first.experiment, second.experiment
    for step, metrics in enumerate([{"loss": 3.0}, {"loss": 2.0, "test": 1.0}]):
        first.log_metrics(metrics, step)
        first.save()
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    with path.open("a", newline="") as file:
        file.write("1.0,2")
    states = [
        LightningStates(SimpleNamespace(loggers=[each], callbacks=[], datamodule=None))
        for each in (first, second)
    ]
    states[1].load_state_dict(states[0].state_dict())
    states[1].begin_writing()
    for step, metrics in enumerate([{"test": 0.5}, {"lr": 0.1}], 2):
        second.log_metrics(metrics, step)
        second.save()
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == [
        {"step": 0, "loss": 3.0},
        {"step": 1, "loss": 2.0, "test": 1.0},
        {"step": 2, "test": 0.5},
        {"step": 3, "lr": 0.1},
    ]


# -- imports ----------------------------------------------------------------------------------------------


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
    with pytest.raises(MissingExtraError, match=r"pip install 'adascale-operator\[lightning\]'"):
        ElasticStrategy()


def test_the_module_that_is_made_data_parallel_has_the_buffers_of_the_program() -> None:
    """Those of rank 0 are sent in each step, and put back after a step that is discarded."""
    from adascale_frameworks.lightning.strategy import TrainingStep
    from adascale_worker.torch_private.modules import buffers_of

    module: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module.training_step = module.forward
    found = list(buffers_of(TrainingStep(module)))
    assert [name for _, name, _ in found] == ["running_mean", "running_var", "num_batches_tracked"]
    assert all(owner is module[1] and owner.get_buffer(name) is each for owner, name, each in found)
