"""Finds fields of pods that Kubernetes does not have, such as misspelt ones.

`make crd` generates the table of fields from the Kubernetes client, which a run on one machine need not have.
The operator asks the API server instead, which may be newer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from adascale_controller.validation import FieldError, FieldPath, unknown_field

_ROOTS: dict[FieldPath, str] = {
    ("metadata",): "ObjectMeta",
    ("spec", "template", "metadata"): "ObjectMeta",
    ("spec", "template", "spec"): "PodSpec",
}


def unknown_fields(content: Any) -> list[FieldError]:
    """Return the unknown fields of `metadata` and of the pod template in an AdaScaleJob of any shape."""
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
