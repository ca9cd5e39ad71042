"""The states of Lightning's callbacks and loggers, which a replica that joins has to continue with."""

from __future__ import annotations

import csv
import posixpath
from io import StringIO
from typing import Any

_VERSION = "_version"
"""Where Lightning's loggers for files keep the number of their run."""
_WRITER = "_experiment"
"""Where they keep what writes. Every process makes one before it knows its rank, in a folder of its own."""


class CallbackStates:
    """The states of the callbacks of a Trainer, and the runs of its loggers, as one registered object."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the keys of the callbacks."""
        callbacks = {each.state_key: each.state_dict() for each in self._trainer.callbacks}
        return {
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "versions": [each.version if hasattr(each, _VERSION) else None for each in self._trainer.loggers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states. A callback that had none is left as it is."""
        for logger, version in zip(self._trainer.loggers, state["versions"], strict=False):
            if version is not None and hasattr(logger, _VERSION):
                setattr(logger, _VERSION, version)
                _move_writer(logger)
        for callback in self._trainer.callbacks:
            saved = state["callbacks"].get(callback.state_key)
            if saved is None:
                continue
            if "dirpath" in saved:
                # Lightning makes the folder of a ModelCheckpoint from the number of its own run.
                callback.dirpath = saved["dirpath"]
            callback.load_state_dict(saved)

    def begin_writing(self) -> None:
        """Continue the files of the rank 0 before this one."""
        for logger in self._trainer.loggers:
            writer = getattr(logger, _WRITER, None)
            if _is_of_csv(writer):
                _continue_csv(writer)


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
