"""Validates an AdaScaleJob and reports all errors of fields, and then those of sizes.

`schema` checks the shape: fields, types and limits. Where all of them are valid, the core checks the values
against each other; its messages are kept, with its names spelled as in the YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from adascale_controller.schema import (
    INVALID_VALUE,
    INVALID_VALUE_WITHOUT_INPUT,
    AdaScaleJobSpec,
    JobDefinition,
)
from adascale_core import names
from adascale_core.batch.plans import BatchBounds, InvalidBoundsError, require_valid_replicas
from adascale_core.errors import InvalidJobError

FieldPath = tuple[str | int, ...]
"""Field names and list indices from the root of a document; empty for the document itself."""


_CORE_NAME = re.compile(r"\b(max_batch_size|batch_size|local_bsz_bounds|processes_per_replica)\b")


def format_path(path: FieldPath) -> str:
    """Return a path as Kubernetes writes it: `spec.containers[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class FieldError:
    """An error at one field.

    Args:
        path: the field; empty for the document itself.
        message: the value found and the values allowed.
        line: its line in the file, from 1; None if unknown.
    """

    path: FieldPath
    message: str
    line: int | None = None

    @property
    def field(self) -> str:
        """The path as text, as in `spec.maxBatchSize`; empty for the document itself."""
        return format_path(self.path)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.path else self.message


def validate_document(content: Any) -> JobDefinition | list[FieldError]:
    """Return the document in `content`, or all errors of its fields."""
    errors = _header_errors(content)
    if errors:
        return errors
    try:
        document = JobDefinition.model_validate(content)
    except ValidationError as invalid:
        return [_shape_error(error) for error in invalid.errors(include_url=False)]
    errors = [*_size_errors(document.spec), *_spare_errors(document)]
    return errors or document


def _spare_errors(document: JobDefinition) -> list[FieldError]:
    """Return an error if there are too many spares, or if Kueue is to admit them."""
    spec = document.spec
    most = names.MAX_REPLICAS - spec.max_replicas
    if spec.spare_replicas > most:
        message = (
            f"must be at most {most} with maxReplicas {spec.max_replicas}, since replicas and spares "
            f"together are at most {names.MAX_REPLICAS}, got {spec.spare_replicas}"
        )
        return [FieldError(("spec", "spareReplicas"), message)]
    labels = (document.metadata.model_extra or {}).get("labels")
    if spec.spare_replicas and isinstance(labels, dict) and labels.get(names.LABEL_QUEUE):
        message = (
            f"must be 0 with the label {names.LABEL_QUEUE}, since spares that Kueue admits were not tried, "
            f"got {spec.spare_replicas}: remove the label, or spareReplicas"
        )
        return [FieldError(("spec", "spareReplicas"), message)]
    return []


# -- shape ---------------------------------------------------------------------------------------------


def _header_errors(content: Any) -> list[FieldError]:
    """Return the errors that show that this is no AdaScaleJob; its other fields are not checked then."""
    if not isinstance(content, dict):
        message = f"must be an object with apiVersion, kind, metadata and spec, got {_describe(content)}"
        return [FieldError((), message)]
    errors: list[FieldError] = []
    for field, required in (("apiVersion", names.GROUP_VERSION), ("kind", names.KIND)):
        if field not in content:
            similar = _most_similar(field, [key for key in content if isinstance(key, str)])
            hint = f"; found {similar!r}, which is not the same" if similar else ""
            errors.append(FieldError((field,), f"is required and must be {required}{hint}"))
        elif content[field] != required:
            errors.append(FieldError((field,), f"must be {required}, got {_describe(content[field])}"))
    return errors


def _shape_error(error: ErrorDetails) -> FieldError:
    path = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        model = _model_at(path[:-1])
        fields = [field.alias or name for name, field in model.model_fields.items()]
        return FieldError(path, unknown_field(path, fields))
    return FieldError(path, _shape_message(error))


_MESSAGES: Final = {
    "missing": "is required",
    "int_type": "must be an integer, got {got}",
    "int_from_float": "must be an integer, got {got}",
    "float_type": "must be a number, got {got}",
    "finite_number": "must be a finite number, got {got}",
    "bool_type": "must be true or false, got {got}",
    "string_type": "must be a string, got {got}",
    "list_type": "must be a list, got {got}",
    "model_type": "must be an object, got {got}",
    "model_attributes_type": "must be an object, got {got}",
    "dict_type": "must be an object, got {got}",
    "greater_than_equal": "must be at least {ge:.17g}, got {got}",
    "greater_than": "must be greater than {gt:.17g}, got {got}",
    "less_than_equal": "must be at most {le:.17g}, got {got}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters, got {length}",
    "string_pattern_mismatch": "must match {pattern}, got {got}",
    "literal_error": "must be {expected}, got {got}",
    INVALID_VALUE: "{message}, got {got}",
    INVALID_VALUE_WITHOUT_INPUT: "{message}",
}
"""The messages about the types of errors of pydantic, and of the schema."""


def _shape_message(error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], dict(error.get("ctx", {}))
    if kind == "string_too_long":
        context["length"] = len(value)
    if kind == "literal_error":
        context["expected"] = context["expected"].replace("'", "")
    context |= {"got": _describe(value), "found": error["msg"].lower()}
    message = _MESSAGES.get(kind, "{found}, got {got}").format(**context)
    if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        return f'{message}: write "{value}"'
    if kind == "list_type" and isinstance(value, str) and value.split():
        return f"{message}: write [{', '.join(value.split())}]"
    return message


def _describe(value: Any) -> str:
    """Return a short description of a YAML value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        keys = ", ".join(str(key) for key in list(value)[:3])
        return f"an object ({keys}{', ...' if len(value) > 3 else ''})" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = str(value)
    shortened = text if len(text) <= 40 else f"{text[:37]}..."
    return f"the string {shortened!r}" if isinstance(value, str) else shortened


def unknown_field(path: FieldPath, fields: Sequence[str]) -> str:
    """Return that an object has no such field, with the most similar one of its fields, or with all."""
    similar = _most_similar(str(path[-1]), fields)
    if similar:
        return f"unknown field; did you mean {similar}?"
    return f"unknown field; the fields of {format_path(path[:-1]) or names.KIND} are {', '.join(fields)}"


def _model_at(path: FieldPath) -> type[BaseModel]:
    """Return the model of the object at `path`."""
    model: type[BaseModel] = JobDefinition
    for part in path:
        field = next((f for name, f in model.model_fields.items() if (f.alias or name) == part), None)
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            yield candidate


def _most_similar(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that `name` is probably a misspelling of; case and underscores do not count."""
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    plain = name.replace("_", "").replace("-", "").lower()
    similar = (
        get_close_matches(plain, by_lower_case, n=1, cutoff=0.8)
        or sorted(filter(plain.startswith, by_lower_case), key=len)[-1:]  # such as env for environment
        or get_close_matches(plain, by_lower_case, n=1, cutoff=0.7)
    )
    return by_lower_case[similar[0]] if similar else None


# -- sizes and counts ----------------------------------------------------------------------------------


def _size_errors(spec: AdaScaleJobSpec) -> list[FieldError]:
    """Return the first error of the sizes and counts, which depend on each other."""
    low, high, local = spec.min_replicas, spec.max_replicas, spec.local_bsz_bounds
    if low > high:
        message = f"{low} is greater than maxReplicas {high}: lower minReplicas, or raise maxReplicas"
        return [FieldError(("spec", "minReplicas"), message)]
    try:
        bounds = BatchBounds(
            spec.batch_size,
            spec.max_batch_size,
            (local.lower, local.upper) if local is not None else None,
            processes=spec.processes_per_replica or 1,
        )
        require_valid_replicas(bounds, low, high)
    except InvalidBoundsError as error:
        return [_at_its_field(error)]
    except InvalidJobError as error:
        return [FieldError(("spec",), _spelled_as_in_yaml(str(error)))]
    return []


def _at_its_field(error: InvalidBoundsError) -> FieldError:
    """Return the core's error at the field that its message names first."""
    message = _spelled_as_in_yaml(str(error))
    field = message.split()[0]
    return FieldError(("spec", field), message.removeprefix(f"{field} "))


def _spelled_as_in_yaml(message: str) -> str:
    return _CORE_NAME.sub(lambda match: to_camel(match[0]), message)
