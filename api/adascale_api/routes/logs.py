"""The output of replicas on this machine, while they run and afterwards."""

import errno
import os
import stat
from codecs import getincrementaldecoder
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool

from adascale_api.routes.common import LOG_READER, OF_A_JOB, JobId, ServiceOf
from adascale_core.names import MAX_REPLICAS
from adascale_core.views.jobs import LogView

MAX_BYTES = 64 * 1024
"""Bytes of an output in an answer."""

router = APIRouter(prefix="/jobs/{job}/logs", tags=["jobs"], responses=OF_A_JOB)


@router.get("/{replica}", summary="Read the output of a replica", dependencies=LOG_READER)
async def get_log(
    service: ServiceOf,
    job: JobId,
    replica: Annotated[int, Path(ge=0, lt=MAX_REPLICAS, description="The index of the replica.")],
    after: Annotated[
        int | None, Query(ge=0, description="The `next` of the last answer; omitted for the last lines.")
    ] = None,
) -> LogView:
    """Returns the last lines of the output of a replica, or what followed since the last answer, at most
    64 KiB. Only services of one machine have it, which `adascale run` and `adascale ui` start: on a cluster,
    `kubectl logs` shows it."""
    if service.settings.logs is None:
        missing = f"this service does not have the output of job {job}: `kubectl logs` shows that of its pods"
        return LogView("", 0, continues=False, missing=missing)
    file = service.settings.logs / f"replica-{replica}.log"
    try:
        return await run_in_threadpool(_read, file, after)
    except FileNotFoundError:
        missing = f"replica {replica} of job {job} has no output"
    except OSError as error:
        missing = f"the output of replica {replica} of job {job} can't be read: {error.strerror}"
    return LogView("", 0, continues=False, missing=missing)


def _read(path: FilePath, after: int | None) -> LogView:
    # Opening a pipe would wait for a program that writes it.
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{path} is no regular file")
        size = status.st_size
        # A shorter file is that of a run that has started over.
        is_continued = after is not None and after <= size
        start = after if after is not None and is_continued else max(size - MAX_BYTES, 0)
        file.seek(start)
        content = file.read(MAX_BYTES)
    if start and not is_continued:
        # Without the rest of a line that is cut.
        rest = content.find(b"\n") + 1
        start, content = start + rest, content[rest:]
    # A character that is not written completely yet is part of the next answer.
    decoder = getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content)
    return LogView(text, start + len(content) - len(decoder.getstate()[0]), is_continued)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
