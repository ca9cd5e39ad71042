"""The metrics service as the controller sees it: a few JSON calls, each bounded in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import urllib3

from adascale_core.errors import AdaScaleError
from adascale_core.messages import (
    ActiveAllocation,
    Allocation,
    AllocationView,
    GainReport,
    JobSpec,
    Registration,
    ReplicaState,
    StepTime,
)

TIMEOUT = 5.0
"""Seconds to wait for an answer."""


CONNECTIONS = 8
"""Connections that are kept; more calls at the same time make more."""
PAGE = 500
"""Jobs to ask for at a time."""


class ServiceUnreachableError(AdaScaleError):
    """Nobody answers at the service's address, or somebody else does."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


class ServiceRefusedError(AdaScaleError):
    """The service answers that it will not.

    Args:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class JobView:
    """What the service knows of a job.

    Args:
        id: the job id.
        spec: what it was declared to be, if it was.
        version, desired, active, broken, complete: as in `AllocationView`.
        failures, disruptions: generations that the user's program has failed in, or were lost otherwise.
        replicas: the last registration of each rank, by rank.
        latest: the last report, if there is one.
        step_times: the measured step times.
    """

    id: str = ""
    spec: JobSpec | None = None
    version: int = 0
    desired: Allocation | None = None
    active: ActiveAllocation | None = None
    broken: bool = False
    complete: bool = False
    failures: int = 0
    disruptions: int = 0
    replicas: Sequence[Registration] = ()
    latest: GainReport | None = None
    step_times: Sequence[StepTime] = ()

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        desired, active, latest = members.get("desired"), members.get("active"), members.get("latest")
        spec = members.get("spec")
        return cls(
            id=members["id"],
            spec=JobSpec.from_json(spec) if spec else None,
            version=members["version"],
            desired=Allocation.from_json(desired) if desired else None,
            active=ActiveAllocation.from_json(active) if active else None,
            broken=members["broken"],
            complete=members["complete"],
            failures=members["failures"],
            disruptions=members["disruptions"],
            replicas=tuple(_registration(one) for one in members["replicas"]),
            latest=GainReport.from_json(latest) if latest else None,
            step_times=tuple(StepTime.from_json(one) for one in members["step_times"]),
        )

    @property
    def generation(self) -> int:
        """The number of the newest allocation that is desired; 0 if none is."""
        return self.desired.generation if self.desired else 0

    def replica(self, rank: int) -> Registration | None:
        """The last registration of a rank."""
        return next((one for one in self.replicas if one.rank == rank), None)


def _registration(members: dict[str, Any]) -> Registration:
    return Registration.from_json({**members, "state": ReplicaState(members["state"])})


class MetricsService:
    """Calls the metrics service.

    Args:
        url: where it is, as in `http://127.0.0.1:8265`.
        token: proves the right to write, where one is asked for.
        token_file: a file with that token, where it is renewed from time to time.
    """

    def __init__(self, url: str, token: str | None = None, token_file: Path | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._token = token
        self._token_file = token_file
        self._pool = urllib3.PoolManager(maxsize=CONNECTIONS, retries=False)

    def put_job(self, job_id: str, spec: JobSpec) -> None:
        """Declare a job, anew or as it is by now.

        Raises:
            ServiceUnreachableError: nobody answers.
            ServiceRefusedError: the service refuses.
        """
        self._call("PUT", f"jobs/{job_id}", spec.to_json())

    def remove_job(self, job_id: str) -> None:
        """Have all that is known of a job forgotten.

        Raises:
            ServiceUnreachableError, ServiceRefusedError: as above.
        """
        self._call("DELETE", f"jobs/{job_id}")

    def job(self, job_id: str) -> JobView:
        """What the service knows of a job.

        Raises:
            ServiceUnreachableError, ServiceRefusedError: as above.
        """
        return JobView.from_json(self._call("GET", f"jobs/{job_id}"))

    def jobs(self) -> list[JobView]:
        """What the service knows of all jobs.

        Raises:
            ServiceUnreachableError, ServiceRefusedError: as above.
        """
        views: list[JobView] = []
        after: str | None = ""
        while after is not None:
            page = self._call("GET", f"jobs?limit={PAGE}&after={after}")
            try:
                views += [JobView.from_json(one) for one in page["jobs"]]
                after = page["next"]
            except (KeyError, TypeError, ValueError) as error:
                raise ServiceUnreachableError(
                    f"{self.url} is not the address of a metrics service, or one of another version: its "
                    f"answer is not understood ({error!r})"
                ) from error
        return views

    def wait_for_change(self, job_id: str, version: int, seconds: float) -> None:
        """Return as soon as the job's generations are no longer as in `version`, or after some seconds.

        Raises:
            ServiceUnreachableError, ServiceRefusedError: as above.
        """
        self._call("GET", f"jobs/{job_id}/allocation?version={version}&wait={seconds:g}")

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """Want `allocation` for a job.

        Raises:
            ServiceUnreachableError: nobody answers.
            ServiceRefusedError: the service refuses; with status 409 because a newer one is desired already.
        """
        answer = self._call("PUT", f"jobs/{job_id}/allocation", allocation.to_json())
        return AllocationView.from_json(answer)

    def gain(self, job_id: str) -> dict[str, Any]:
        """The latest gain of a job, as the service's JSON has it.

        Raises:
            ServiceUnreachableError, ServiceRefusedError: as above.
        """
        answer: dict[str, Any] = self._call("GET", f"jobs/{job_id}/gain")
        return answer

    def history(self, job_id: str, points: int) -> list[GainReport]:
        """The reports of a job in order, thinned to at most `points`.

        Raises:
            ServiceUnreachableError, ServiceRefusedError: as above.
        """
        answer = self._call("GET", f"jobs/{job_id}/gain/history?points={points}")
        return [GainReport.from_json(one) for one in answer["points"]]

    def close(self) -> None:
        """Close its connections."""
        self._pool.clear()

    def _bearer(self) -> str | None:
        if self._token_file is None:
            return self._token
        try:
            return self._token_file.read_text().strip()
        except OSError as error:
            raise ServiceUnreachableError(
                f"the token for the metrics service can't be read from {self._token_file}: {error.strerror}"
            ) from error

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"{self.url}/{quote(path, safe='/?=&.')}"
        headers = {"accept": "application/json"}
        token = self._bearer()
        if token:
            headers["authorization"] = f"Bearer {token}"
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            answer = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=TIMEOUT,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ServiceUnreachableError(f"nobody answers at {self.url}: {_reason(error)}") from error
        if answer.status >= 300:
            raise ServiceRefusedError(
                _told(answer.data) or f"{url} answers with {answer.status}", answer.status
            )
        try:
            return json.loads(answer.data) if answer.data else None
        except ValueError as error:
            raise ServiceUnreachableError(
                f"{self.url} is not the address of a metrics service: its answer is not JSON"
            ) from error


def _reason(error: Exception) -> str:
    """The innermost cause: what urllib3 wraps around it is for programmers."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause)


def _told(data: bytes) -> str | None:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return None
