"""Prepares the gradients around the backward passes of the program, and handles their errors.

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

from adascale_worker.gradients.accumulation import Accumulation
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.membership.links import PeersLostError
from adascale_worker.torch_private.optim import let_clipping_find_no_gradients


class BackwardGuard:
    """Replaces `torch.autograd.backward`, which `Tensor.backward` calls.

    Hooks cannot do this. Autograd calls them inside a pass. An error of a node, of DDP's communication or of
    an allocation leaves the engine after the last hook, and `backward()` raises it in the program's loop.
    Only what calls the engine can catch it, and can leave a pass out. The tensor whose `backward()` the
    program calls is its own loss, so no method of one object is enough. A subclass of Tensor or a
    `TorchFunctionMode` would see that call, but also every other call of a function of torch, each of which
    it makes slower. A communication hook or a process group in Python could handle errors of the
    communication, but not a lack of memory, and costs time for each bucket of gradients.

    This adds nothing to a pass that succeeds. `uninstall` undoes it.
    """

    def __init__(self, failure: StepFailure, gradients: Accumulation) -> None:
        self._failure = failure
        self._gradients = gradients
        self._is_inside = False
        self._original: Callable[..., None] | None = None
        self._replacement: Callable[..., None] | None = None
        self._undo: Callable[[], None] | None = None

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
        if self._undo is not None and torch.autograd.backward is self._replacement:
            assert self._original is not None
            torch.autograd.backward, self._original = self._original, None
            self._undo()

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self._failure.lacks_memory:
            return
        if self._is_inside:
            self._run(*args, **kwargs)
            return
        self._gradients.before_backward()
        self._is_inside = True
        try:
            self._run(*args, **kwargs)
        finally:
            self._is_inside = False
        with self._handled():
            self._gradients.after_backward()

    def _run(self, *args: Any, **kwargs: Any) -> None:
        assert self._original is not None
        with self._handled():
            self._original(*args, **kwargs)

    @contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError, PeersLostError) as error:
            if not self._failure.handles(error):
                raise
