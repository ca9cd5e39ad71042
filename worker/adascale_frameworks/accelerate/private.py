"""All that is used of Accelerate and not documented by it.

`Accelerator` keeps what it has prepared in lists, from which it saves, and unscales gradients. The prepared
objects of an elastic job are those of the program, which no public method adds to them.
"""

from __future__ import annotations

from typing import Any

import accelerate

from adascale_worker.errors import WorkerError

TESTED_VERSIONS = ("1.10.0", "1.15.0")

_LISTS = ("_models", "_optimizers", "_schedulers", "_custom_objects")


def require_parts(accelerator: accelerate.Accelerator) -> None:
    """Check that the installed version has the private parts."""
    for name in _LISTS:
        if not isinstance(getattr(accelerator, name, None), list):
            raise WorkerError(
                f"accelerate {accelerate.__version__} has no list `Accelerator.{name}`, which AdaScale needs "
                f"to save what was prepared; install a version that AdaScale is tested with: "
                f"{', '.join(TESTED_VERSIONS)}"
            )


def add_optimizer(accelerator: Any, optimizer: Any) -> None:
    """Let `save_state` and `unscale_gradients` find an optimizer."""
    accelerator._optimizers.append(optimizer)


def add_scheduler(accelerator: Any, scheduler: Any) -> None:
    """Let `save_state` find a scheduler."""
    accelerator._schedulers.append(scheduler)


def checkpointed_objects(accelerator: Any) -> list[Any]:
    """Return the objects that were passed to `register_for_checkpointing`."""
    objects: list[Any] = accelerator._custom_objects
    return objects
