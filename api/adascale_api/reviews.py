"""Reviews of tokens, remembered for a while, so that the cluster is not asked at each request.

Only digests of tokens are kept. A token that was accepted may be revoked, and one that was refused may
become good; so neither answer is believed for long. While nobody answers, those that were accepted before
go on for some more minutes: training does not end because the cluster's API is away.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from adascale_api.errors import UnavailableError

ACCEPTED_FOR = 60.0
"""Seconds for which a token that was accepted is not reviewed again."""
REFUSED_FOR = 10.0
"""Seconds for which one that was refused is not."""
TRUSTED_FOR = 600.0
"""Seconds beyond those for which one that was accepted stays so while nobody answers."""
PAUSE = float(UnavailableError.RETRY_AFTER)
"""Seconds until the next review is tried after nobody has answered."""
MAX_REMEMBERED = 4096
"""Tokens that were accepted, and as many that were refused: strangers can't push out the good ones."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Review:
    """What the cluster says of a token.

    Args:
        user: whose it is; none: it is not good.
        audiences: those asked for that it is good for.
        problem: why it is not good, as far as the cluster says so.
    """

    user: str | None
    audiences: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class _Remembered:
    review: Review
    at: float


class Reviews:
    """Reviews by their tokens.

    Args:
        review: asks the cluster; raises `UnavailableError` if nobody answers.
        clock: seconds since any moment.
    """

    def __init__(
        self,
        review: Callable[[str, Sequence[str]], Awaitable[Review]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._review = review
        self._clock = clock
        self._accepted: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._refused: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[Review]] = {}
        self._away_until = float("-inf")
        self._complaint = ""

    async def of(self, token: str, audiences: Sequence[str]) -> Review:
        """The review of a token for `audiences`, which must be the same each time that it is asked for.

        Raises:
            UnavailableError: nobody answers, and the token was not accepted before.
        """
        key = hashlib.sha256(token.encode()).digest()
        known = self._fresh(key)
        if known is not None:
            return known
        if self._clock() < self._away_until:
            return self._trusted(key)
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.create_task(self._ask(key, token, audiences))
            asked.add_done_callback(lambda done: self._forget_question(key, done))
        # Others wait for the same answer, so a request that is given up must not take it along.
        return await asyncio.shield(asked)

    async def _ask(self, key: bytes, token: str, audiences: Sequence[str]) -> Review:
        try:
            review = await self._review(token, audiences)
        except UnavailableError as error:
            self._away_until = self._clock() + PAUSE
            if self._complaint != str(error):
                self._complaint = str(error)
                logger.warning("%s", error)
            return self._trusted(key)
        if self._complaint:
            self._complaint = ""
            logger.warning("tokens are reviewed again")
        self._remember(key, review)
        return review

    def _forget_question(self, key: bytes, done: asyncio.Task[Review]) -> None:
        del self._asked[key]
        if not done.cancelled():
            done.exception()  # looked at, so that nobody complains where all who asked have gone

    def _fresh(self, key: bytes) -> Review | None:
        for memory, seconds in ((self._accepted, ACCEPTED_FOR), (self._refused, REFUSED_FOR)):
            known = memory.get(key)
            if known is not None and self._clock() - known.at < seconds:
                memory.move_to_end(key)
                return known.review
        return None

    def _trusted(self, key: bytes) -> Review:
        known = self._accepted.get(key)
        if known is None or self._clock() - known.at >= ACCEPTED_FOR + TRUSTED_FOR:
            raise UnavailableError(f"{self._complaint}; nothing was done, try again")
        self._accepted.move_to_end(key)
        return known.review

    def _remember(self, key: bytes, review: Review) -> None:
        self._accepted.pop(key, None)
        self._refused.pop(key, None)
        memory = self._refused if review.user is None else self._accepted
        memory[key] = _Remembered(review, self._clock())
        if len(memory) > MAX_REMEMBERED:
            memory.popitem(last=False)
