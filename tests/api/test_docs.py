"""docs/api.md agrees with the service."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from adascale_api.app import create_app
from adascale_api.auth.authorization import SharedToken
from adascale_api.bodies import GainReportBody
from adascale_api.cli import DEFAULT_DATABASE, main
from adascale_api.data.database import Database
from adascale_api.errors import ErrorBody
from adascale_core.views.gain import StoredReports
from adascale_core.views.jobs import JobChanges
from api.client import TOKEN, Client, a_report

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


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


def test_the_example_of_a_report_has_the_answers_on_the_page(client: Client, job: str) -> None:
    example = re.search(r"-d '\n(\{.*?\n\})'", PAGE, re.DOTALL)
    assert example is not None
    TypeAdapter(GainReportBody).validate_json(example[1])
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
