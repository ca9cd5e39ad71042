"""The docs say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adascale_controller.operator.types.conditions import Reason
from adascale_controller.schema import AdaScaleJobSpec, Checkpoint

ROOT = Path(__file__).parents[2]
KUBERNETES = (ROOT / "docs" / "kubernetes.md").read_text()
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_of_a_condition_is_explained(reason: Reason) -> None:
    rows = [line for line in KUBERNETES.splitlines() if line.startswith("| `")]
    assert any(f"`{reason}`" in row.split("|")[1] for row in rows), (
        f"docs/kubernetes.md has no row for {reason}"
    )


def test_each_reason_that_is_explained_exists() -> None:
    section = KUBERNETES.split("## Conditions of a job")[1].split("\n## ")[0]
    explained = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert explained == set(Reason)


@pytest.mark.parametrize("field", [field.alias for field in AdaScaleJobSpec.model_fields.values()])
def test_each_field_of_a_job_is_in_the_readme(field: str) -> None:
    section = README.split("## The fields of a job")[1].split("\n## ")[0]
    assert f"`{field}`" in section


@pytest.mark.parametrize("field", [field.alias for field in Checkpoint.model_fields.values()])
def test_each_place_for_state_is_explained(field: str) -> None:
    assert f"`{field}`" in KUBERNETES or f"`{field}`" in README or f"{{{field}}}" in README
