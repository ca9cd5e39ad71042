"""The clients that follow a stream: a bounded number, shared fairly by their addresses."""

from collections import Counter

from adascale_api.errors import UnavailableError


class Follower:
    """A client that follows a stream."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_ended = False
        """Whether another client has its place."""


class Followers:
    """The clients that follow at the same time.

    When all places are taken, a client of another address gets the place of the address that has most, its
    oldest. So one address can't keep out the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._followers: list[Follower] = []

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, address: str) -> Follower:
        """Give a client a place."""
        if len(self._followers) >= self._limit:
            self._end_one(address)
        follower = Follower(address)
        self._followers.append(follower)
        return follower

    def remove(self, follower: Follower) -> None:
        """Give the place of a client back, unless another one has it."""
        if not follower.is_ended:
            self._followers.remove(follower)

    def _end_one(self, address: str) -> None:
        counts = Counter(each.address for each in self._followers)
        most, count = counts.most_common(1)[0]
        if count < counts[address] + 2:
            raise UnavailableError(
                f"{self._limit} clients follow the jobs already; try again later, or with a token that may "
                "read all jobs: clients with one have places of their own"
            )
        oldest = next(each for each in self._followers if each.address == most)
        self.remove(oldest)
        oldest.is_ended = True
