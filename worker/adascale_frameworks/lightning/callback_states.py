"""The states of Lightning's callbacks and loggers, which a replica that joins has to continue with."""

from __future__ import annotations

from typing import Any

_VERSION = "_version"
"""Where Lightning's loggers for files keep the number of their run."""


class CallbackStates:
    """The states of the callbacks of a Trainer, and the runs of its loggers, as one registered object.

    Args:
        trainer: Lightning's.
    """

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
        for callback in self._trainer.callbacks:
            saved = state["callbacks"].get(callback.state_key)
            if saved is None:
                continue
            if "dirpath" in saved:
                # Lightning makes the folder of a ModelCheckpoint from the number of its own run.
                callback.dirpath = saved["dirpath"]
            callback.load_state_dict(saved)
