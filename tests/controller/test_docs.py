"""The docs agree with the code: commands, options, fields, defaults, reasons and examples."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
import yaml
from kubernetes import client
from rich.console import Console

from adascale_controller.cli.app import app
from adascale_controller.job.reasons import Reason
from adascale_controller.job_overview import render_valid_replicas
from adascale_controller.jobfile import load_job, parse_job
from adascale_controller.schema import AdaScaleJobSpec, Checkpoint
from adascale_core import names

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
JOB = (ROOT / "docs" / "job.md").read_text()
KUBERNETES = (ROOT / "docs" / "kubernetes.md").read_text()

Row = list[str]


def tables(text: str) -> Iterator[list[Row]]:
    """The tables of a page: the cells of each row, without header and separator."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield rows[2:]


def code_names(cell: str) -> list[str]:
    """The names in backquotes."""
    return re.findall(r"`(\w+)`", cell)


def table_with(text: str, name: str) -> list[Row]:
    """The table that has `name` in a first cell."""
    (found,) = (rows for rows in tables(text) if any(name in code_names(row[0]) for row in rows))
    return found


# -- the fields of a job -------------------------------------------------------------------------------

FIELDS = {str(field.alias): field for field in AdaScaleJobSpec.model_fields.values()}


def test_the_page_of_the_job_file_has_each_field_of_a_job() -> None:
    assert {name for row in table_with(JOB, "backoffLimit") for name in code_names(row[0])} == set(FIELDS)


@pytest.mark.parametrize("field", [str(field.alias) for field in Checkpoint.model_fields.values()])
def test_each_checkpoint_setting_is_documented(field: str) -> None:
    assert re.search(rf"\b{field}\b", JOB + KUBERNETES)


# -- the reasons of a condition ------------------------------------------------------------------------


def test_the_reasons_in_the_docs_are_those_of_the_operator() -> None:
    documented = [name for row in table_with(KUBERNETES, "Training") for name in code_names(row[0])]
    assert sorted(documented) == sorted(Reason)


# -- examples ------------------------------------------------------------------------------------------


def job_examples() -> Iterator[str]:
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S):
            if any(isinstance(d, dict) and d.get("kind") == names.KIND for d in yaml.safe_load_all(block)):
                yield block


@pytest.mark.parametrize("text", list(job_examples()))
def test_each_example_of_a_job_is_valid(text: str) -> None:
    jobs = [document for document in yaml.safe_load_all(text) if document["kind"] == names.KIND]
    for job in jobs:
        parse_job(yaml.safe_dump(job))


def test_the_network_policy_for_a_job_has_fields_of_kubernetes_and_selects_the_pods_of_a_job() -> None:
    (text,) = re.findall(r"^```yaml\n(apiVersion: networking.*?)^```", KUBERNETES, re.M | re.S)
    policy = yaml.safe_load(text)
    api: Any = client.ApiClient()
    # The client drops fields that it does not know.
    known = api.deserialize(json.dumps(policy), "V1NetworkPolicy", "application/json")
    assert api.sanitize_for_serialization(known) == policy
    pods = {"matchLabels": {names.LABEL_JOB: policy["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == pods
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]


def test_the_docs_have_an_example_of_a_job() -> None:
    assert list(job_examples())


def test_the_page_of_the_job_file_shows_the_replica_counts_of_the_example_job() -> None:
    output = io.StringIO()
    example = load_job(ROOT / "deploy" / "adascalejob.yaml")
    Console(file=output, width=100).print(render_valid_replicas(example))
    shown = [line.split() for line in JOB.splitlines()]
    for line in output.getvalue().splitlines():
        if line.strip() and "─" not in line:
            assert line.split() in shown


# -- commands and options ----------------------------------------------------------------


def options_by_command() -> dict[str, set[str]]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()
    }


def command_lines(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each `adascale COMMAND ...` in an indented line or in backquotes: the command and its options."""
    text = page.read_text()
    snippets = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^ {4,}(\S.*)$", text, re.M)
    for snippet in snippets:
        match = re.match(r"(?:\S*/)?adascale ([a-z]+)\b(.*)", snippet)
        if match:
            yield match[1], re.findall(r"--[a-z-]+", match[2].split("  ")[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_documented_command_and_option_exists(page: Path) -> None:
    declared = options_by_command()
    for name, options in command_lines(page):
        assert name in declared
        assert set(options) <= declared[name], name


def test_the_docs_show_commands() -> None:
    shown = {name for page in PAGES for name, _ in command_lines(page)}
    assert shown >= {"run", "validate", "gain"}
