"""What is wrong with an AdaScaleJob, in words, at its fields.

The shape is checked by `schema`; what the values must be to each other is asked of the core, whose
words are kept, with its names turned into those of the YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from adascale_controller.schema import Document, JobSection
from adascale_controller.yamltext import Place, dotted
from adascale_core import names
from adascale_core.batch import BatchBounds, InvalidBoundsError, require_valid_replicas
from adascale_core.errors import InvalidJobError

Finding = tuple[Place, str]
"""Where, and what is wrong there."""

_RULED = frozenset({"batchSize", "maxBatchSize", "localBszBounds", "minReplicas", "maxReplicas"})
"""The fields of `spec` that the core has rules for."""


def examine(content: Any) -> Document | list[Finding]:
    """The document, or all that is wrong with it."""
    header = _header_findings(content)
    if header:
        return header
    try:
        document = Document.model_validate(content)
    except ValidationError as invalid:
        shape = [_shape_finding(error) for error in invalid.errors(include_url=False)]
        return shape + _rule_findings(_Sizes.among(content, shape))
    return _rule_findings(_Sizes.of(document.spec)) or document


# -- shape ---------------------------------------------------------------------------------------------


def _header_findings(content: Any) -> list[Finding]:
    """Whether this is an AdaScaleJob at all: if not, its other fields needn't be looked at."""
    if not isinstance(content, dict):
        return [((), f"is {_show(content)}; it must hold apiVersion, kind, metadata and spec")]
    findings: list[Finding] = []
    for field, expected in (("apiVersion", names.GROUP_VERSION), ("kind", names.KIND)):
        if field not in content:
            near = _near(field, [key for key in content if isinstance(key, str)])
            hint = f"; {near!r} is there instead" if near else ""
            findings.append(((), f"{field} is missing: it must be {expected}{hint}"))
        elif content[field] != expected:
            findings.append(((field,), f"must be {expected}, got {_show(content[field])}"))
    return findings


def _shape_finding(error: ErrorDetails) -> Finding:
    path = tuple(error["loc"])
    got = error["input"]
    match error["type"]:
        case "missing":
            return path[:-1], f"{path[-1]} is missing"
        case "extra_forbidden":
            return path, _unknown_field(path)
        case "int_type" | "int_from_float":
            return path, f"must be a whole number, got {_show(got)}"
        case "float_type":
            return path, f"must be a number, got {_show(got)}"
        case "finite_number":
            return path, f"must be a finite number, got {_show(got)}"
        case "bool_type":
            return path, f"must be true or false, got {_show(got)}"
        case "string_type":
            quoted = f': write "{got}"' if isinstance(got, int | float) and not isinstance(got, bool) else ""
            return path, f"must be a text, got {_show(got)}{quoted}"
        case "list_type":
            return path, f"must be a list, got {_show(got)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return path, f"must hold fields, got {_show(got)}"
        case "greater_than_equal":
            return path, f"must be at least {error['ctx']['ge']:.17g}, got {_show(got)}"
        case "greater_than":
            return path, f"must be more than {error['ctx']['gt']:.17g}, got {_show(got)}"
        case "less_than_equal":
            return path, f"must be at most {error['ctx']['le']:.17g}, got {_show(got)}"
        case "too_short" | "string_too_short":
            return path, "must not be empty"
        case "string_too_long":
            return path, f"must have at most {error['ctx']['max_length']} characters, got {len(got)}"
        case "string_pattern_mismatch":
            return path, f"must match {error['ctx']['pattern']}, got {_show(got)}"
        case "literal_error":
            return path, f"must be {error['ctx']['expected'].replace(chr(39), '')}, got {_show(got)}"
        case "expected":
            return path, f"{error['msg']}, got {_show(got)}"
        case "told":
            return path, error["msg"]
        case _:
            return path, f"{error['msg'].lower()}, got {_show(got)}"


