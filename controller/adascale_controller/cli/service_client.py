"""The client of the metrics service that knows a job."""

from __future__ import annotations

import os
from pathlib import Path

from adascale_client import MetricsServiceClient, ServiceUnreachableError
from adascale_controller.local import service_file
from adascale_controller.local.local_jobs import find_jobs
from adascale_core import names
from adascale_core.job_id import parse_job_id


def connect(job: str, url: str | None, state_dir: Path) -> MetricsServiceClient:
    """Return the client of the service at `url`, or of the service of the job's run.

    Args:
        job: the job, as the user names it.
        url: the address of the service; None to find it.
        state_dir: the state folder of the run, or a folder of state folders.

    Raises:
        InvalidJobIdError: `job` is not valid.
        ServiceUnreachableError: there is no URL, and no run of the job.
    """
    job_id = parse_job_id(job)
    urls = [url] if url else service_file.find_urls(state_dir, job_id)
    if not urls and any(each.id == job_id for each in find_jobs(state_dir)):
        raise ServiceUnreachableError(
            f"job {job} is not running, and its metrics service ended with the run: "
            f"`adascale status {job}` shows the result"
        )
    if not urls:
        raise ServiceUnreachableError(
            f"no run of job {job} found in {state_dir}: start it with `adascale run`, or set the address of "
            "the metrics service with --url"
        )
    return MetricsServiceClient(urls[0], os.environ.get(names.ENV_TOKEN))
