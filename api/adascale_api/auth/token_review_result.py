"""The result of a token review, and the interface of what reviews tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TokenReviewResult:
    """The result of a TokenReview."""

    user: str | None  # the user of the token; None if it is rejected
    audiences: tuple[str, ...] = ()  # the requested audiences for which the token is valid
    error: str = ""  # why it is rejected; empty if the Kubernetes API gives no reason


class TokenReviewer(Protocol):
    """Has tokens reviewed by a cluster."""

    async def review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        """Review a token for any of the audiences."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
