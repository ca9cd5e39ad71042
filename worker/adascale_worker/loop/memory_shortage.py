"""Finds the local batch size with which training continues after a batch that does not fit into memory."""

from __future__ import annotations

import sys

import torch

from adascale_core.messages.channel import Limited
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.gradients.out_of_memory import is_out_of_memory, kind_of
from adascale_worker.membership.agent_channel import AgentChannel
from adascale_worker.membership.process_group import ReplicaGroup

MAX_REASON = 200
"""Characters of torch's own message about a lack of memory that are printed."""


class MemoryShortage:
    """Recognizes that a batch does not fit, and limits the batches that follow."""

    def __init__(
        self, planner: BatchPlanner, group: ReplicaGroup, device: torch.device, channel: AgentChannel | None
    ) -> None:
        self._planner = planner
        self._group = group
        self._device = device
        self._channel = channel
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
        if self._channel is None and self._group.replicas > 1:
            return False
        limit = self.limit_after(error)
        if limit is None:
            return False
        if self._channel is None:
            self._limit = limit
        else:
            self._group.fail()
        return True

    def limit_after(self, error: BaseException) -> int | None:
        """Report and return the limit after an error; None if it has another cause, or none is left."""
        if not is_out_of_memory(error):
            return None
        planner, device = self._planner, kind_of(self._device)
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
        if self._channel is not None:
            self._channel.send(Limited(limit))
        return limit
