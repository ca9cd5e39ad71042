"""Invalid requests: each is refused with the field, the value and what is expected, and nothing is stored."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from adascale_api.app import create_app
from adascale_api.data.database import Database
from adascale_api.routes.workers import MetricsService
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from api.client import TOKEN, Answer, Client, ServiceProcess, a_registration, a_report, wait_until

NUMBERS = [
    "generation", "step", "progress", "epoch", "replicas", "local_bsz", "accumulation", "scale", "gain",
    "grad_sqr", "grad_var", "step_time", "time", "loss", "target", "nodes", "sync_time",
    "grad_sqr_error",
    "lr_factor", "lr", "gpu_use", "gpu_memory", "slow_replica", "slow_factor",
]  # fmt: skip
INTEGERS = ["generation", "step", "epoch", "replicas", "local_bsz", "accumulation", "nodes", "slow_replica"]
NEVER_NEGATIVE = [name for name in NUMBERS if name not in {"grad_sqr", "grad_var", "grad_sqr_error", "loss"}]
OPTIONAL = {
    *("loss", "target", "sync_time", "lr_factor", "lr", "gpu_use", "gpu_memory"),
    *("slow_replica", "slow_factor"),
}
NEVER_ZERO = ["replicas", "local_bsz", "accumulation", "scale", "gain", "nodes"]

REPORT_CASES = [
    *[(name, "NaN") for name in NUMBERS],
    *[(name, "Infinity") for name in NUMBERS],
    *[(name, "-Infinity") for name in NUMBERS],
    *[(name, "1e999") for name in NUMBERS],
    *[(name, '"1"') for name in NUMBERS],
    *[(name, "true") for name in NUMBERS],
    *[(name, "[1]") for name in NUMBERS],
    *[(name, "null") for name in NUMBERS if name not in OPTIONAL],
    *[(name, "1.5") for name in INTEGERS],
    *[(name, "-1") for name in [*NEVER_NEGATIVE, "grad_sqr_error"]],
    *[(name, "0") for name in NEVER_ZERO],
    *[(name, "1" + "0" * 25) for name in NEVER_NEGATIVE],
]


def assert_refused(answer: Answer, status: int, *parts: str) -> dict[str, Any]:
    """Assert that a request was refused with a message of these parts, and return the body."""
    assert answer.status == status, answer
    body: dict[str, Any] = answer.body
    for part in parts:
        assert part in body["error"], body
    return body


@pytest.mark.parametrize("name", NUMBERS)
def test_a_report_with_an_invalid_number_is_refused_with_the_name_of_the_field(
    client: Client, job: str, name: str
) -> None:
    for text in [text for field, text in REPORT_CASES if field == name]:
        members = json.dumps({**a_report().to_json(), name: "HERE"}).replace('"HERE"', text)
        body = assert_refused(
            client.call("POST", f"/jobs/{job}/gain", text=members.encode()), 422, f"{name}: got "
        )
        assert [error["field"].split(".")[0] for error in body["detail"]] == [name]
        assert body["detail"][0]["expected"]
    assert client.call("GET", f"/jobs/{job}").status == 404


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("null", "metrics"),
        ("[0.5]", "metrics"),
        ('{"accuracy": null}', "metrics.accuracy"),
        ('{"accuracy": "0.5"}', "metrics.accuracy"),
        ('{"accuracy": NaN}', "metrics.accuracy"),
        ('{"accuracy": {}}', "metrics.accuracy"),
        ('{"a-b": 0.5}', "metrics.a-b"),
        ('{"": 0.5}', "metrics."),
        (json.dumps({"x" * 65: 0.5}), "metrics." + "x" * 65),
        (json.dumps({f"m{number}": 0.5 for number in range(17)}), "metrics"),
    ],
)
def test_a_report_with_invalid_metrics_is_refused_with_the_name_of_the_field(
    client: Client, job: str, text: str, field: str
) -> None:
    members = json.dumps({**a_report().to_json(), "metrics": "HERE"}).replace('"HERE"', text)
    body = assert_refused(client.call("POST", f"/jobs/{job}/gain", text=members.encode()), 422, "metrics")
    assert body["detail"][0]["field"].startswith(field), body
    assert client.call("GET", f"/jobs/{job}").status == 404


def test_one_invalid_report_refuses_the_whole_list(client: Client, job: str) -> None:
    reports = [a_report(1).to_json(), {**a_report(2).to_json(), "gain": -1.0}, a_report(3).to_json()]
    assert_refused(
        client.call("POST", f"/jobs/{job}/gain", reports), 422, "1.gain: got -1.0", "nothing was stored"
    )
    assert client.call("GET", f"/jobs/{job}").status == 404


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"", ["body: got nothing", "JSON"]),
        (b"{", ["body: got {", "JSON"]),
        (b"gain=1", ["body: got gain=1", "JSON"]),
        (b"\xff\xfe{}", ["body: got", "JSON"]),
        (b"[" * 10000, ["body: got [[[", "JSON"]),
        (b'{"step": 1' + b"0" * 5000 + b"}", ["body: got", "JSON"]),
        (b'"\\ud800"', ["body: got", "JSON"]),
        (b"null", ["body: got null"]),
        (b"1", ["body: got 1"]),
        (b"[]", ["a list of 0", "1 to 1000 reports"]),
        (b"[1]", ["0: got 1"]),
        (b"[[]]", ["0: got []"]),
        (b"{}", ["generation: got nothing", "required", "and 12 more"]),
    ],
)
def test_a_body_that_is_not_a_report_is_refused(
    client: Client, job: str, text: bytes, parts: list[str]
) -> None:
    assert_refused(client.call("POST", f"/jobs/{job}/gain", text=text), 422, *parts)
    assert client.call("GET", f"/jobs/{job}").status == 404


def test_a_misspelled_field_is_refused_with_its_name(client: Client, job: str) -> None:
    answer = client.call("POST", f"/jobs/{job}/gain", {**a_report().to_json(), "gian": 1.0})
    assert_refused(answer, 422, "gian: got 1.0", "no field of this name")


def test_an_integer_may_have_a_decimal_point(client: Client, job: str) -> None:
    assert client.call("POST", f"/jobs/{job}/gain", {**a_report().to_json(), "step": 7.0}).status == 200
    assert client.get(f"/jobs/{job}/gain")["step"] == 7


def test_a_connection_that_closes_within_a_body_stores_nothing(
    service: ServiceProcess, client: Client, job: str
) -> None:
    text = json.dumps(a_report().to_json())
    head = f"POST /jobs/{job}/gain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    kind = "Content-Type: application/json\r\n"
    for length in (
        f"Content-Length: {len(text) + 1}\r\n\r\n{text}",
        f"Transfer-Encoding: chunked\r\n\r\n5\r\n{text[:5]}",
    ):
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(f"{head}{kind}{length}".encode())
    ended = 'adascale_request_duration_seconds_count{method="POST",route="/jobs/{job}/gain",status="400"} 2.0'
    wait_until(lambda: ended in client.call("GET", "/metrics").body, "the end of both requests")
    assert client.call("GET", f"/jobs/{job}").status == 404


def test_more_than_a_thousand_reports_are_refused(client: Client, job: str) -> None:
    reports = [a_report(step).to_json() for step in range(1001)]
    assert_refused(client.call("POST", f"/jobs/{job}/gain", reports), 422, "a list of 1001", "1 to 1000")
    assert client.post_gain(job, *[a_report(step) for step in range(1000)])["stored"] == 1000


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_ten_megabytes_is_refused(client: Client, job: str, chunked: bool) -> None:
    text = b"[" + b" " * 10_000_000 + b"]"
    answer = client.call("POST", f"/jobs/{job}/gain", text=text, chunked=chunked)
    assert_refused(answer, 413, "body", "at most 1048576")
    assert client.get("/healthz") == {"status": "ok"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_a_body_of_another_content_type_is_refused(client: Client, job: str, kind: str) -> None:
    text = json.dumps(a_report().to_json()).encode()
    answer = client.call("POST", f"/jobs/{job}/gain", text=text, headers={"content-type": kind})
    assert_refused(answer, 415, "application/json")


@pytest.mark.parametrize(
    "job_id", ["UPPER", "a.b.c", ".a", "a.", "a_b", "-a", "a" * 64, "%20", "%00", "%C3%A4"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("GET", "/gain"), ("GET", "/gain/history"), ("GET", "/allocation"), ("DELETE", "")],
)
def test_an_invalid_job_id_is_refused(client: Client, job_id: str, method: str, path: str) -> None:
    assert_refused(client.call(method, f"/jobs/{job_id}{path}"), 422, "is not valid: use lower case letters")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("GET", "/gain"), ("GET", "/gain/history"), ("GET", "/allocation"), ("DELETE", "")],
)
def test_a_missing_job_is_not_found(client: Client, method: str, path: str) -> None:
    assert_refused(client.call(method, f"/jobs/nobody{path}"), 404, "job default.nobody does not exist")


def test_a_job_without_a_report_has_no_gain(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}", JobSpec(4).to_json())
    assert_refused(client.call("GET", f"/jobs/{job}/gain"), 404, f"job {job} has no report yet")


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ({"batch_size": 0}, ["batch_size: got 0"]),
        ({"batch_size": True}, ["batch_size: got true"]),
        ({"batch_size": "4"}, ['batch_size: got "4"']),
        ({"batch_size": 8, "max_batch_size": 4}, ["max_batch_size 4 is less than batch_size 8"]),
        ({"batch_size": 8, "local_bsz_bounds": [4]}, ["local_bsz_bounds.1: got nothing"]),
        (
            {"batch_size": 8, "local_bsz_bounds": [1, 2, 3]},
            ["local_bsz_bounds: got a list of 3, expected at most 2;"],
        ),
        *(
            (
                {"batch_size": 8, "max_batch_size": 16, "local_bsz_bounds": [4, upper]},
                [f'local_bsz_bounds.1: got {got}, expected an integer from 1 to 1048576 or "auto"'],
            )
            for upper, got in (("Auto", '"Auto"'), ("64", '"64"'), (0, "0"), (None, "null"))
        ),
        ({"batch_size": 8, "efficiency_target": 0}, ["efficiency_target: got 0"]),
        (
            {"batch_size": 8, "scale_invariant_steps": 10, "train_samples": 80},
            ["scale_invariant_steps (10) and train_samples (80) are both set; set at most one of them"],
        ),
        ({"batch_size": 8, "max_replicas": 100_000}, ["max_replicas: got 100000"]),
        ({"batchSize": 8}, ["batch_size: got nothing"]),
    ],
)
def test_an_invalid_declaration_is_refused(
    client: Client, job: str, spec: dict[str, Any], parts: list[str]
) -> None:
    assert_refused(client.call("PUT", f"/jobs/{job}", spec), 422, *parts)
    assert client.call("GET", f"/jobs/{job}").status == 404


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"replica": 1}, ["replica: got 1, expected 0"]),
        ({"replica": -1}, ["replica: got -1"]),
        ({"state": "resting"}, ['state: got "resting"', "'waiting'"]),
        ({"port": 65536}, ["port: got 65536"]),
        ({"instance": ""}, ["instance: got"]),
        ({"address": "a" * 300}, ["address: got"]),
        ({"log": "x" * 70_000}, ["log: got", "65536"]),
        ({"generation": -1}, ["generation: got -1"]),
        ({"accelerator": "a" * 129}, ["accelerator: got", "128"]),
        ({"accelerator": "a\n"}, ["accelerator: got"]),
        ({"lost": [0] * 1025}, ["lost: got a list of 1025, expected at most 1024;"]),
        ({"device": "cpu"}, ["device: got", "no field of this name"]),
    ],
)
def test_an_invalid_registration_is_refused(
    client: Client, job: str, changed: dict[str, Any], parts: list[str]
) -> None:
    body = {**a_registration(state=ReplicaState.WAITING).to_json(), **changed}
    assert_refused(client.call("PUT", f"/jobs/{job}/replicas/0", body), 422, *parts)
    assert client.call("GET", f"/jobs/{job}").status == 404


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"generation": 0, "replicas": 1}, ["generation: got 0"]),
        ({"generation": 1, "replicas": -1}, ["replicas: got -1"]),
        ({"generation": 1, "replicas": 1.5}, ["replicas: got 1.5"]),
        ({"generation": 1}, ["replicas: got nothing"]),
        ({"generation": 1, "replicas": 0, "failed": 1}, ["failed: got 1"]),
        ({"generation": 1, "replicas": 0, "failed": None}, ["failed: got null"]),
        ({"generation": 1, "replicas": 0, "failed": "true"}, ['failed: got "true"']),
    ],
)
def test_an_invalid_allocation_is_refused(
    client: Client, job: str, body: dict[str, Any], parts: list[str]
) -> None:
    assert_refused(client.call("PUT", f"/jobs/{job}/allocation", body), 422, *parts)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/gain/history?points=0", ["points: got", "greater than or equal to 1"]),
        ("/gain/history?points=5001", ["points: got", "less than or equal to 5000"]),
        ("/gain/history?points=many", ['points: got "many"', "a valid integer"]),
        ("/allocation?version=1&wait=61", ["wait: got"]),
        ("/allocation?version=1&wait=-1", ["wait: got"]),
        ("/allocation?version=1&wait=nan", ["wait: got"]),
        ("/allocation?version=x", ['version: got "x"']),
        ("/replicas/9999", ["replica: got"]),
        ("/replicas/-1", ["replica: got"]),
    ],
)
def test_an_invalid_parameter_is_refused(client: Client, job: str, path: str, parts: list[str]) -> None:
    method, body = ("PUT", a_registration().to_json()) if "replicas" in path else ("GET", None)
    assert_refused(client.call(method, f"/jobs/{job}{path}", body), 422, *parts)


def test_writing_without_the_token_is_refused(service: ServiceProcess, job: str) -> None:
    writes: list[tuple[str, str, object]] = [
        ("POST", "/gain", a_report().to_json()),
        ("PUT", "", JobSpec(4).to_json()),
        ("PUT", "/allocation", {"generation": 1, "replicas": 1}),
        ("PUT", "/replicas/0", a_registration().to_json()),
        ("DELETE", "", None),
    ]
    for token, message in ((None, "missing token"), ("wrong", "invalid token"), ("ä", "invalid token")):
        with Client(service.port, token) as client:
            for method, path, body in writes:
                answer = client.call(method, f"/jobs/{job}{path}", body)
                assert_refused(answer, 401, message)
                assert answer.headers["www-authenticate"] == "Bearer"
        with Client(service.port) as client:
            assert client.call("GET", f"/jobs/{job}").status == 404


def test_a_missing_resource_or_method_is_answered_in_the_form_of_all_errors(client: Client) -> None:
    assert_refused(client.call("GET", "/nothing/here"), 404, "no resource at /nothing/here")
    assert_refused(client.call("POST", "/jobs"), 405, "method POST is not allowed here: use GET")


@pytest.mark.parametrize(("method", "path"), [("POST", "/jobs/a/gain"), ("DELETE", "/jobs/a")])
def test_an_unexpected_error_is_answered_in_json_and_raised_again_for_the_log(
    tmp_path: Path, method: str, path: str
) -> None:
    """A call that workers make often takes another way through the service."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(a_report().to_json()).encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    async def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    async def call() -> None:
        app = create_app(Database(f"sqlite:///{tmp_path / 'service.db'}"), None)
        app.state.service.database.write = fail
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        async with app.router.lifespan_context(app):
            with pytest.raises(ZeroDivisionError):
                await MetricsService(app)(scope, receive, send)

    asyncio.run(call())
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"] == "the service failed at this request: its log says why"
