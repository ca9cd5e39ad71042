"""Authorization by service account tokens, which the Kubernetes API verifies (TokenReview).

A worker's token has the audience of its job and belongs to an account in the job's namespace; it has the
roles reader and worker for this job. The operator's token has the service's own audience and belongs to the
operator's account; it has every role for every job.
"""

import time
from collections.abc import Callable, Sequence

from adascale_api.auth.authorization import Role
from adascale_api.auth.token_claims import read_claims
from adascale_api.auth.token_review_cache import TokenReviewCache
from adascale_api.auth.token_review_result import TokenReviewer, TokenReviewResult
from adascale_api.errors import ForbiddenError, UnauthorizedError
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import namespace_of
from adascale_core.names import API_AUDIENCE, CONTROLLER, SYSTEM_NAMESPACE, job_audience

USER_PREFIX = "system:serviceaccount:"
"""Prefix of the user name of a service account; `NAMESPACE:NAME` follows."""
DEFAULT_CONTROLLER = f"{SYSTEM_NAMESPACE}:{CONTROLLER}"

_JOB_AUDIENCE_PREFIX = job_audience("")


class InvalidAccountError(AdaScaleError):
    """The name of a service account is not `NAMESPACE:NAME`."""

    exit_code = 2


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
            raise InvalidAccountError(
                f"the service account {controller!r} is not valid: it must be NAMESPACE:NAME, "
                f"such as {DEFAULT_CONTROLLER}"
            )
        self._controller = controller
        self._reviewer = reviewer
        self._cache = TokenReviewCache(reviewer, monotonic)
        self._clock = clock

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Return if the token has the role."""
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
        expired_for = self._clock() - claims.expires_at
        if expired_for >= 0:
            raise UnauthorizedError(
                f"the token expired {expired_for:.0f} s ago: read the token file again, the kubelet renews it"
            )
        namespace = namespace_of(job_id or "")
        result = await self._cache.review(token, audiences, client=client, namespace=namespace)
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
