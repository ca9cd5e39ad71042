"""Prints the fields of pods, from the models of the Kubernetes client: see `make crd`.

Each object has a line: its fields, each with the name of its object, or with an empty text.
"""

from __future__ import annotations

import json
import re

from kubernetes.client import models


def pod_fields() -> dict[str, dict[str, str]]:
    """Return the fields of each object in a pod: name of the object -> field -> name of its object."""
    found: dict[str, dict[str, str]] = {}
    due = ["PodSpec", "ObjectMeta"]
    while due:
        name = due.pop()
        if name not in found:
            model = _model(name)
            found[name] = {
                model.attribute_map[field]: _object(kind) for field, kind in model.openapi_types.items()
            }
            due += filter(None, found[name].values())
    return dict(sorted(found.items()))


def _object(kind: str) -> str:
    """Return the name of the object in a type such as `List[V1Container]`; empty if there is none."""
    name = re.sub(r"^List\[(.*)\]$", r"\1", kind).removeprefix("V1")
    return name if _model(name) is not None else ""


def _model(name: str):  # type: ignore[no-untyped-def]
    return getattr(models, f"V1{name}", None) or getattr(models, name, None)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in pod_fields().items())
    print("{\n" + ",\n".join(lines) + "\n}")
