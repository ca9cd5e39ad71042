"""Authorization by service account tokens, which the Kubernetes API verifies (TokenReview).

A worker's token has the audience of its job and belongs to an account in the job's namespace; it has the
roles reader and worker for this job. The operator's token has the service's own audience and belongs to the
operator's account; it has every role for every job.
"""

import asyncio
import base64
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from adascale_api.auth.authorization import Role
from adascale_api.errors import ForbiddenError, UnauthorizedError, UnavailableError
from adascale_core.errors import UsageError
from adascale_core.job_id import namespace_of
from adascale_core.names import API_AUDIENCE, CONTROLLER, SYSTEM_NAMESPACE, job_audience

USER_PREFIX = "system:serviceaccount:"
"""Prefix of the user name of a service account; `NAMESPACE:NAME` follows."""
DEFAULT_CONTROLLER = f"{SYSTEM_NAMESPACE}:{CONTROLLER}"
_JOB_AUDIENCE_PREFIX = job_audience("")
MAX_TOKEN_LENGTH = 16 * 1024
"""Characters of a token; a projected token has about 1,000."""
_MAX_EXPIRY = 2**53
"""No token expires later. Larger integers may not be exact as floats."""
MAX_REVIEWS = 16
"""Reviews at the same time."""
MAX_REVIEWS_PER_CLIENT = 16
"""Reviews of an address that may run or wait."""
MAX_WAITING = 2048
"""Reviews that may run or wait."""
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
class TokenReviewResult:
    """The result of a TokenReview."""

    user: str | None  # None if the token is rejected
    audiences: tuple[str, ...] = ()  # the requested audiences for which the token is valid
    error: str = ""  # why it is rejected; empty if the Kubernetes API gives no reason


class TokenReviewer(Protocol):
    """Has tokens reviewed by a cluster."""

    async def review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        """Review a token for any of the audiences; `UnavailableError` if the cluster does not answer."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


_Reviews = OrderedDict[bytes, tuple[TokenReviewResult, float]]
"""By the digest of a token, its review and the time of that. The one that was used last is the last."""


class TokenReviewCache:
    """Caches reviews by digests of the tokens, and bounds those of each address.

    Entries expire, since tokens may be revoked or become valid. While the Kubernetes API does not answer,
    accepted tokens stay valid for some minutes: training must not stop when the API server restarts.
    """

    def __init__(self, reviewer: TokenReviewer, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviewer = reviewer
        self._turns = asyncio.Semaphore(MAX_REVIEWS)
        self._open: Counter[str] = Counter()
        """The reviews of each address that run or wait."""
        self._clock = clock
        self._accepted: _Reviews = OrderedDict()
        self._rejected: _Reviews = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[TokenReviewResult]] = {}
        self._retry_at = float("-inf")
        self._logged_error = ""

    async def review(self, token: str, audiences: Sequence[str], client: str = "") -> TokenReviewResult:
        """Return the cached or a new review of a token, whose audiences must be the same each time."""
        key = hashlib.sha256(token.encode()).digest()
        cached = self._find(key, ACCEPTED_TTL)
        if cached is not None:
            return cached
        if self._clock() < self._retry_at:
            return self._find_accepted(key)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = asyncio.create_task(self._review(key, token, audiences, client))
            pending.add_done_callback(lambda _done: self._pending.pop(key))
            # Retrieved, so that asyncio logs no error where every waiting request was cancelled.
            pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Other requests wait for the same review, so a request that is cancelled must not cancel it.
        return await asyncio.shield(pending)

    async def _review(
        self, key: bytes, token: str, audiences: Sequence[str], client: str
    ) -> TokenReviewResult:
        # Anyone can send tokens to review.
        if self._open[client] >= MAX_REVIEWS_PER_CLIENT or self._open.total() >= MAX_WAITING:
            return self._find_accepted(key)
        self._open[client] += 1
        try:
            async with self._turns:
                result = await self._reviewer.review(token, audiences)
        except UnavailableError as error:
            self._retry_at = self._clock() + RETRY_INTERVAL
            if self._logged_error != str(error):
                self._logged_error = str(error)
                logger.warning("%s", error)
            return self._find_accepted(key)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
        if self._logged_error:
            self._logged_error = ""
            logger.warning("the Kubernetes API reviews tokens again")
        self._add(key, result)
        return result

    def _find(self, key: bytes, accepted_ttl: float) -> TokenReviewResult | None:
        for reviews, ttl in ((self._accepted, accepted_ttl), (self._rejected, REJECTED_TTL)):
            result, reviewed_at = reviews.get(key, (None, 0.0))
            if result is not None and self._clock() - reviewed_at < ttl:
                reviews.move_to_end(key)
                return result
        return None

    def _find_accepted(self, key: bytes) -> TokenReviewResult:
        found = self._find(key, ACCEPTED_TTL + OUTAGE_TTL)
        if found is None:
            reason = self._logged_error or "too many tokens are being reviewed"
            raise UnavailableError(f"{reason}; nothing was stored, try again")
        return found

    def _add(self, key: bytes, result: TokenReviewResult) -> None:
        self._accepted.pop(key, None)
        self._rejected.pop(key, None)
        reviews = self._rejected if result.user is None else self._accepted
        reviews[key] = result, self._clock()
        if len(reviews) > MAX_ENTRIES:
            reviews.popitem(last=False)


class TokenClaims(BaseModel):
    """The claims of a JSON Web Token. They are not verified, so they can only disqualify a token."""

    model_config = ConfigDict(strict=True)

    aud: str | list[str]
    exp: Annotated[int, Field(ge=0, le=_MAX_EXPIRY)]
    """In seconds since 1970."""

    @property
    def audiences(self) -> list[str]:
        """The audiences that the token claims to have."""
        return [self.aud] if isinstance(self.aud, str) else self.aud


def read_claims(token: str) -> TokenClaims | None:
    """Return the claims of a token; None if it is not a JSON Web Token with an audience and an expiry."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts) or len(token) > MAX_TOKEN_LENGTH:
        return None
    try:
        payload = base64.b64decode(parts[1] + "=" * (-len(parts[1]) % 4), b"-_", validate=True)
        return TokenClaims.model_validate_json(payload)
    except ValueError:
        return None


