"""The client of the metrics service that knows a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adascale_client import MetricsServiceClient, ServiceUnreachableError
from adascale_controller.local.local_jobs import LocalJob, find_folders_of
from adascale_controller.local.runs_service import runs_service
from adascale_core import names
from adascale_core.job_id import parse_job_id


def find_urls(state_dir: Path | None, job_id: str) -> list[str]:
    """Return the addresses of the metrics services of a job's runs.

    Args:
        state_dir: the state folder of the run, or a folder of state folders; None for all.
        job_id: the job.
    """
    return [job.service.url for job in find_folders_of(state_dir, job_id) if job.service is not None]


def client_at(url: str) -> MetricsServiceClient:
    """Return the client of the service at `url`, with the token and the authority of the environment."""
    ca_file = os.environ.get(names.ENV_CA_FILE)
    return MetricsServiceClient(
        url, os.environ.get(names.ENV_TOKEN), ca_file=Path(ca_file) if ca_file else None
    )


@contextmanager
def connect(job: str, url: str | None, state_dir: Path | None) -> Iterator[MetricsServiceClient]:
    """Yield the client of the service at `url`, or of the service of the job's run.

    After the end of the run, a service is started that shows it, and stopped at the end.

    Args:
        job: the job, as the user names it.
        url: the address of the service; None to find it.
        state_dir: the state folder of the run, or a folder of state folders; None for all.

    Raises:
        InvalidJobIdError: `job` is not valid.
        ServiceUnreachableError: there is no URL, and no run of the job.
    """
    job_id = parse_job_id(job)
    found = [] if url else find_folders_of(state_dir, job_id)
    urls = [url] if url else [each.service.url for each in found if each.service is not None]
    if urls:
        yield client_at(urls[0])
        return
    if not found:
        place = "on this machine" if state_dir is None else f"in {state_dir}"
        raise ServiceUnreachableError(
            f"no run of job {job} found {place}: start it with `adascale run`, or set the address of the "
            "metrics service with --url"
        )
    latest: LocalJob = max(found, key=lambda each: each.runs[-1].began)
    with runs_service(latest.folder.path, 0, required=False) as service:
        if service is not None:
            yield MetricsServiceClient(service.process.url)
