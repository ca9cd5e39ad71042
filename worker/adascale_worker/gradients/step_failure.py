"""Whether the present step is discarded, so that its samples are delivered again.

The models, the backward passes and the optimizers report errors here. The program cannot do anything about a
lost peer or a batch that does not fit into memory, so it goes on up to `optimizer.step()`, which changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from adascale_worker.membership.process_group import ReplicaGroup


class StepFailure:
    """The failure of the present step, until the trainer begins the step again."""

    def __init__(
        self,
        group: ReplicaGroup,
        repeats_in_smaller_batches: Callable[[BaseException], bool] = lambda _: False,
        on_discard: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self._repeats_in_smaller_batches = repeats_in_smaller_batches
        self._on_discard = on_discard
        self._is_discarded = False
        self.lacks_memory = False

    @property
    def is_discarded(self) -> bool:
        """Whether this step is discarded: its gradients are not averaged, or its batch does not fit."""
        return self._is_discarded

    def discard(self) -> None:
        """Discard this step."""
        if not self._is_discarded:
            self._is_discarded = True
            self._on_discard()

    def clear(self) -> None:
        """Begin with a step that has not failed."""
        self._is_discarded = self.lacks_memory = False

    def peers_lost(self, error: BaseException) -> bool:
        """Discard this step if `error` means that peers are lost, and return whether it does."""
        is_lost = self._group.is_failure(error)
        if is_lost:
            self.discard()
        return is_lost

    def shortage(self, error: BaseException) -> bool:
        """Discard this step if `error` means that its batch does not fit, and return whether it does."""
        if not self._repeats_in_smaller_batches(error):
            return False
        self.lacks_memory = True
        self.discard()
        return True

    def handles(self, error: BaseException) -> bool:
        """Discard this step if `error` has one of the two causes, and return whether it has."""
        return self.peers_lost(error) or self.shortage(error)
