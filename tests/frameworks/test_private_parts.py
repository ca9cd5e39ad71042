"""What the adapters use of their frameworks, and the frameworks do not document: a test fails if it moves."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from adascale_frameworks.lightning.loops import ElasticTrainingLoop, make_elastic
from adascale_frameworks.lightning.strategy import PACKAGES
from adascale_worker.errors import WorkerError

# -- Lightning ----------------------------------------------------------------------------------------------

LIGHTNING_PARTS: dict[str, tuple[str, ...]] = {
    "loops.training_epoch_loop._TrainingEpochLoop": (
        "_num_ready_batches_reached",
        "_should_accumulate",
        "_should_check_val_fx",
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
    "strategies.Strategy": (
        *("handles_gradient_accumulation", "process_dataloader", "optimizers", "setup"),
        *("reduce_boolean_decision", "lightning_module_state_dict", "optimizer_state"),
    ),
    "strategies.FSDPStrategy": ("mixed_precision_config", "precision_plugin"),
    "core.optimizer.LightningOptimizer": ("_to_lightning_optimizer", "step"),
}
"""By class, what it has to have."""

LIGHTNING_SOURCES: dict[str, tuple[str, ...]] = {
    "loops.training_epoch_loop._TrainingEpochLoop": (
        "self._batches_that_stepped",
        "self.batch_progress.is_last_batch",
        "batch_idx = self.batch_idx + 1",
        "self.manual_optimization",
    ),
    "loops.fetchers._DataFetcher": ("self.length is not None", "self.done"),
    "loggers.csv_logs._FabricExperimentWriter": (
        "self._fs",
        "self.log_dir",
        "self.metrics_file_path",
        "self.metrics_keys",
    ),
    "trainer.connectors.logger_connector.result._ResultMetric": ("cumulated_batch_size", "self.value"),
    "strategies.FSDPStrategy": (
        *("self.kwargs", "self.cpu_offload", "self.sharding_strategy"),
        "self._activation_checkpointing_kwargs",
    ),
}
"""By class, what its source has to have: attributes that are set in methods."""


def class_of(package: str, path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(import_module(f"{package}.{module}"), name)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_has_the_parts_that_its_adapter_uses(package: str) -> None:
    pytest.importorskip(package)
    for path, names in LIGHTNING_PARTS.items():
        assert [name for name in names if not hasattr(class_of(package, path), name)] == []
    for path, texts in LIGHTNING_SOURCES.items():
        source = inspect.getsource(class_of(package, path))
        assert [text for text in texts if text not in source] == []


def test_a_method_that_lightning_has_no_longer_is_named() -> None:
    class Loop:
        run = done = None

    with pytest.raises(WorkerError, match=r"no Loop\.global_step, .* tested with, 2\.6"):
        make_elastic(Loop(), ElasticTrainingLoop, object())


# -- Accelerate and Hugging Face ----------------------------------------------------------------------------

TRAINER_METHODS = (
    "_evaluate",
    "_load_best_model",
    "_maybe_log_save_evaluate",
    "_save",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
)

HANDLER_EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_epoch_end",
    "on_train_end",
)


def test_transformers_has_the_parts_that_its_adapter_uses() -> None:
    trainer = pytest.importorskip("transformers").Trainer
    handler = import_module("transformers.trainer_callback").CallbackHandler
    assert [name for name in TRAINER_METHODS if not hasattr(trainer, name)] == []
    assert [name for name in HANDLER_EVENTS if not hasattr(handler, name)] == []
    arguments = import_module("transformers").TrainingArguments
    assert hasattr(arguments, "_setup_devices")
    assert "self.fsdp_plugin_args = " in inspect.getsource(arguments)


def test_accelerate_has_the_parts_that_its_adapters_use() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    lists = ("_models", "_optimizers", "_schedulers", "_custom_objects")
    assert [name for name in lists if not isinstance(getattr(accelerator, name, None), list)] == []
    assert isinstance(accelerator.native_amp, bool)
    assert hasattr(accelerate.FullyShardedDataParallelPlugin, "set_auto_wrap_policy")
    assert "self.deepspeed_config" in inspect.getsource(accelerate.DeepSpeedPlugin)
    state = import_module("accelerate.state").AcceleratorState
    assert hasattr(state, "_reset_state")
    state._reset_state(reset_partial_state=True)
