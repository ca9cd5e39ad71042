"""A bounded queue of token reviews that is fair to clients.

Anyone who can connect can send tokens that must be reviewed. So the number of reviews at the same time is
limited, and clients take turns by their address. Namespaces whose tokens were accepted before have half of
all turns, however many tokens others send.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

from adascale_api.auth.token_review_result import TokenReviewer, TokenReviewResult
from adascale_api.errors import UnavailableError

MAX_REVIEWS = 16
"""Reviews at the same time."""
MAX_WAITING_PER_CLIENT = 16
"""Reviews that may wait for a turn of a client."""
MAX_WAITING = 2048
"""Reviews that may wait."""


class TooManyReviewsError(UnavailableError):
    """Too many reviews wait."""


_Waiters = OrderedDict[str, deque["asyncio.Future[None]"]]


class TokenReviewQueue:
    """Has tokens reviewed in turn."""

    def __init__(self, reviewer: TokenReviewer) -> None:
        self._reviewer = reviewer
        self._running = 0
        self._waiting = 0
        self._groups: tuple[_Waiters, _Waiters] = (OrderedDict(), OrderedDict())
        self._next_group = 0

    async def review(
        self, token: str, audiences: Sequence[str], *, client: str, is_known: bool
    ) -> TokenReviewResult:
        """Review a token."""
        if self._running >= MAX_REVIEWS:
            await self._wait_for_turn(self._groups[is_known], client)
        else:
            self._running += 1
        try:
            return await self._reviewer.review(token, audiences)
        finally:
            self._running -= 1
            self._start_next()

    async def close(self) -> None:
        """Close connections."""
        await self._reviewer.close()

    async def _wait_for_turn(self, group: _Waiters, client: str) -> None:
        waiters = group.setdefault(client, deque())
        if len(waiters) >= MAX_WAITING_PER_CLIENT or self._waiting >= MAX_WAITING:
            if not waiters:
                del group[client]
            raise TooManyReviewsError("too many tokens are being reviewed")
        turn = asyncio.get_running_loop().create_future()
        waiters.append(turn)
        self._waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._running -= 1
                self._start_next()
            raise

    def _start_next(self) -> None:
        while self._waiting and self._running < MAX_REVIEWS:
            group = self._groups[self._next_group] or self._groups[1 - self._next_group]
            self._next_group = 1 - self._next_group
            client, waiters = group.popitem(last=False)
            turn = waiters.popleft()
            self._waiting -= 1
            if waiters:
                group[client] = waiters  # at the end, so that the other clients are next
            if not turn.done():
                self._running += 1
                turn.set_result(None)
