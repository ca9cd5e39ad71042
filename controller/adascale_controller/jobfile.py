"""Reads an AdaScaleJob from a YAML file and reports every error in it with its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adascale_controller.field_error import FieldError
from adascale_controller.job import Job, to_job, worker_container
from adascale_controller.schema import AdaScaleJobDocument
from adascale_controller.validation import validate_document
from adascale_controller.yaml_document import YamlDocumentError, parse_document
from adascale_core.errors import InvalidJobError


class JobFileError(InvalidJobError):
    """A file that does not contain one valid AdaScaleJob.

    Args:
        source: the file, as the user named it.
        errors: all errors in it.
    """

    def __init__(self, source: str, errors: Sequence[FieldError]) -> None:
        self.source = source
        self.errors = tuple(errors)
        super().__init__("\n".join(self._format(error) for error in errors))

    def _format(self, error: FieldError) -> str:
        return f"{self.source}:{error.line}: {error}" if error.line else f"{self.source}: {error}"


def load_job(path: Path) -> Job:
    """Read the job in the YAML file at `path`."""
    source = str(path)
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise JobFileError(source, [FieldError((), "no such file")]) from None
    except UnicodeDecodeError as error:
        raise JobFileError(source, [FieldError((), f"is not valid UTF-8 (byte {error.start})")]) from None
    except OSError as error:
        raise JobFileError(source, [FieldError((), f"cannot be read: {error.strerror}")]) from None
    return parse_job(text, source)


def parse_job(text: str, source: str = "<text>") -> Job:
    """Read the job in a YAML text; `source` names the text in messages."""
    try:
        yaml = parse_document(text)
    except YamlDocumentError as error:
        raise JobFileError(source, [FieldError((), str(error), error.line)]) from None
    document = validate_document(yaml.content)
    if isinstance(document, list):
        errors = [replace(error, line=yaml.line(error.path)) for error in document]
        raise JobFileError(source, sorted(errors, key=lambda error: error.line or 0))
    command_error = _command_error(document)
    if command_error is not None:
        raise JobFileError(source, [replace(command_error, line=yaml.line(command_error.path))])
    return to_job(document)


def _command_error(document: AdaScaleJobDocument) -> FieldError | None:
    """Return the error if the container that trains has no command.

    On a cluster, the entry point of its image runs then, so only job files require a command.
    """
    template = document.spec.template
    worker = worker_container(template)
    if worker.command:
        return None
    path = ("spec", "template", "spec", "containers", template.spec.containers.index(worker), "command")
    fix = "set the training program, such as [python, train.py]"
    if worker.args:
        fix = f"move args {list(worker.args)} to it, if they are the training program"
    return FieldError(path, f"is required, since this machine does not run the image's entry point: {fix}")
