"""Posts the gain from a thread of its own, so that no step ever waits for the metrics service.

Reports wait while the service is away, the newest thousand of them. One that it refuses is left out, and
takes no other with it. What it answers, the job's generations, is kept for the trainer to look at.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from adascale_client import JobClient, ServiceError, ServiceRefusedError
from adascale_core.messages import AllocationView, GainReport

MAX_WAITING = 1000
"""Reports kept while the service does not answer."""
NOT_KNOWN_YET = 404
"""Status where nobody has told the service of the job so far."""
MAX_BACKOFF = 5.0
"""Seconds between two attempts while the service does not answer."""
UNFIT = frozenset({400, 413, 422})
"""Statuses of an answer that no repetition of the same reports would change."""
IDLE = 1.0
"""Seconds without a report after which the reporter asks for the generations instead."""


class Reporter:
    """Posts reports in the background.

    Args:
        client: the metrics service.
        generation: the generation that this trainer runs in.
    """

    def __init__(self, client: JobClient, generation: int) -> None:
        self._client = client
        self._generation = generation
        self._waiting: deque[GainReport] = deque(maxlen=MAX_WAITING)
        self._changed = threading.Condition()
        self._closing = False
        self._view: AllocationView | None = None
        self._complaint: str | None = None
        self._thread = threading.Thread(target=self._run, name="adascale-reporter", daemon=True)
        self._thread.start()

    @property
    def generation_is_over(self) -> bool:
        """Whether the service has told that this generation has to be left."""
        return self._view is not None and self._view.has_ended(self._generation)

    def report(self, report: GainReport) -> None:
        """Post `report` as soon as may be."""
        with self._changed:
            self._waiting.append(report)
            self._changed.notify()

    def close(self, patience: float = 2.0) -> None:
        """Post what waits, for at most `patience` seconds, and end the thread. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)

    def _run(self) -> None:
        pause = 0.1
        at_once = MAX_WAITING
        while True:
            with self._changed:
                if not self._waiting and not self._closing:
                    self._changed.wait(IDLE)
                batch = list(islice(self._waiting, at_once))
                if self._closing and not batch:
                    return
            try:
                self._view = self._client.post_gain(batch) if batch else self._client.get_allocation()
            except ServiceError as error:
                status = error.status if isinstance(error, ServiceRefusedError) else None
                if batch and status in UNFIT:
                    # Find the one that is meant by halves.
                    at_once = len(batch) // 2
                    if at_once == 0:
                        print(f"adascale: {error}; this report is left out", flush=True)
                        self._drop(batch)
                        at_once = MAX_WAITING
                    continue
                if not batch and status == NOT_KNOWN_YET:
                    continue
                self._complain(error)
                with self._changed:
                    if self._closing:
                        return
                    self._changed.wait(pause)
                pause = min(2 * pause, MAX_BACKOFF)
                continue
            if self._complaint is not None:
                self._complaint = None
                print("adascale: the metrics service answers again", flush=True)
            pause = 0.1
            self._drop(batch)

    def _drop(self, batch: list[GainReport]) -> None:
        """Forget reports that were posted, or that the service will never take."""
        with self._changed:
            for report in batch:
                if self._waiting and self._waiting[0] is report:
                    self._waiting.popleft()

    def _complain(self, error: ServiceError) -> None:
        if self._complaint != str(error):
            self._complaint = str(error)
            print(f"adascale: {error}; training goes on, reports wait", flush=True)
