"""TokenReview: asks the Kubernetes API whether a token is good, and whose it is."""

import asyncio
import os
from collections.abc import Mapping, Sequence

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException

from adascale_api.errors import UnavailableError
from adascale_api.reviews import Review
from adascale_core.errors import AdaScaleError

TIMEOUT = 4.0
"""Seconds to wait for a review; agents wait 5 for the service."""
CONNECTIONS = 16
"""Reviews at a time."""
_OF_THE_TOKEN = frozenset({400, 413, 422})
"""Statuses that another token would not be answered with."""


class NoClusterError(AdaScaleError):
    """There is no cluster whose API could be asked."""

    exit_code = 2


class KubernetesReviews:
    """Reviews of tokens by a cluster: the one that this program runs in, or that KUBECONFIG names.

    Raises:
        NoClusterError: neither is there.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._configuration = client.Configuration()
        kubeconfig = environment.get("KUBECONFIG")
        try:
            if kubeconfig:
                asyncio.run(self._load_kubeconfig(kubeconfig))
            else:
                config.load_incluster_config(client_configuration=self._configuration)
        except (ConfigException, OSError, ValueError, KeyError, TypeError) as error:
            raise NoClusterError(
                f"there is no cluster that could review tokens: {error}; run this in a pod, or set KUBECONFIG"
            ) from error
        self._configuration.connection_pool_maxsize = CONNECTIONS
        self._api: client.ApiClient | None = None

    async def _load_kubeconfig(self, path: str) -> None:
        await config.load_kube_config(path, client_configuration=self._configuration)

    async def review(self, token: str, audiences: Sequence[str]) -> Review:
        """Whether the token is good for any of the audiences.

        Raises:
            UnavailableError: the cluster does not say.
        """
        if self._api is None:
            # Not before: it belongs to the event loop that it is made in.
            self._api = client.ApiClient(self._configuration)
        asked = client.V1TokenReview(
            spec=client.V1TokenReviewSpec(token=token, audiences=list(audiences)),
        )
        try:
            answer = await client.AuthenticationV1Api(self._api).create_token_review(
                asked, _request_timeout=TIMEOUT
            )
        except ApiException as error:
            if error.status in _OF_THE_TOKEN:
                return Review(None, problem=f"{error.status} {error.reason}")
            may = ": its account needs the right to create tokenreviews" if error.status in (401, 403) else ""
            raise UnavailableError(
                "the Kubernetes API does not review tokens for this service "
                f"({error.status} {error.reason}){may}"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError, ConfigException) as error:
            # Nobody there, or another than the API; or our own token is away while it is renewed.
            raise UnavailableError(
                f"the Kubernetes API, which reviews tokens, does not answer ({str(error) or 'timeout'})"
            ) from error
        status = answer.status
        if status is None or not status.authenticated or status.user is None or not status.user.username:
            return Review(None, problem=(status.error if status is not None else None) or "")
        return Review(status.user.username, tuple(status.audiences or ()))

    async def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
            await self._api.close()
            self._api = None
