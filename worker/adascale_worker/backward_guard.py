"""Keeps a failed exchange of gradients from raising an error in the program's loop.

`loss.backward()` averages the gradients, so an error of a lost peer is raised there. The program cannot do
anything about it: the trainer discards the step, forms the group again, and delivers the same samples again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class BackwardGuard:
    """Replaces `torch.autograd.backward`, which `Tensor.backward` calls.

    It adds nothing to a backward pass that succeeds. A communication hook or a process group in Python, which
    could handle the error too, costs time for each bucket of gradients.

    Args:
        handles: returns whether an error is handled, so that it is not raised.
    """

    def __init__(self, handles: Callable[[BaseException], bool]) -> None:
        self._handles = handles
        self._original: Callable[..., None] | None = None

    def install(self) -> None:
        """Replace `torch.autograd.backward`."""
        if self._original is None:
            self._original = torch.autograd.backward
            torch.autograd.backward = self._backward

    def uninstall(self) -> None:
        """Restore it, unless it was replaced again since."""
        if self._original is not None and torch.autograd.backward == self._backward:
            torch.autograd.backward, self._original = self._original, None

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        assert self._original is not None
        try:
            self._original(*args, **kwargs)
        except RuntimeError as error:
            if not self._handles(error):
                raise
