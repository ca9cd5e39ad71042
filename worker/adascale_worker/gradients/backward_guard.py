"""What the trainer does around the backward passes of the program.

`loss.backward()` averages the gradients, so an error of a lost peer is raised there. So is that of a batch
which does not fit into memory. The program cannot do anything about them: the trainer discards the step, and
delivers the same samples again.
Before and after a pass, the trainer prepares the gradients of a step that has several micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from adascale_worker.membership.links import PeersLostError
from adascale_worker.torch_private.optim import let_clipping_find_no_gradients


class BackwardGuard:
    """Replaces `torch.autograd.backward`, which `Tensor.backward` calls.

    It adds nothing to a backward pass that succeeds. A communication hook or a process group in Python, which
    could handle the error too, costs time for each bucket of gradients.

    Args:
        handles: returns whether an error is handled, so that it is not raised.
        before: called before each backward pass, and not for the passes of re-entrant checkpoints inside it.
        after: called after each of these passes, unless it has raised an error.
        skips: returns whether a backward pass is not made, because its step is discarded.
    """

    def __init__(
        self,
        handles: Callable[[BaseException], bool],
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        skips: Callable[[], bool] = lambda: False,
    ) -> None:
        self._handles = handles
        self._before = before
        self._after = after
        self._skips = skips
        self._is_inside = False
        self._original: Callable[..., None] | None = None
        self._replacement: Callable[..., None] | None = None
        self._undo: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Replace `torch.autograd.backward`, and let clipping find no gradients."""
        if self._original is None:
            self._original = torch.autograd.backward

            @functools.wraps(self._original)
            def backward(*args: Any, **kwargs: Any) -> None:
                self._backward(*args, **kwargs)

            torch.autograd.backward = self._replacement = backward
            self._undo = let_clipping_find_no_gradients()

    def uninstall(self) -> None:
        """Restore it, unless it was replaced again since."""
        if self._original is not None and torch.autograd.backward is self._replacement:
            torch.autograd.backward, self._original = self._original, None
            self._undo()

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self._skips():
            return
        if self._is_inside:
            self._run(*args, **kwargs)
            return
        self._before()
        self._is_inside = True
        try:
            self._run(*args, **kwargs)
        finally:
            self._is_inside = False
        with self._handled():
            self._after()

    def _run(self, *args: Any, **kwargs: Any) -> None:
        assert self._original is not None
        with self._handled():
            self._original(*args, **kwargs)

    @contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError, PeersLostError) as error:
            if not self._handles(error):
                raise
