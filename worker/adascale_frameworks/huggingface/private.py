"""What the adapter changes in `accelerate`, and in the arguments of a `Trainer`."""

from __future__ import annotations

from accelerate.state import AcceleratorState


def forget_launcher_state() -> None:
    """Let accelerate find out again, in its next object, in how many processes the program runs."""
    AcceleratorState._reset_state(reset_partial_state=True)


def use_one_gpu(args: object) -> None:
    """Let a `Trainer` use one of the GPUs that this process sees, as it does for a model on several."""
    args._n_gpu = min(1, args.n_gpu)  # type: ignore[attr-defined]