class ServiceAccountAuthorizer:
    """Authorizes workers for their own job, and the operator for all jobs."""

    def __init__(
        self,
        reviewer: TokenReviewer,
        controller: str = DEFAULT_CONTROLLER,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace, colon, name = controller.partition(":")
        if not (namespace and colon and name) or ":" in name:
            raise UsageError(
                f"the service account {controller!r} is not valid: it must be NAMESPACE:NAME, "
                f"such as {DEFAULT_CONTROLLER}"
            )
        self._controller = controller
        self._reviewer = reviewer
        self._cache = TokenReviewCache(reviewer, monotonic)
        self._clock = clock

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Refuse a token without the role."""
        claims = read_claims(token)
        if claims is None:
            raise UnauthorizedError(f"not a service account token: send {self._required(role, job_id)}")
        audiences = [
            audience
            for audience in claims.audiences
            if audience == API_AUDIENCE or audience.startswith(_JOB_AUDIENCE_PREFIX)
        ]
        if not audiences:
            raise UnauthorizedError(
                f"the token has the audience {_listed(claims.audiences)}: send {self._required(role, job_id)}"
            )
        # Checked here, so that no cached review outlives the token.
        expired_for = self._clock() - claims.exp
        if expired_for >= 0:
            raise UnauthorizedError(
                f"the token expired {expired_for:.0f} s ago: read the token file again, the kubelet renews it"
            )
        result = await self._cache.review(token, audiences, client)
        if result.user is None:
            reason = f": {result.error}" if result.error else ""
            raise UnauthorizedError(f"the Kubernetes API rejects the token{reason}")
        if not self._has_role(result, role, job_id):
            account = result.user.removeprefix(USER_PREFIX)
            raise ForbiddenError(
                f"the token of {account} with the audience {_listed(result.audiences)} may not "
                f"{_ACTIONS[role]} {job_id or 'all jobs'}: send {self._required(role, job_id)}. "
                "Nothing was stored"
            )

    async def close(self) -> None:
        """Close the connections to the cluster."""
        await self._reviewer.close()

    def _has_role(self, result: TokenReviewResult, role: Role, job_id: str | None) -> bool:
        if API_AUDIENCE in result.audiences and result.user == f"{USER_PREFIX}{self._controller}":
            return True
        if role is Role.CONTROLLER or job_id is None:
            return False
        namespace = namespace_of(job_id)
        in_namespace = (result.user or "").startswith(f"{USER_PREFIX}{namespace}:")
        return in_namespace and job_audience(job_id) in result.audiences

    def _required(self, role: Role, job_id: str | None) -> str:
        of_controller = f"a token of {self._controller} with the audience {API_AUDIENCE}"
        if role is Role.CONTROLLER or job_id is None:
            return of_controller
        namespace = namespace_of(job_id)
        return (
            f"a token of a service account in namespace {namespace} with the audience "
            f"{job_audience(job_id)}, or {of_controller}"
        )


_ACTIONS = {
    Role.READER: "read",
    Role.WORKER: "report for",
    Role.CONTROLLER: "control",
}


def _listed(audiences: Sequence[str]) -> str:
    listed = ", ".join(audience[:200] for audience in audiences[:3])
    return (listed or "(none)") + (", ..." if len(audiences) > 3 else "")
