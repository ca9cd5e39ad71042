"""Finds the local batch size with which training continues after a batch that does not fit into memory."""

from __future__ import annotations

import sys

from adascale_worker.gradients.data_parallel import DataParallelModel
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.out_of_memory import is_out_of_memory, kind_of
from adascale_worker.membership.generations import Membership
from adascale_worker.state.components import TrainerComponents

MAX_REASON = 200
"""Characters of torch's own message about a lack of memory that are printed."""


class MemoryShortage:
    """Recognizes that a batch does not fit, and limits those that follow.

    Args:
        trainer: the parts of the trainer.
        model: the data-parallel model.
        membership: reports the limit. None without an agent.
    """

    def __init__(
        self,
        trainer: TrainerComponents,
        model: DataParallelModel | ModelSet,
        membership: Membership | None,
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._membership = membership
        self._limit: int | None = None

    @property
    def awaits_retry(self) -> bool:
        """Whether the samples of a discarded step follow in smaller batches, without another generation."""
        return self._limit is not None

    def take_limit(self) -> int | None:
        """Return the limit of the local batch size for these samples, once."""
        limit, self._limit = self._limit, None
        return limit

    def handle(self, error: BaseException) -> bool:
        """Whether `error` means that a batch does not fit, and its samples can follow in smaller batches."""
        if self._membership is None and self._trainer.group.replicas > 1:
            return False
        limit = self.limit_after(error)
        if limit is None:
            return False
        self._model.has_missed_exchange = self._model.lacks_memory = True
        if self._membership is None:
            self._limit = limit
        else:
            self._trainer.group.fail()
        return True

    def limit_after(self, error: BaseException) -> int | None:
        """Report and return the limit after an error; None if it has another cause, or none is left."""
        if not is_out_of_memory(error):
            return None
        planner, device = self._trainer.planner, kind_of(self._model.device)
        size, limit = planner.plan.local_bsz, planner.smaller_local_bsz()
        found = f"a local batch of {size} samples does not fit into the memory of {device}"
        if limit is None:
            print(
                f"adascale: {found}, and the bounds allow no smaller one: lower the lower bound of "
                "local_bsz_bounds, or use devices with more memory",
                file=sys.stderr,
            )
            return None
        reason = str(error).partition("\n")[0][:MAX_REASON]
        print(f"adascale: {found}: training continues with at most {limit}. {reason}", file=sys.stderr)
        if self._membership is not None:
            self._membership.report_limit(limit)
        return limit
