"""Which package of Lightning the program uses, and all that is used of it and not documented by it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

from adascale_core.errors import requires_extra
from adascale_worker.errors import WorkerError

PRIVATE_PARTS: dict[str, tuple[str, ...]] = {
    "loops.training_epoch_loop._TrainingEpochLoop": (
        "_num_ready_batches_reached",
        "_should_accumulate",
        "_should_check_val_fx",
        "_broadcast_sigterm_tensor",
        "_is_training_done",
        "done",
        "global_step",
        "on_run_start",
        "on_save_checkpoint",
        "run",
    ),
    "loops.fit_loop._FitLoop": ("_can_stop_early", "setup_data", "max_steps"),
    "loops.evaluation_loop._EvaluationLoop": ("reset",),
    "loops.fetchers._DataFetcher": ("reset", "__iter__"),
    "loops.progress._BatchProgress": ("increment_ready", "is_last_batch"),
    "trainer.connectors.logger_connector.result._Metadata": ("is_mean_reduction", "is_sum_reduction"),
    "trainer.connectors.logger_connector.result._ResultMetric": ("update", "compute"),
    "loggers.csv_logs.CSVLogger": ("log_dir", "version"),
    "loggers.csv_logs.ExperimentWriter": ("NAME_METRICS_FILE", "save"),
    "strategies.Strategy": ("handles_gradient_accumulation", "process_dataloader", "optimizers", "setup"),
    "core.optimizer.LightningOptimizer": ("_to_lightning_optimizer", "step"),
}
"""By class, what it has to have."""


def require_private_parts(package: str) -> None:
    """Check that the installed Lightning has what this adapter uses."""
    missing = missing_parts(package)
    if missing:
        version = getattr(import_module(package), "__version__", "unknown")
        raise WorkerError(
            f"{package} {version} has no {missing[0]}, which adascale.lightning uses: install a version of "
            "lightning that it was tested with, 2.6"
        )


def missing_parts(package: str) -> list[str]:
    """Return the names of private parts that the installed Lightning does not have."""
    missing = []
    for path, names in PRIVATE_PARTS.items():
        owner = find(package, path)
        missing += [f"{path}.{name}" for name in names if not hasattr(owner, name)]
    return missing


def find(package: str, path: str) -> object | None:
    """Return a class of the installed Lightning; None if it has no such class."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(f"{package}.{module}"), name, None)
    except ImportError:
        return None


Package = Literal["lightning.pytorch", "pytorch_lightning"]

PACKAGES: tuple[Package, ...] = ("lightning.pytorch", "pytorch_lightning")


def import_package(name: Package | None) -> ModuleType:
    """Import the package whose `Trainer` the program uses."""
    if name is not None and name not in PACKAGES:
        raise WorkerError(
            f'ElasticStrategy got package={name!r}: it must be "lightning.pytorch" or "pytorch_lightning"'
        )
    if name is None:
        name = _imported()
    with requires_extra("adascale.lightning", "lightning"):
        return import_module(name)


def _imported() -> Package:
    imported = [each for each in PACKAGES if each in sys.modules]
    if len(imported) > 1:
        raise WorkerError(
            "the program has imported both lightning.pytorch and pytorch_lightning, whose classes are "
            'distinct: pass ElasticStrategy(package="lightning.pytorch"), or package="pytorch_lightning", '
            "the one that its Trainer is imported from"
        )
    if imported:
        return imported[0]
    return next((each for each in PACKAGES if find_spec(each.partition(".")[0]) is not None), PACKAGES[0])
