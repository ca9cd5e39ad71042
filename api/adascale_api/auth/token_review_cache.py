"""A cache of token reviews, so that most requests need no request to the Kubernetes API.

Keys are digests, so tokens themselves are not stored. An accepted token may be revoked and a rejected token
may become valid, so entries expire. While the Kubernetes API does not answer, accepted tokens stay valid for
some minutes: training must not stop because the API server is restarted.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adascale_api.auth.token_review_queue import TokenReviewQueue, TooManyReviewsError
from adascale_api.auth.token_review_result import TokenReviewer, TokenReviewResult
from adascale_api.errors import UnavailableError

ACCEPTED_TTL = 60.0
"""Seconds until an accepted token is reviewed again."""
REJECTED_TTL = 10.0
"""Seconds until a rejected token is reviewed again."""
OUTAGE_TTL = 600.0
"""Seconds after `ACCEPTED_TTL` for which an accepted token stays valid without an answer from the API."""
RETRY_INTERVAL = float(UnavailableError.RETRY_AFTER)
"""Seconds between two attempts while the Kubernetes API does not answer."""
MAX_ENTRIES = 4096
"""Accepted tokens, and as many rejected ones: rejected tokens never evict accepted ones."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    result: TokenReviewResult
    reviewed_at: float


class TokenReviewCache:
    """Caches the results of a `TokenReviewer`."""

    def __init__(self, reviewer: TokenReviewer, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = TokenReviewQueue(reviewer)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._clock = clock
        self._accepted: OrderedDict[bytes, _Entry] = OrderedDict()
        self._rejected: OrderedDict[bytes, _Entry] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[TokenReviewResult]] = {}
        self._retry_at = float("-inf")
        self._logged_error = ""

    async def review(
        self, token: str, audiences: Sequence[str], *, client: str = "", namespace: str = ""
    ) -> TokenReviewResult:
        """Return the cached or a new review of a token."""
        key = hashlib.sha256(token.encode()).digest()
        cached = self._find_fresh(key)
        if cached is not None:
            return cached
        if self._clock() < self._retry_at:
            return self._find_accepted(key)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = asyncio.create_task(
                self._review(key, token, audiences, client, namespace)
            )
            pending.add_done_callback(lambda done: self._remove_pending(key, done))
        # Other requests wait for the same review, so a request that is cancelled must not cancel it.
        return await asyncio.shield(pending)

    async def _review(
        self, key: bytes, token: str, audiences: Sequence[str], client: str, namespace: str
    ) -> TokenReviewResult:
        try:
            result = await self._queue.review(
                token, audiences, client=client, is_known=namespace in self._known
            )
        except TooManyReviewsError:
            return self._find_accepted(key)
        except UnavailableError as error:
            self._retry_at = self._clock() + RETRY_INTERVAL
            if self._logged_error != str(error):
                self._logged_error = str(error)
                logger.warning("%s", error)
            return self._find_accepted(key)
        if self._logged_error:
            self._logged_error = ""
            logger.warning("the Kubernetes API reviews tokens again")
        self._add(key, result)
        if result.user is not None:
            self._known[namespace] = None
            self._known.move_to_end(namespace)
            if len(self._known) > MAX_ENTRIES:
                self._known.popitem(last=False)
        return result

    def _remove_pending(self, key: bytes, done: asyncio.Task[TokenReviewResult]) -> None:
        del self._pending[key]
        if not done.cancelled():
            # Retrieved, so that asyncio logs no error where every waiting request was cancelled.
            done.exception()

    def _find_fresh(self, key: bytes) -> TokenReviewResult | None:
        for entries, ttl in ((self._accepted, ACCEPTED_TTL), (self._rejected, REJECTED_TTL)):
            entry = entries.get(key)
            if entry is not None and self._clock() - entry.reviewed_at < ttl:
                entries.move_to_end(key)
                return entry.result
        return None

    def _find_accepted(self, key: bytes) -> TokenReviewResult:
        entry = self._accepted.get(key)
        if entry is None or self._clock() - entry.reviewed_at >= ACCEPTED_TTL + OUTAGE_TTL:
            reason = self._logged_error or "too many tokens are being reviewed"
            raise UnavailableError(f"{reason}; nothing was stored, try again")
        self._accepted.move_to_end(key)
        return entry.result

    def _add(self, key: bytes, result: TokenReviewResult) -> None:
        self._accepted.pop(key, None)
        self._rejected.pop(key, None)
        entries = self._rejected if result.user is None else self._accepted
        entries[key] = _Entry(result, self._clock())
        if len(entries) > MAX_ENTRIES:
            entries.popitem(last=False)
