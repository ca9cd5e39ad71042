"""Follows a job of a cluster with the display of `adascale run`."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.text import Text

from adascale_client import MetricsServiceClient, ServiceRefusedError, ServiceUnreachableError
from adascale_controller.cluster.api import Api, events_path
from adascale_controller.cluster.cluster_job import ClusterJob
from adascale_controller.cluster.cluster_jobs import ClusterJobs, NoSuchJobError
from adascale_controller.cluster.errors import (
    ApiServerUnreachableError,
    ClusterError,
    NotPermittedError,
    RejectedError,
)
from adascale_controller.formatting import count, duration
from adascale_controller.local.display import Display, RunStatus
from adascale_controller.operator.types.conditions import Condition, ConditionType
from adascale_core import names
from adascale_core.messages.reports import GainReport
from adascale_core.views.job_state_name import JobStateName

INTERVAL = 1.0
"""Seconds between two reads of a job."""
_TEMPORARY = {429, 500, 502, 503, 504}
"""The statuses with which an API server answers while it starts, or has too many requests."""
FAILED = 1
"""Exit code if the job fails, or is deleted."""


class JobFollower:
    """Shows the Events, the state and the reports of a job until it ends."""

    def __init__(
        self,
        api: Api,
        jobs: ClusterJobs,
        client: MetricsServiceClient,
        display: Display,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._jobs = jobs
        self._client = client
        self._display = display
        self._sleep = sleep
        self._shown_events: set[str] = set()
        self._shown_reason = ""
        self._noted: set[str] = set()

    def follow(self, job: ClusterJob) -> int:
        """Show a job until it ends or is stopped. Returns the exit code of the command."""
        began = time.monotonic()
        remembered = False
        while True:
            try:
                if not remembered:
                    self._remember_events(job)
                    remembered = True
                now = self._jobs.find(job.id)
                self._show_events(now)
                self._show_reason(now)
                self._display.update(self._status(now))
                code = self._end(now, time.monotonic() - began)
            except NoSuchJobError:
                self._display.close()
                self._display.message(f"{job.name} was deleted", "yellow")
                return FAILED
            except ApiServerUnreachableError as error:
                self._note(str(error))
                code = None
            except RejectedError as error:
                if error.status not in _TEMPORARY:
                    raise
                self._note(str(error))
                code = None
            if code is not None:
                return code
            self._sleep(INTERVAL)

    # -- parts ----------------------------------------------------------------------------------------------

    def _remember_events(self, job: ClusterJob) -> None:
        """Events from before the job was submitted again are not shown."""
        if job.generation > 1:
            self._shown_events |= {uid for uid, _, _ in self._events(job)}

    def _show_events(self, job: ClusterJob) -> None:
        for uid, message, warning in self._events(job):
            if uid not in self._shown_events:
                self._shown_events.add(uid)
                self._display.message(message, "yellow" if warning else "cyan")

    def _events(self, job: ClusterJob) -> list[tuple[str, str, bool]]:
        """Return uid, message and whether it is a warning of the Events of a job, by time."""
        query = [("fieldSelector", f"involvedObject.kind={names.KIND},involvedObject.uid={job.uid}")]
        try:
            items = self._api.call("GET", events_path(job.namespace), query)["items"]
        except NotPermittedError as error:
            self._note(f"Events are not shown: {error}")
            return []
        items.sort(key=lambda item: (item.get("lastTimestamp") or "", item["metadata"]["creationTimestamp"]))
        return [
            (item["metadata"]["uid"], item.get("message") or item["reason"], item.get("type") == "Warning")
            for item in items
        ]

    def _show_reason(self, job: ClusterJob) -> None:
        """Show why it does not train, each time that the reason changes."""
        condition, shown_at_end = job.condition, job.has_ended or job.is_stopped
        reason = ""
        if condition is not None and not condition.status and not shown_at_end:
            reason = job.reason or condition.message
        if reason != self._shown_reason:
            self._shown_reason = reason
            if reason:
                self._display.message(reason)

    def _status(self, job: ClusterJob) -> RunStatus:
        report = self._report(job)
        total = job.steps or (report.target if report else None)
        if report is None:
            return RunStatus(_activity(job), job.progress or 0.0, total)
        return RunStatus(_activity(job), report.progress, total, report, report.seconds_left(total))

    def _report(self, job: ClusterJob) -> GainReport | None:
        """Return the latest report of a job; None if there is none, or it cannot be read."""
        if job.progress is None and not job.status.get("replicas"):
            return None
        try:
            return self._client.get_gain(job.id).report
        except ServiceRefusedError as error:
            if error.status != 404:
                self._note(f"The gain is not shown: {error}")
        except (ServiceUnreachableError, ClusterError) as error:
            self._note(f"The gain is not shown: {error}")
        return None

    def _end(self, job: ClusterJob, seconds: float) -> int | None:
        """Show the end of a job. Returns the exit code; None if it has not ended."""
        at = "" if job.progress is None else f" at progress {count(job.progress)}"
        if job.state is JobStateName.COMPLETE:
            self._display.close()
            self._display.message(f"Finished{at} in {duration(seconds)}", "bold green")
            return 0
        if job.state is JobStateName.FAILED:
            condition = job.condition or Condition(ConditionType.FAILED, True, "Failed")
            self._display.close()
            self._display.print(Text(f"{condition.reason}: {condition.message}"))
            self._display.message(
                f"Failed{at}: correct the cause, delete the job, and submit it again", "bold red"
            )
            return FAILED
        # Others may have suspended its Indexed Job, and let it continue later.
        if job.state is JobStateName.SUSPENDED and job.is_stopped and job.is_observed:
            self._display.close()
            self._display.message(f"Stopped{at}; submit the same file to resume", "bold")
            return 0
        return None

    def _note(self, text: str) -> None:
        """Show a message once."""
        if text not in self._noted:
            self._noted.add(text)
            self._display.message(text, "yellow")


def _activity(job: ClusterJob) -> str:
    replicas, desired = job.status.get("replicas") or 0, job.status.get("desiredReplicas") or 0
    if replicas and desired and replicas != desired:
        return f"{replicas} -> {desired} replicas"
    return "" if job.state is JobStateName.RUNNING else job.state.lower()
