"""A limit on repeated log records: what a client can cause again and again must not fill the log."""

import logging
import time
from collections.abc import Callable

MAX_RECORDS = 10
"""Records of one place in the source in `INTERVAL`."""
INTERVAL = 60.0
"""Seconds."""


class LogLimit(logging.Filter):
    """Drops the records of a place in the source after `MAX_RECORDS` in `INTERVAL`, and counts them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; the first one of an interval tells how many were dropped."""
        place = (record.pathname, record.lineno)
        now = self._clock()
        since, count = self._counts.get(place, (now, 0))
        if now - since >= INTERVAL:
            if count > MAX_RECORDS:
                record.msg = f"{record.getMessage()} ({count - MAX_RECORDS} more before were not logged)"
                record.args = ()
            since, count = now, 0
        self._counts[place] = (since, count + 1)
        return count < MAX_RECORDS
