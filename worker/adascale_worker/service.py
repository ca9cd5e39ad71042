"""The metrics service as a worker sees it: a few JSON calls, each short and bounded in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import urllib3

from adascale_core.messages import AllocationView, GainReport, Registration
from adascale_worker.environment import ServiceAddress
from adascale_worker.errors import EnvironmentVariableError, ServiceError


class ServiceClient:
    """Calls the metrics service on behalf of one job.

    Args:
        address: where it is.
        timeout: seconds to wait for an answer, besides what a call waits on purpose.
    """

    def __init__(self, address: ServiceAddress, timeout: float = 5.0) -> None:
        self._address = address
        self._timeout = timeout
        self._pool = urllib3.PoolManager(retries=False, maxsize=2)

    def post_gain(self, reports: Sequence[GainReport]) -> AllocationView:
        """Post reports; what was posted before counts once.

        Raises:
            ServiceError: nobody answers, or the service refuses.
        """
        answer = self._call("POST", "gain", [report.to_json() for report in reports])
        return self._view(answer.get("allocation") if isinstance(answer, dict) else answer)

    def register(self, registration: Registration) -> AllocationView:
        """Tell what the agent of a replica is doing.

        Raises:
            ServiceError: as above.
        """
        answer = self._call("PUT", f"replicas/{registration.rank}", registration.to_json())
        return self._view(answer)

    def allocation(self, known_version: int | None = None, wait: float = 0.0) -> AllocationView:
        """The job's generations; waits for up to `wait` seconds while they are as in `known_version`.

        Raises:
            ServiceError: as above.
        """
        query = "" if known_version is None else f"?version={known_version}&wait={wait:g}"
        return self._view(self._call("GET", f"allocation{query}", wait=wait))

    def close(self) -> None:
        """Close its connections."""
        self._pool.clear()

    def _view(self, members: Any) -> AllocationView:
        try:
            return AllocationView.from_json(members)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServiceError(
                f"{self._address.url} does not answer as the metrics service does: is it one?"
            ) from error

    def _call(self, method: str, path: str, body: object = None, wait: float = 0.0) -> Any:
        url = f"{self._address.url}/jobs/{self._address.job_id}/{path}"
        headers = {"accept": "application/json"}
        try:
            token = self._address.bearer()
        except EnvironmentVariableError as error:
            # A file that is renewed may be away for a moment: as a service that is.
            raise ServiceError(str(error)) from error
        if token:
            headers["authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            headers["content-type"] = "application/json"
            data = json.dumps(body).encode()
        try:
            answer = self._pool.request(
                method, url, body=data, headers=headers, timeout=self._timeout + wait, redirect=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise ServiceError(
                f"the metrics service at {self._address.url} does not answer: {error}"
            ) from error
        if answer.status >= 300:
            raise ServiceError(
                f"the metrics service refuses {method} {url} ({answer.status}): {_told(answer.data)}",
                answer.status,
            )
        try:
            return json.loads(answer.data)
        except ValueError as error:
            raise ServiceError(f"{url} does not answer in JSON: is it the metrics service?") from error


def _told(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
