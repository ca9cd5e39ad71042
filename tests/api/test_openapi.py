"""The OpenAPI text: true of the service, whatever a stranger sends."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import engine
from schemathesis.engine import events
from schemathesis.engine.run import PhaseName

from adascale_api.app import create_app
from adascale_api.auth import SharedToken
from adascale_api.database import Database
from adascale_api.routes.common import JOB_ID_PATTERN
from adascale_api.schemas import AllocationBody, GainReportBody, JobSpecBody, RegistrationBody
from adascale_core.job_id import InvalidJobIdError, parse_job_id
from adascale_core.messages import Allocation, GainReport, JobSpec, Message, Registration
from api.client import TOKEN

EXPECTED = ["2xx", "401", "403", "404", "409"]
CONFIG = {
    "headers": {"Authorization": f"Bearer {TOKEN}"},
    "operations": [
        # Rules between fields can't be told by a schema: of bounds that contradict each other, and of a rank
        # that is in the path as well.
        {
            "include-name": name,
            "checks": {"positive_data_acceptance": {"expected-statuses": [*EXPECTED, "422"]}},
        }
        for name in ("PUT /jobs/{job}", "PUT /jobs/{job}/replicas/{rank}")
    ]
    # Waiting for a minute, as it may be asked to, would be a long test.
    + [{"include-name": "GET /jobs/{job}/allocation", "parameters": {"wait": 0.01}}],
}


def an_app(folder: Path, *, protect_reads: bool) -> FastAPI:
    return create_app(
        Database(f"sqlite:///{folder / 'service.db'}"), SharedToken(TOKEN), protect_reads=protect_reads
    )


@pytest.mark.parametrize(
    ("protect_reads", "examples"),
    [(False, 10), pytest.param(True, 100, marks=pytest.mark.slow)],
)
def test_every_call_answers_as_the_text_says(tmp_path: Path, protect_reads: bool, examples: int) -> None:
    app = an_app(tmp_path, protect_reads=protect_reads)
    generation = {"max-examples": examples, "deterministic": True, "database": "none"}
    config = schemathesis.Config.from_dict({**CONFIG, "generation": generation})
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
    found: list[str] = []
    calls = 0
    phases = set()
    for event in engine.from_schema(schema).execute():
        assert not isinstance(event, events.FatalError), event.exception
        assert not isinstance(event, events.NonFatalError), event.value
        if isinstance(event, events.ScenarioFinished):
            phases.add(event.phase)
            calls += len(event.recorder.interactions)
            found += [
                f"{check.failure_info.failure}\n{check.failure_info.code_sample}"
                for checks in event.recorder.checks.values()
                for check in checks
                if check.failure_info is not None
            ]
    assert not found, "\n\n".join(found)
    assert phases == {PhaseName.EXAMPLES, PhaseName.COVERAGE, PhaseName.FUZZING, PhaseName.STATEFUL_TESTING}
    assert calls > 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GainReportBody, GainReport),
        (JobSpecBody, JobSpec),
        (AllocationBody, Allocation),
        (RegistrationBody, Registration),
    ],
)
def test_a_body_has_the_fields_of_the_message_and_its_defaults(
    body: type[BaseModel], message: type[Message]
) -> None:
    expected = fields(message)  # type: ignore[arg-type]
    assert list(body.model_fields) == [field.name for field in expected]
    for field in expected:
        required = field.default is MISSING
        assert body.model_fields[field.name].is_required() is required
        assert required or body.model_fields[field.name].default == field.default


@pytest.mark.parametrize("body", [GainReportBody, JobSpecBody, AllocationBody, RegistrationBody])
def test_the_example_of_a_body_is_accepted(body: type[BaseModel]) -> None:
    extra = body.model_config["json_schema_extra"]
    assert isinstance(extra, dict)
    examples = extra["examples"]
    assert isinstance(examples, list)
    for told in examples:
        body.model_validate_json(json.dumps(told))


labels = st.text("az09-._A", max_size=6)


@given(st.one_of(labels, st.builds("{}.{}".format, labels, labels)))
@example("a" * 63)
@example("a" * 64)
@example(".a")
@example("a.")
@example("a\n")
def test_the_pattern_of_a_job_id_tells_what_the_core_accepts(text: str) -> None:
    try:
        parse_job_id(text)
        accepted = True
    except InvalidJobIdError:
        accepted = False
    assert accepted == bool(re.match(JOB_ID_PATTERN.replace("$", r"\Z"), text))


def test_the_text_tells_where_a_token_is_needed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    for protect_reads, folder in ((False, tmp_path / "open"), (True, tmp_path)):
        paths = an_app(folder, protect_reads=protect_reads).openapi()["paths"]
        for path, operations in paths.items():
            for method, operation in operations.items():
                probe = path in {"/healthz", "/readyz"}
                needed = method != "get" or (protect_reads and not probe)
                assert ("security" in operation) is needed, (method, path)
                assert ("401" in operation["responses"]) is needed, (method, path)
                assert operation["summary"]
                assert operation["description"]
