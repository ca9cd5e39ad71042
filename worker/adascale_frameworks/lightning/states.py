"""What Lightning and the program keep in checkpoints of Lightning, as a part of the state of the job."""

from __future__ import annotations

import csv
import posixpath
from io import StringIO
from typing import Any

from adascale_frameworks.lightning.loops import plain
from adascale_worker.errors import UnsupportedStateError, WorkerError
from adascale_worker.state.tree import flatten

_VERSION = "_version"
"""Where Lightning's loggers for files keep the number of their run."""
_WRITER = "_experiment"
"""Where they keep what writes. Every process makes one before it knows its rank, in a folder of its own."""


class LightningStates:
    """The states of callbacks and of the data module, what hooks add to a checkpoint, and runs of loggers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_begun = False
        self._is_checked = False
        self._restored: dict[str, Any] = {}
        self.epoch_begin = 0.0
        """Progress at the begin of the present epoch."""

    def begin(self) -> None:
        """Call hooks from now on. Before the first batch, what they save may not have been made."""
        self._has_begun, self._restored = True, {}

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint of Lightning, without what the trainer saves itself."""
        trainer = self._trainer
        callbacks = {each.state_key: each.state_dict() for each in trainer.callbacks}
        checkpoint = {
            **self._restored,
            "callbacks": {key: state for key, state in callbacks.items() if state},
        }
        if trainer.datamodule is not None:
            checkpoint[type(trainer.datamodule).__qualname__] = trainer.datamodule.state_dict()
        checkpoint = plain(self._with_hooks(checkpoint) if self._has_begun else checkpoint)
        if self._has_begun and not self._is_checked:
            self._is_checked = True
            _require_supported(checkpoint)
        return {
            "checkpoint": checkpoint,
            "epoch_begin": self.epoch_begin,
            "versions": [each.version if hasattr(each, _VERSION) else None for each in trainer.loggers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states. A callback that had none is left as it is."""
        trainer, checkpoint = self._trainer, dict(state["checkpoint"])
        self.epoch_begin = state.get("epoch_begin", 0.0)
        for logger, version in zip(trainer.loggers, state["versions"], strict=False):
            if version is not None and hasattr(logger, _VERSION):
                setattr(logger, _VERSION, version)
                _move_writer(logger)
        if not self._has_begun:
            self._restored = dict(checkpoint)
        # In the order of Lightning.
        if trainer.datamodule is not None:
            data = checkpoint.get(type(trainer.datamodule).__qualname__)
            if data:
                trainer.datamodule.load_state_dict(data)
        if "global_step" in checkpoint:
            unsaved = self._unsaved()
            weights = {**unsaved["state_dict"], **checkpoint["state_dict"]}
            checkpoint = {**unsaved, **checkpoint, "state_dict": weights}
            trainer.lightning_module.on_load_checkpoint(checkpoint)
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        for callback in trainer.callbacks:
            saved = checkpoint["callbacks"].get(callback.state_key)
            if saved is None:
                continue
            if "dirpath" in saved:
                # Lightning makes the folder of a ModelCheckpoint from the number of its own run.
                callback.dirpath = saved["dirpath"]
            callback.load_state_dict(saved)

    def _with_hooks(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with what the hooks of the program add to it, or change in it."""
        trainer, unsaved = self._trainer, self._unsaved()
        weights = unsaved["state_dict"]
        counts = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
        checkpoint = {**unsaved, **counts, **checkpoint, "state_dict": dict(weights)}
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
        saved = checkpoint.pop("state_dict", {})
        changed = {name: value for name, value in saved.items() if value is not weights.get(name)}
        added = {key: value for key, value in checkpoint.items() if value is not unsaved.get(key)}
        return {**added, "state_dict": changed}

    def _unsaved(self) -> dict[str, Any]:
        """Return the rest of what hooks may expect in a checkpoint, which the trainer saves itself."""
        module = self._trainer.lightning_module
        return {
            "state_dict": module.state_dict(),
            "loops": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            "hyper_parameters": dict(module.hparams),
        }

    def begin_writing(self) -> None:
        """Continue the files of the rank 0 before this one."""
        for logger in self._trainer.loggers:
            writer = getattr(logger, _WRITER, None)
            if _is_of_csv(writer):
                _continue_csv(writer)


def _require_supported(checkpoint: dict[str, Any]) -> None:
    try:
        flatten(checkpoint)
    except UnsupportedStateError as error:
        raise WorkerError(
            "the checkpoint of Lightning has a value that on_save_checkpoint, or state_dict of the data "
            f"module, has added: {error.path} {error.problem}. Leave out what does not change in training, "
            "because each replica makes it itself"
        ) from error


def _is_of_csv(writer: Any) -> bool:
    return hasattr(writer, "metrics_file_path")


def _move_writer(logger: Any) -> None:
    """Let a logger write into the folder of its run."""
    writer: Any = getattr(logger, _WRITER, None)
    if _is_of_csv(writer):
        # A new one would delete the file.
        writer.log_dir = logger.log_dir
        writer.metrics_file_path = posixpath.join(logger.log_dir, writer.NAME_METRICS_FILE)
    elif hasattr(logger, _WRITER):
        setattr(logger, _WRITER, None)


def _continue_csv(writer: Any) -> None:
    """Let the writer of a CSVLogger append to a file that another process has begun, with its columns."""
    files, path = writer._fs, writer.metrics_file_path
    if not files.isfile(path):
        return
    with files.open(path, "r", newline="") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # the other process was killed while it wrote
        with files.open(path, "w", newline="") as file:
            file.write(whole)
    writer.metrics_keys = next(csv.reader(StringIO(whole)), [])
