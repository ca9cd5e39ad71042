"""Reads an AdaScaleJob from a YAML file and reports every error in it with its line, misspelt fields too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from adascale_controller.schema import JobDefinition
from adascale_controller.validation import FieldError, FieldPath, unknown_field, validate_document
from adascale_core.errors import InvalidJobError


class YamlDocumentError(Exception):
    """A text that is not one YAML document.

    Args:
        message: what is wrong with it.
        line: where, from 1; None if unknown.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class YamlDocument:
    """A YAML document."""

    content: Any
    root: yaml.Node  # the node that they were constructed from

    def line(self, path: FieldPath) -> int:
        """Return the line of the field at `path`, from 1; if it is missing, of the nearest parent."""
        node = self.root
        line = node.start_mark.line + 1
        for part in path:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            elif isinstance(node, yaml.MappingNode):
                entry = next(((key, value) for key, value in node.value if key.value == part), None)
                if entry is None:
                    return line
                line, node = entry[0].start_mark.line + 1, entry[1]
            else:
                return line
        return line


def parse_document(text: str) -> YamlDocument:
    """Parse the document in `text`."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        nodes = []
        while loader.check_node():
            nodes.append(loader.get_node())
        documents = [node for node in nodes if node is not None and not _is_null(node)]
        if not documents:
            raise YamlDocumentError("is empty; it must contain one YAML document")
        if len(documents) > 1:
            raise YamlDocumentError(f"contains {len(documents)} YAML documents; it must contain one")
        return YamlDocument(loader.construct_document(documents[0]), documents[0])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be parsed"
        if error.context_mark and mark and error.context_mark.line < mark.line:
            problem += f", {error.context} that begins in line {error.context_mark.line + 1}"
        raise YamlDocumentError(f"is not valid YAML: {problem}", mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlDocumentError(f"is not valid YAML: {str(error).partition(chr(10))[0]}") from None
    except RecursionError:
        raise YamlDocumentError("is not valid YAML: it is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Loader(yaml.SafeLoader):
    """The safe loader, which also rejects duplicate fields: YAML's own silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        fields: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in fields:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate field {key.value!r}", key.start_mark
                    )
                fields.add(key.value)
        return super().construct_mapping(node, deep)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


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


def load_job(path: Path) -> JobDefinition:
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


def parse_job(text: str, source: str = "<text>") -> JobDefinition:
    """Read the job in a YAML text; `source` names the text in messages."""
    try:
        yaml = parse_document(text)
    except YamlDocumentError as error:
        raise JobFileError(source, [FieldError((), str(error), error.line)]) from None
    document = validate_document(yaml.content)
    found = [*(document if isinstance(document, list) else ()), *unknown_fields(yaml.content)]
    if isinstance(document, list) or found:
        errors = [replace(error, line=yaml.line(error.path)) for error in found]
        raise JobFileError(source, sorted(errors, key=lambda error: error.line or 0))
    command_error = _command_error(document)
    if command_error is not None:
        raise JobFileError(source, [replace(command_error, line=yaml.line(command_error.path))])
    return document


def _command_error(document: JobDefinition) -> FieldError | None:
    """Return the error if the container that trains has no command.

    On a cluster, the entry point of its image runs then, so only job files require a command.
    """
    worker, containers = document.worker, document.spec.template.spec.containers
    if worker.command:
        return None
    path = ("spec", "template", "spec", "containers", containers.index(worker), "command")
    fix = "set the training program, such as [python, train.py]"
    if worker.args:
        fix = f"move args {list(worker.args)} to it, if they are the training program"
    return FieldError(path, f"is required, since this machine does not run the image's entry point: {fix}")


_ROOTS: dict[FieldPath, str] = {
    ("metadata",): "ObjectMeta",
    ("spec", "template", "metadata"): "ObjectMeta",
    ("spec", "template", "spec"): "PodSpec",
}


def unknown_fields(content: Any) -> list[FieldError]:
    """Return the fields of `metadata` and of the pod template that Kubernetes does not have.

    `make crd` generates the table of fields from the Kubernetes client, which a run on one machine need not
    have. The operator asks the API server instead, which may be newer.
    """
    table = json.loads(files(__package__).joinpath("pod_fields.json").read_text())
    errors: list[FieldError] = []
    for path, kind in _ROOTS.items():
        value = content
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        errors += _unknown_fields(value, table, kind, path)
    return errors


def _unknown_fields(
    value: Any, table: dict[str, dict[str, str]], kind: str, path: FieldPath
) -> Iterator[FieldError]:
    objects = (
        {(*path, index): item for index, item in enumerate(value)}
        if isinstance(value, list)
        else {path: value}
    )
    for parent, fields in objects.items():
        if not isinstance(fields, dict):
            continue
        for name, member in fields.items():
            field = (*parent, name)
            if name not in table[kind]:
                yield FieldError(field, unknown_field(field, list(table[kind])))
            elif table[kind][name]:
                yield from _unknown_fields(member, table, table[kind][name], field)
