"""All that is used of `transformers` and `accelerate` and not documented by them.

A test fails if one of these parts is moved, or is no longer called by the loop of `transformers`.
"""

from __future__ import annotations

from accelerate import PartialState
from accelerate.state import AcceleratorState
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

TRAINER_METHODS = (
    "_evaluate",
    "_load_best_model",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_save_rng_state",
)
"""Methods of `Trainer` that the adapter replaces, and calls. `_evaluate` is not replaced, but its calls are
expected."""

TRAINER_ATTRIBUTES = ("_globalstep_last_logged", "current_flos")
"""Attributes that the training loop of `Trainer` sets, and the adapter restores."""

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
"""Methods of `CallbackHandler` that the loop calls, and the adapter replaces."""


def missing() -> list[str]:
    """Return the names of the parts that the installed versions do not have."""
    wanted = [
        *((Trainer, name) for name in TRAINER_METHODS),
        *((CallbackHandler, name) for name in HANDLER_EVENTS),
        (PartialState, "_reset_state"),
        (AcceleratorState, "_reset_state"),
    ]
    return [f"{owner.__name__}.{name}" for owner, name in wanted if not hasattr(owner, name)]


def forget_launcher_state() -> None:
    """Let accelerate find out again, in its next object, in how many processes the program runs."""
    AcceleratorState._reset_state(reset_partial_state=True)


def use_one_gpu(args: object) -> None:
    """Let a `Trainer` use one of the GPUs that this process sees, as it does for a model on several."""
    args._n_gpu = min(1, args.n_gpu)  # type: ignore[attr-defined]
