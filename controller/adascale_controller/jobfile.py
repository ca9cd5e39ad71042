"""Reads an AdaScaleJob from a YAML file.

Everything that is wrong is told at once, each with its line and the path of its field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from adascale_controller.job import DEFAULT_ACCESS_MODE, DEFAULT_STORAGE, Checkpointing, Job
from adascale_controller.schema import Container, Document
from adascale_controller.validation import examine
from adascale_controller.yamltext import YamlTextError, dotted, read_document
from adascale_core import names
from adascale_core.errors import InvalidJobError
from adascale_core.messages import JobSpec


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a job file.

    Args:
        message: what was got, what is allowed.
        field: its path, as in `spec.maxBatchSize`; empty for the file itself.
        line: in the file, from 1, where known.
    """

    message: str
    field: str = ""
    line: int | None = None


class JobFileError(InvalidJobError):
    """A file that holds no valid AdaScaleJob.

    Args:
        source: the file, as the user named it.
        problems: all that is wrong with it.
    """

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(self._line(problem) for problem in problems))

    def _line(self, problem: Problem) -> str:
        place = f"{self.source}:{problem.line}" if problem.line else self.source
        return (
            f"{place}: {problem.field}: {problem.message}" if problem.field else f"{place}: {problem.message}"
        )


def load_job(path: Path) -> Job:
    """The job in the YAML file at `path`.

    Raises:
        JobFileError: the file can't be read, isn't YAML, or isn't one valid AdaScaleJob.
    """
    source = str(path)
    return parse_job(_read(path, source), source)


def parse_job(text: str, source: str = "<text>") -> Job:
    """The job in a YAML text; `source` names it in messages.

    Raises:
        JobFileError: as `load_job`.
    """
    try:
        yaml = read_document(text)
    except YamlTextError as error:
        raise JobFileError(source, [Problem(str(error), line=error.line)]) from None
    examined = examine(yaml.content)
    if isinstance(examined, list):
        problems = [Problem(message, dotted(place), yaml.line(place)) for place, message in examined]
        raise JobFileError(source, sorted(problems, key=lambda problem: problem.line or 0))
    return job_of(examined)


def _read(path: Path, source: str) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        problem = "there is no such file"
    except UnicodeDecodeError as error:
        problem = f"is not a text in UTF-8 (byte {error.start})"
    except OSError as error:
        problem = f"can't be read: {error.strerror}"
    raise JobFileError(source, [Problem(problem)])


def job_of(document: Document) -> Job:
    """The job in a document that is valid."""
    spec = document.spec
    container = worker_container(spec.template.spec.containers)
    bounds = spec.local_bsz_bounds
    checkpoint = spec.checkpoint
    return Job(
        id=names.job_id(document.metadata.name, document.metadata.namespace),
        spec=JobSpec(
            batch_size=spec.batch_size,
            max_batch_size=spec.max_batch_size,
            local_bsz_bounds=(bounds.lower, bounds.upper) if bounds else None,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            scale_invariant_steps=spec.scale_invariant_steps,
            efficiency_target=spec.efficiency_target,
        ),
        command=(*container.command, *container.args) if container.command else (),
        env=MappingProxyType({one.name: one.value or "" for one in container.env if one.value_from is None}),
        working_dir=container.working_dir,
        replicas=spec.replicas,
        suspend=spec.suspend,
        backoff_limit=spec.backoff_limit,
        active_deadline_seconds=spec.active_deadline_seconds,
        ttl_seconds_after_finished=spec.ttl_seconds_after_finished,
        checkpoint=Checkpointing(
            claim_name=checkpoint.claim_name,
            path=checkpoint.path,
            storage=DEFAULT_STORAGE if checkpoint.storage is None else str(checkpoint.storage),
            storage_class_name=checkpoint.storage_class_name,
            access_mode=checkpoint.access_mode or DEFAULT_ACCESS_MODE,
            interval_seconds=checkpoint.interval_seconds,
        ),
        left_out=tuple(_left_out(container)),
    )


def worker_container(containers: Sequence[Container]) -> Container:
    """The container that trains: the one named `worker`, or the first."""
    return next((one for one in containers if one.name == names.WORKER_CONTAINER), containers[0])


def _left_out(container: Container) -> Iterator[str]:
    for one in container.env:
        if one.value_from is not None:
            yield f"environment variable {one.name}: its valueFrom ({', '.join(one.value_from)})"
    if container.env_from:
        yield "the environment variables of envFrom"
