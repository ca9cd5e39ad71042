"""The OpenAPI document agrees with the service, for generated requests too."""

import json
import re
from pathlib import Path

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from schemathesis import engine
from schemathesis.engine import events
from schemathesis.engine.run import PhaseName

from adascale_api.app import create_app
from adascale_api.auth.authorization import SharedToken
from adascale_api.bodies import BODIES
from adascale_api.data.database import Database
from adascale_api.routes.common import JOB_ID_PATTERN
from adascale_api.service.service import Settings
from adascale_core.job_id import InvalidJobIdError, parse_job_id
from api.client import TOKEN

EXPECTED = ["2xx", "401", "403", "404", "409"]
CONFIG = {
    "headers": {"Authorization": f"Bearer {TOKEN}"},
    "operations": [
        # A schema can't express rules between fields: contradicting bounds, a job or replica other than the
        # path's, and a generation that no job can have reached yet.
        {
            "include-name": name,
            "checks": {"positive_data_acceptance": {"expected-statuses": [*EXPECTED, "422"]}},
        }
        for name in (
            "PUT /jobs/{job}",
            "PUT /jobs/{job}/decision",
            "PUT /jobs/{job}/replicas/{replica}",
            "POST /jobs/{job}/gain",
        )
    ]
    # A request may wait for a minute, which would make the test slow.
    + [{"include-name": "GET /jobs/{job}/allocation", "parameters": {"wait": 0.01}}]
    # A schema can't express which cursors have not expired.
    + [
        {
            "include-name": "GET /changes",
            "parameters": {"wait": 0.01},
            "checks": {"positive_data_acceptance": {"expected-statuses": [*EXPECTED, "410"]}},
        }
    ],
    # A report or a registration creates a deleted job again, but this check expects that only a request to
    # /jobs/{job} does. Whether a run contains such a sequence varies. See test_jobs.py for deleted jobs.
    "checks": {"use_after_free": {"enabled": False}},
}


def an_app(folder: Path, *, protect_reads: bool) -> FastAPI:
    return create_app(
        Database(f"sqlite:///{folder / 'service.db'}"),
        SharedToken(TOKEN),
        Settings(protect_reads=protect_reads),
    )


@pytest.mark.slow
def test_every_call_answers_as_the_document_says(tmp_path: Path) -> None:
    app = an_app(tmp_path, protect_reads=True)
    generation = {"max-examples": 15, "deterministic": True, "database": "none"}
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


@pytest.mark.parametrize("body", BODIES)
def test_the_example_of_a_body_is_valid(body: type[object]) -> None:
    adapter = TypeAdapter(body)
    (example,) = adapter.json_schema()["examples"]
    adapter.validate_json(json.dumps(example))


labels = st.text("az09-._A", max_size=6)


@given(st.one_of(labels, st.builds("{}.{}".format, labels, labels)))
@example("a" * 63)
@example("a" * 64)
@example(".a")
@example("a.")
@example("a\n")
def test_the_pattern_of_a_job_id_matches_what_the_core_accepts(text: str) -> None:
    try:
        parse_job_id(text)
        accepted = True
    except InvalidJobIdError:
        accepted = False
    assert accepted == bool(re.match(JOB_ID_PATTERN.replace("$", r"\Z"), text))


@pytest.mark.parametrize("path", ["/jobs/{job}", "/jobs/{job}/allocation"])
def test_the_document_says_which_writes_may_not_find_the_job_afterwards(tmp_path: Path, path: str) -> None:
    """A deletion at the same time may come between the write and the read that follows it."""
    operation = an_app(tmp_path, protect_reads=False).openapi()["paths"][path]["put"]
    assert operation["responses"]["404"]["description"] == "The job was deleted at the same time."


def test_the_document_says_which_calls_need_a_token(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    for protect_reads, folder in ((False, tmp_path / "open"), (True, tmp_path)):
        paths = an_app(folder, protect_reads=protect_reads).openapi()["paths"]
        for path, operations in paths.items():
            for method, operation in operations.items():
                probe = path in {"/healthz", "/readyz"}
                needs_token = method != "get" or (protect_reads and not probe)
                redacted = method == "get" and path in {
                    *("/jobs", "/jobs/{job}", "/jobs/{job}/allocation", "/changes")
                }
                accepts_token = needs_token or redacted
                assert ("security" in operation) is accepts_token, (method, path)
                assert ({} in operation.get("security", [{}])) is not needs_token, (method, path)
                assert ("401" in operation["responses"]) is accepts_token, (method, path)
                assert operation["summary"]
                assert operation["description"]
