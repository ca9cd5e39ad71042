"""Ranks that run out of data before others: `torch.distributed.algorithms.join`."""

from collections.abc import Callable

from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.torch_private.distributed import is_in_join


def joins_without(ddp: DistributedDataParallel | None, joinable: Joinable | None) -> bool:
    """Whether `ddp` takes uneven inputs now and `joinable` does not.

    Then peers may be without data, and an all-reduce for `joinable` would wait for them for ever.
    """
    if ddp is None or not is_in_join(ddp):
        return False
    return joinable is None or not is_in_join(joinable)


class StatisticsJoinHook(JoinHook):
    """Takes part in the all-reduces of statistics on a rank without data."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def main_hook(self) -> None:
        """Call `on_step`. Called by `Join` for each step of the peers."""
        self._on_step()
