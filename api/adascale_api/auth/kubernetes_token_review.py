"""Token reviews by the Kubernetes API. The only module of the service that imports the Kubernetes client.

Of the client it uses parts that the generated documentation does not describe: `_request_timeout` of a call,
and a `Configuration` that is filled before an event loop runs. Tried with kubernetes 37.0.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException

from adascale_api.auth.service_accounts import MAX_REVIEWS, TokenReviewResult
from adascale_api.errors import UnavailableError
from adascale_core.errors import UsageError

TIMEOUT = 4.0
"""Seconds to wait for a review; clients of the service wait 5 for its answer."""
_REJECTED_TOKEN = frozenset({400, 413, 422})
"""Statuses that depend on the token."""


class KubernetesTokenReviewer:
    """Has tokens reviewed by the cluster of this pod, or by the cluster that KUBECONFIG names."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._configuration = client.Configuration()
        kubeconfig = environment.get("KUBECONFIG")
        try:
            if kubeconfig:
                asyncio.run(self._load_kubeconfig(kubeconfig))
            else:
                config.load_incluster_config(client_configuration=self._configuration)
        except (ConfigException, OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"no cluster is configured to review tokens: {error}; run this in a pod, or set KUBECONFIG"
            ) from error
        self._configuration.connection_pool_maxsize = MAX_REVIEWS
        self._api: client.ApiClient | None = None

    async def _load_kubeconfig(self, path: str) -> None:
        await config.load_kube_config(path, client_configuration=self._configuration)

    async def review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        """Review a token for any of the audiences; `UnavailableError` also without the right to review."""
        if self._api is None:
            # Created here because it belongs to the running event loop.
            self._api = client.ApiClient(self._configuration)
        request = client.V1TokenReview(
            spec=client.V1TokenReviewSpec(token=token, audiences=list(audiences)),
        )
        try:
            response = await client.AuthenticationV1Api(self._api).create_token_review(
                request, _request_timeout=TIMEOUT
            )
        except ApiException as error:
            if error.status in _REJECTED_TOKEN:
                return TokenReviewResult(None, error=f"{error.status} {error.reason}")
            hint = (
                ": its account needs permission to create tokenreviews" if error.status in (401, 403) else ""
            )
            raise UnavailableError(
                "the Kubernetes API refuses to review tokens for this service "
                f"({error.status} {error.reason}){hint}"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError, ConfigException) as error:
            # No answer, an answer of another program, or the service's own token is being renewed.
            raise UnavailableError(
                f"the Kubernetes API does not answer, so tokens can't be reviewed ({str(error) or 'timeout'})"
            ) from error
        status = response.status
        if status is None or not status.authenticated or status.user is None or not status.user.username:
            return TokenReviewResult(None, error=(status.error if status is not None else None) or "")
        return TokenReviewResult(status.user.username, tuple(status.audiences or ()))

    async def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
            await self._api.close()
            self._api = None