def _show(value: Any) -> str:
    """A value as one would call it, short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"fields ({', '.join(str(key) for key in list(value)[:3])}{', ...' if len(value) > 3 else ''})"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = str(value)
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return f"the text {shown!r}" if isinstance(value, str) else shown


def _unknown_field(path: Place) -> str:
    section = _section(path[:-1])
    known = [field.alias or name for name, field in section.model_fields.items()]
    near = _near(str(path[-1]), known)
    if near:
        return f"there is no such field; did you mean {near}?"
    return (
        f"there is no such field; those of {dotted(path[:-1]) or 'an ' + names.KIND} are {', '.join(known)}"
    )


def _section(path: Place) -> type[BaseModel]:
    """The model of the section at `path`."""
    section: type[BaseModel] = Document
    for part in path:
        field = next((f for name, f in section.model_fields.items() if (f.alias or name) == part), None)
        if field is not None:
            section = next(_models(field.annotation), section)
    return section


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            yield candidate


def _near(wrong: str, known: Sequence[str]) -> str | None:
    """The known name that `wrong` probably means: case and underscores don't matter."""
    plain = {name.lower(): name for name in known}
    near = get_close_matches(wrong.replace("_", "").replace("-", "").lower(), plain, n=1, cutoff=0.7)
    return plain[near[0]] if near else None


# -- rules ---------------------------------------------------------------------------------------------

_CORE_NAME = re.compile(r"\b(max_batch_size|batch_size|local_bsz_bounds)\b")


@dataclass(frozen=True)
class _Sizes:
    """The fields of `spec` that the core has rules for; none where there is no right value."""

    batch_size: int | None
    max_batch_size: int | None
    local_bsz_bounds: tuple[int, int] | None
    min_replicas: int | None
    max_replicas: int | None

    @classmethod
    def of(cls, spec: JobSection) -> Self:
        """Those of a spec that has the right shape."""
        local = spec.local_bsz_bounds
        return cls(
            spec.batch_size,
            spec.max_batch_size,
            (local.lower, local.upper) if local else None,
            spec.min_replicas,
            spec.max_replicas,
        )

    @classmethod
    def among(cls, content: Mapping[str, Any], wrong: Sequence[Finding]) -> Self:
        """The right ones of a file of which some fields are wrong, perhaps of these too."""
        spec = content.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        at = {place[1] for place, _ in wrong if len(place) > 1 and place[0] == "spec"}
        right = {field: spec[field] for field in _RULED if spec.get(field) is not None and field not in at}
        local = right.get("localBszBounds")
        return cls(
            right.get("batchSize"),
            right.get("maxBatchSize"),
            (local["lower"], local["upper"]) if local else None,
            right.get("minReplicas", None if "minReplicas" in at else 1),
            right.get("maxReplicas"),
        )


def _rule_findings(sizes: _Sizes) -> list[Finding]:
    """What the core says of the sizes and counts."""
    findings: list[Finding] = []
    # Each bound by itself, so that both are told of.
    for max_batch_size, local_bsz_bounds in ((sizes.max_batch_size, None), (None, sizes.local_bsz_bounds)):
        try:
            BatchBounds(sizes.batch_size or 1, max_batch_size, local_bsz_bounds)
        except InvalidBoundsError as error:
            findings.append(_at_its_field(error))
    low, high = sizes.min_replicas, sizes.max_replicas
    if low is not None and high is not None and low > high:
        findings.append(
            (("spec", "minReplicas"), f"{low} is over maxReplicas {high}: it must be at most that")
        )
    if findings or sizes.batch_size is None or low is None or high is None:
        return findings
    try:
        bounds = BatchBounds(sizes.batch_size, sizes.max_batch_size, sizes.local_bsz_bounds)
        require_valid_replicas(bounds, low, high)
    except InvalidJobError as error:
        return [(("spec",), _spelled_as_in_yaml(str(error)))]
    return []


def _at_its_field(error: InvalidBoundsError) -> Finding:
    """The core's message, at the field that it names first."""
    message = _spelled_as_in_yaml(str(error))
    field = message.split()[0]
    return ("spec", field), message.removeprefix(f"{field} ")


def _spelled_as_in_yaml(message: str) -> str:
    return _CORE_NAME.sub(lambda found: to_camel(found[0]), message)
