"""docs/api.md agrees with the service."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from adascale_api.app import create_app
from adascale_api.body_limit import MAX_BODY, SMALL_BODY
from adascale_api.cli import DEFAULT_DATABASE, main
from adascale_api.connection_limits import MAX_CONNECTIONS, MAX_DATA, RESPONSE_TIMEOUT
from adascale_api.database import Database
from adascale_api.errors import ErrorBody
from adascale_api.generation_limit import LOST_GENERATIONS
from adascale_api.http_protocol import MAX_HEAD, SMALL_HEAD
from adascale_api.job_feed import BYTES_PER_SECOND, MAX_CLIENTS, MAX_JOBS
from adascale_api.request_models import MAX_REPORTS, GainReportBody
from adascale_api.service_accounts import DEFAULT_CONTROLLER
from adascale_api.shared_token import SharedToken
from adascale_api.store.jobs import MAX_GENERATIONS, MAX_UNDECLARED
from adascale_api.token_review_cache import ACCEPTED_TTL, OUTAGE_TTL, REJECTED_TTL
from adascale_core.job_summary import JobPhase
from adascale_core.messages import ReplicaState
from adascale_core.names import (
    API_AUDIENCE,
    DEFAULT_API_PORT,
    HEARTBEAT_TIMEOUT,
    MAX_BATCH_SIZE,
    MAX_REPLICAS,
    job_audience,
)
from adascale_core.views import GenerationCause, JobChanges, StoredReports
from api.client import TOKEN, Client, a_report

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
TEXT = " ".join(PAGE.split())
"""The page without its line breaks."""


def test_the_page_lists_exactly_the_calls_and_error_statuses_of_the_service(tmp_path: Path) -> None:
    app = create_app(Database(f"sqlite:///{tmp_path / 'a.db'}"), SharedToken(TOKEN))
    paths = app.openapi()["paths"]
    calls = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert set(re.findall(r"^\| `([A-Z]+) (/\S*)` \|", PAGE, re.MULTILINE)) == calls
    statuses = {status for path in paths.values() for call in path.values() for status in call["responses"]}
    listed = set(re.findall(r"^\| ([45]\d\d) \|", PAGE, re.MULTILINE))
    assert listed == {status for status in statuses if status >= "400"} | {"401"}


def test_the_page_lists_exactly_the_options_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["adascale-api", "--help"])
    monkeypatch.setenv("COLUMNS", "1000")  # argparse breaks options at hyphens in narrower lines
    with pytest.raises(SystemExit):
        main()
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert set(re.findall(r"^\| `(--[a-z-]+)` \|", PAGE, re.MULTILINE)) == options
    assert DEFAULT_DATABASE.rpartition("/")[2] in PAGE


@pytest.mark.parametrize(
    "text",
    [
        f"port to listen on (default {DEFAULT_API_PORT})",
        f"a list of up to {MAX_REPORTS} reports",
        f"without a heartbeat for {HEARTBEAT_TIMEOUT:.0f} seconds",
        f"first {HEARTBEAT_TIMEOUT:.0f} seconds after the service starts",
        f"The maximum is {MAX_REPLICAS} for replica counts, {MAX_BATCH_SIZE} for batch sizes",
        f"larger than {MAX_BODY // 2**20} MiB",
        f"At most {MAX_CLIENTS} clients with a token",
        f"may follow, and {MAX_CLIENTS} others",
        f"A namespace may have {MAX_UNDECLARED} jobs that were not declared",
        f"above the desired one by more than {LOST_GENERATIONS:,}",
        f"open connections (default {MAX_CONNECTIONS})",
        f"those of more than {SMALL_HEAD // 1024} KiB whose requests wait for an answer",
        f"may not have more than {MAX_DATA // 2**20} MiB together",
        f"bodies of more than {SMALL_BODY // 1024} KiB",
        f"chunk headers and trailers, have more than {MAX_HEAD // 1024} KiB",
        f"unread for {RESPONSE_TIMEOUT:.0f} seconds",
        f"at most {BYTES_PER_SECOND // 1024} KiB a second",
        f"the first {MAX_JOBS:,} jobs",
        f"its latest {MAX_GENERATIONS:,} generations",
        f"(default `{DEFAULT_CONTROLLER}`)",
        f"an accepted token for {ACCEPTED_TTL:.0f} seconds",
        f"a rejected token for {REJECTED_TTL:.0f} seconds",
        f"valid for {OUTAGE_TTL / 60:.0f} more minutes",
        f"`{API_AUDIENCE}`",
        f"`{job_audience('<namespace>.<name>')}`",
    ],
)
def test_the_numbers_and_names_on_the_page_are_those_of_the_code(text: str) -> None:
    assert text in TEXT


def test_the_page_lists_the_phases_of_a_job_and_the_causes_of_a_generation() -> None:
    (phases,) = re.findall(r"`phase` of a job is (.*?)\.", TEXT)
    assert set(re.findall(r"`(\w+)`", phases)) == {phase.value for phase in JobPhase}
    (causes,) = re.findall(r"`cause` of a generation is (.*?)\.", TEXT)
    assert set(re.findall(r"`(\w+)`", causes)) == {cause.value for cause in GenerationCause}


def test_the_page_lists_the_replica_states() -> None:
    (listed,) = re.findall(r"The `state` of a replica is (.*?)\.", TEXT)
    assert re.findall(r"`(\w+)`", listed) == [state.value for state in ReplicaState]


def test_the_example_of_a_report_has_the_answers_on_the_page(client: Client, job: str) -> None:
    example = re.search(r"-d '\n(\{.*?\n\})'", PAGE, re.DOTALL)
    assert example is not None
    GainReportBody.model_validate_json(example[1])
    answer = client.call("POST", f"/jobs/{job}/gain", json.loads(example[1]))
    stored, changes, refused = re.findall(r"```json\n(.*?)\n```", PAGE)
    adapter = TypeAdapter(StoredReports)
    assert adapter.dump_json(adapter.validate_json(stored)).decode() == stored
    assert list(json.loads(changes)) == [field.name for field in fields(JobChanges)]
    expected = json.loads(stored)
    expected["allocation"]["version"] = answer.body["allocation"]["version"]  # from the clock
    assert expected == answer.body
    invalid = example[1].replace('"gain": 3.2', '"gain": NaN').encode()
    assert ErrorBody.model_validate(client.call("POST", f"/jobs/{job}/gain", text=invalid).body) == (
        ErrorBody.model_validate_json(refused)
    )


@pytest.mark.parametrize("name", re.findall(r"`(adascale_\w+)`", PAGE))
def test_the_service_has_the_metrics_on_the_page(client: Client, job: str, name: str) -> None:
    client.post_gain(job, a_report())
    assert name in client.call("GET", "/metrics").body
