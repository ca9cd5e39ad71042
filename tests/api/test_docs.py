"""docs/api.md tells what is so."""

import json
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from adascale_api.app import create_app
from adascale_api.auth import SharedToken
from adascale_api.cli import DEFAULT_DATABASE, main
from adascale_api.database import Database
from adascale_api.errors import ErrorBody
from adascale_api.limits import MAX_BODY
from adascale_api.reviews import REFUSED_FOR, TRUSTED_FOR
from adascale_api.schemas import MAX_BATCH, MAX_REPORTS, GainReportBody
from adascale_api.token_review import DEFAULT_CONTROLLER
from adascale_core.names import (
    API_AUDIENCE,
    DEFAULT_API_PORT,
    HEARTBEAT_TIMEOUT,
    MAX_REPLICAS,
    job_audience,
)
from adascale_core.views import StoredReports
from api.client import TOKEN, Client, a_report

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_call_and_status_is_told_and_no_other(tmp_path: Path) -> None:
    app = create_app(Database(f"sqlite:///{tmp_path / 'a.db'}"), SharedToken(TOKEN))
    paths = app.openapi()["paths"]
    calls = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert set(re.findall(r"^\| `([A-Z]+) (/\S*)` \|", PAGE, re.MULTILINE)) == calls
    statuses = {status for path in paths.values() for call in path.values() for status in call["responses"]}
    told = set(re.findall(r"^\| ([45]\d\d) \|", PAGE, re.MULTILINE))
    assert told == {status for status in statuses if status >= "400"} | {"401"}


def test_every_option_is_told_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["adascale-api", "--help"])
    monkeypatch.setenv("COLUMNS", "1000")  # narrower, an option may be broken at its hyphens
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().out
    options = set(re.findall(r"--[a-z-]+", told)) - {"--help"}
    assert set(re.findall(r"^\| `(--[a-z-]+)` \|", PAGE, re.MULTILINE)) == options
    assert DEFAULT_DATABASE.rpartition("/")[2] in PAGE


def test_the_numbers_are_those_of_the_code() -> None:
    for text in (
        f"{DEFAULT_API_PORT} if not given",
        f"a list of up to {MAX_REPORTS}",
        f"not been heard of for {HEARTBEAT_TIMEOUT:.0f} seconds",
        f"counts go up to {MAX_REPLICAS}",
        f"batch sizes up to\n{MAX_BATCH}",
        f"more than {MAX_BODY // 2**20} MiB",
        f"`{DEFAULT_CONTROLLER}` if not given",
        f"a refused one for {REFUSED_FOR:.0f} seconds",
        f"stay good for {TRUSTED_FOR / 60:.0f} more minutes",
        f"`{API_AUDIENCE}`",
        f"`{job_audience('<namespace>.<name>')}`",
    ):
        assert text in PAGE, text


def test_the_report_that_is_shown_is_accepted_and_answered_as_shown(client: Client, job: str) -> None:
    shown = re.search(r"-d '\n(\{.*?\n\})'", PAGE, re.DOTALL)
    assert shown is not None
    GainReportBody.model_validate_json(shown[1])
    answer = client.call("POST", f"/jobs/{job}/gain", json.loads(shown[1]))
    posted, refused = re.findall(r"```json\n(.*?)\n```", PAGE)
    assert (
        TypeAdapter(StoredReports).dump_json(TypeAdapter(StoredReports).validate_json(posted)).decode()
        == posted
    )
    expected = json.loads(posted)
    expected["allocation"]["version"] = answer.body["allocation"]["version"]  # from the clock
    assert expected == answer.body
    wrong = shown[1].replace('"gain": 3.2', '"gain": NaN').encode()
    assert ErrorBody.model_validate(client.call("POST", f"/jobs/{job}/gain", text=wrong).body) == (
        ErrorBody.model_validate_json(refused)
    )


@pytest.mark.parametrize("name", re.findall(r"`(adascale_\w+)`", PAGE))
def test_the_metrics_that_are_told_are_there(client: Client, job: str, name: str) -> None:
    client.post_gain(job, a_report())
    assert name in client.call("GET", "/metrics").body
