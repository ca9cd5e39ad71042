"""Who may do what in a cluster: tokens of service accounts, which Kubernetes reviews.

A worker's token has an audience that names its job, and is of an account in the job's namespace: it may do
what workers of that job do. The operator's has an audience of its own, and is of the operator's account: it
may do everything. Whether a token is good, and whose it is, says the Kubernetes API (TokenReview).
"""

import base64
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from adascale_api.auth import Right
from adascale_api.errors import ForbiddenError, UnauthorizedError
from adascale_api.reviews import Review, Reviews
from adascale_core.errors import AdaScaleError
from adascale_core.names import API_AUDIENCE, CONTROLLER, SYSTEM_NAMESPACE, job_audience

ACCOUNT = "system:serviceaccount:"
"""Begins the user name of a service account; `NAMESPACE:NAME` follows."""
DEFAULT_CONTROLLER = f"{SYSTEM_NAMESPACE}:{CONTROLLER}"
MAX_TOKEN = 16 * 1024
"""Characters; a projected token has about one thousand."""

_ANY_JOB = job_audience("")
_LATEST = 2**53
"""No token says that it expires later; beyond, a number of seconds may be no float any more."""


class InvalidAccountError(AdaScaleError):
    """The name of a service account that is none."""

    exit_code = 2


@dataclass(frozen=True)
class Claims:
    """What a token says of itself, which is believed only where it speaks against the token.

    Args:
        audiences: whom it is for.
        expires_at: until when it is good, in seconds since 1970.
    """

    audiences: tuple[str, ...]
    expires_at: int


class TokenReviewer:
    """Lets workers act for their own job, and the operator for all jobs.

    Args:
        review: asks the cluster for a review.
        controller: the operator's service account, `NAMESPACE:NAME`.
        close: called at the end.
        clock: the time, in seconds since 1970.
        monotonic: seconds since any moment.

    Raises:
        InvalidAccountError: `controller` is not of this form.
    """

    def __init__(
        self,
        review: Callable[[str, Sequence[str]], Awaitable[Review]],
        controller: str = DEFAULT_CONTROLLER,
        *,
        close: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace, colon, name = controller.partition(":")
        if not (namespace and colon and name) or ":" in name:
            raise InvalidAccountError(
                f"the service account {controller!r} is not valid: it must be NAMESPACE:NAME, "
                f"as {DEFAULT_CONTROLLER} is"
            )
        self._controller = controller
        self._reviews = Reviews(review, monotonic)
        self._close = close
        self._clock = clock

    async def require(self, token: str, right: Right, job_id: str | None) -> None:
        """Return if the bearer of `token` has `right`.

        Raises:
            UnauthorizedError: the token is not good here, for whatever it is asked.
            ForbiddenError: it is good, and has not this right.
            UnavailableError: it is not known whether it is good, since nobody answers.
        """
        claims = read_claims(token)
        if claims is None:
            raise UnauthorizedError(
                f"the token is none of a service account: send {self._needed(right, job_id)}"
            )
        ours = [one for one in claims.audiences if one == API_AUDIENCE or one.startswith(_ANY_JOB)]
        if not ours:
            raise UnauthorizedError(
                f"the token is for {_listed(claims.audiences)}: send {self._needed(right, job_id)}"
            )
        # Here and not in the memory of reviews, so that nothing remembered outlives the token.
        late = self._clock() - claims.expires_at
        if late >= 0:
            raise UnauthorizedError(
                f"the token has expired, {late:.0f} s ago: read its file again, where it is renewed"
            )
        review = await self._reviews.of(token, ours)
        if review.user is None:
            reason = f": {review.problem}" if review.problem else ""
            raise UnauthorizedError(f"the cluster does not accept the token{reason}")
        if not self._allows(review, right, job_id):
            account = review.user.removeprefix(ACCOUNT)
            raise ForbiddenError(
                f"the token, of {account} for {_listed(review.audiences)}, is not enough: "
                f"{_CALLS[right]} {job_id or 'all jobs'} needs {self._needed(right, job_id)}. "
                "Nothing was done"
            )

    async def close(self) -> None:
        """Close the connections to the cluster."""
        if self._close is not None:
            await self._close()

    def _allows(self, review: Review, right: Right, job_id: str | None) -> bool:
        if API_AUDIENCE in review.audiences and review.user == f"{ACCOUNT}{self._controller}":
            return True
        if right is Right.CONTROL or job_id is None:
            return False
        namespace, _, _ = job_id.partition(".")
        of_namespace = (review.user or "").startswith(f"{ACCOUNT}{namespace}:")
        return of_namespace and job_audience(job_id) in review.audiences

    def _needed(self, right: Right, job_id: str | None) -> str:
        operators = f"one of {self._controller} for {API_AUDIENCE}"
        if right is Right.CONTROL or job_id is None:
            return operators
        namespace, _, _ = job_id.partition(".")
        return f"one of namespace {namespace} for {job_audience(job_id)}, or {operators}"


_CALLS = {
    Right.READ: "reading",
    Right.WORK: "working for",
    Right.CONTROL: "deciding on",
}


def read_claims(token: str) -> Claims | None:
    """What the token says of itself; none if it is no JSON Web Token that is made for someone and expires."""
    parts = token.split(".")
    if len(parts) != 3 or not all(parts) or len(token) > MAX_TOKEN:
        return None
    try:
        payload = parts[1]
        members = json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4), b"-_", validate=True))
    except (ValueError, RecursionError):
        return None
    if not isinstance(members, dict):
        return None
    audiences, expires_at = members.get("aud"), members.get("exp")
    if isinstance(audiences, str):
        audiences = [audiences]
    if not isinstance(audiences, list) or not all(isinstance(one, str) for one in audiences):
        return None
    if not isinstance(expires_at, int) or not 0 <= expires_at <= _LATEST:
        return None
    return Claims(tuple(audiences), expires_at)


def _listed(audiences: Sequence[str]) -> str:
    shown = ", ".join(one[:200] for one in audiences[:3])
    return (shown or "nobody") + (", ..." if len(audiences) > 3 else "")
