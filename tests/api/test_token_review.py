"""Service account tokens: roles, error messages, and the cache of token reviews."""

import asyncio
import base64
import json
import os
import re
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_api import cli
from adascale_api.auth import service_accounts
from adascale_api.auth.authorization import Role
from adascale_api.auth.service_accounts import (
    ACCEPTED_TTL,
    MAX_REVIEWS,
    MAX_REVIEWS_PER_CLIENT,
    OUTAGE_TTL,
    REJECTED_TTL,
    RETRY_INTERVAL,
    ServiceAccountAuthorizer,
    TokenReviewResult,
    read_claims,
)
from adascale_api.errors import ForbiddenError, RequestError, UnauthorizedError, UnavailableError
from adascale_core.errors import AdaScaleError, UsageError
from adascale_core.names import API_AUDIENCE, job_audience
from api.client import Client, ServiceProcess, a_report
from support.api_server import write_kubeconfig
from support.launch import free_port

P = ParamSpec("P")
JOB = "team-a.digits"
OPERATOR = "system:serviceaccount:adascale-system:adascale-controller"
WORKER = "system:serviceaccount:team-a:default"


def a_token(*audiences: str, expires_at: float = 10_000, nonce: object = None) -> str:
    """A token like those of a cluster, with an arbitrary signature."""
    return jwt({"aud": list(audiences), "exp": expires_at, "nonce": nonce})


def jwt(payload: object) -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()) for part in ({"alg": "RS256"}, payload))
    return ".".join([*(part.decode().rstrip("=") for part in parts), "c2lnbmF0dXJl"])


class Cluster:
    """A cluster that reviews every token with the same result, with a clock that the test sets."""

    def __init__(self, user: str | None = WORKER) -> None:
        self.user = user
        self.now = 1000.0
        self.reviews: list[tuple[str, tuple[str, ...]]] = []
        self.is_down = False
        self.gate: asyncio.Event | None = None
        self.authorizer = ServiceAccountAuthorizer(self, clock=lambda: self.now, monotonic=lambda: self.now)

    async def review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        self.reviews.append((token, tuple(audiences)))
        if self.gate is not None:
            await self.gate.wait()
        if self.is_down:
            raise UnavailableError("no answer")
        if self.user is None:
            return TokenReviewResult(None, error="token is revoked")
        return TokenReviewResult(self.user, tuple(audiences))

    async def close(self) -> None:
        """Do nothing."""

    async def authorize(self, token: str, role: Role = Role.WORKER, job: str | None = JOB) -> None:
        await self.authorizer.authorize(token, role, job)

    async def error(self, token: str, role: Role = Role.WORKER, job: str | None = JOB) -> RequestError | None:
        try:
            await self.authorize(token, role, job)
        except RequestError as error:
            return error
        return None

    async def status(self, token: str, role: Role = Role.WORKER, job: str | None = JOB) -> int:
        error = await self.error(token, role, job)
        return 200 if error is None else error.status


def in_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @wraps(test)
    def run_test(*arguments: P.args, **fixtures: P.kwargs) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run_test


# -- roles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "audience", "role", "job", "status"),
    [
        # the operator has every role
        (OPERATOR, API_AUDIENCE, Role.CONTROLLER, JOB, 200),
        (OPERATOR, API_AUDIENCE, Role.WORKER, JOB, 200),
        (OPERATOR, API_AUDIENCE, Role.READER, JOB, 200),
        (OPERATOR, API_AUDIENCE, Role.READER, None, 200),
        # the operator's account, with the audience of a job in another namespace
        (OPERATOR, job_audience(JOB), Role.CONTROLLER, JOB, 403),
        (OPERATOR, job_audience(JOB), Role.WORKER, JOB, 403),
        # a worker of the job
        (WORKER, job_audience(JOB), Role.WORKER, JOB, 200),
        (WORKER, job_audience(JOB), Role.READER, JOB, 200),
        (WORKER, job_audience(JOB), Role.CONTROLLER, JOB, 403),
        (WORKER, job_audience(JOB), Role.READER, None, 403),
        ("system:serviceaccount:team-a:trainer", job_audience(JOB), Role.WORKER, JOB, 200),
        # a worker of another job, of a job with this name in another namespace, of a job with this prefix
        (WORKER, job_audience("team-a.other"), Role.WORKER, JOB, 403),
        (WORKER, job_audience("team-b.digits"), Role.WORKER, JOB, 403),
        (WORKER, job_audience("team-b.digits"), Role.WORKER, "team-b.digits", 403),
        (WORKER, job_audience(JOB), Role.WORKER, "team-a.digits-2", 403),
        # the job's audience, with an account in another namespace
        ("system:serviceaccount:team-b:default", job_audience(JOB), Role.WORKER, JOB, 403),
        ("system:serviceaccount:team-a-b:default", job_audience(JOB), Role.WORKER, JOB, 403),
        ("system:serviceaccount:team:a:default", job_audience(JOB), Role.WORKER, JOB, 403),
        ("team-a", job_audience(JOB), Role.WORKER, JOB, 403),
        ("system:admin", job_audience(JOB), Role.WORKER, JOB, 403),
        # the operator's audience, with another account
        (WORKER, API_AUDIENCE, Role.CONTROLLER, JOB, 403),
        (WORKER, API_AUDIENCE, Role.WORKER, JOB, 403),
        ("adascale-system:adascale-controller", API_AUDIENCE, Role.CONTROLLER, JOB, 403),
        (
            "system:serviceaccount:adascale-system:adascale-controller-2",
            API_AUDIENCE,
            Role.CONTROLLER,
            JOB,
            403,
        ),
        # a token that the cluster rejects, or with the audience of another service
        (None, job_audience(JOB), Role.WORKER, JOB, 401),
        (WORKER, "https://kubernetes.default.svc", Role.WORKER, JOB, 401),
        (OPERATOR, "adascale.dev/api/", Role.CONTROLLER, JOB, 401),
    ],
)
@in_event_loop
async def test_a_token_has_the_roles_of_its_account_and_audience(
    user: str | None, audience: str, role: Role, job: str | None, status: int
) -> None:
    assert await Cluster(user).status(a_token(audience), role, job) == status


@in_event_loop
async def test_only_audiences_that_the_cluster_confirms_count() -> None:
    class OneAudience(Cluster):
        async def review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
            return TokenReviewResult(WORKER, ("adascale.dev/jobs/team-a.other",))

    authorizer = OneAudience().authorizer
    token = a_token(job_audience(JOB), "adascale.dev/jobs/team-a.other", "https://example.org")
    await authorizer.authorize(token, Role.WORKER, "team-a.other")
    with pytest.raises(ForbiddenError):
        await authorizer.authorize(token, Role.WORKER, JOB)


@in_event_loop
async def test_a_token_is_reviewed_only_for_the_services_audiences() -> None:
    cluster = Cluster()
    await cluster.authorize(a_token("https://example.org", job_audience(JOB), API_AUDIENCE))
    assert cluster.reviews[0][1] == (job_audience(JOB), API_AUDIENCE)


@in_event_loop
async def test_an_error_names_the_token_and_what_is_required() -> None:
    cluster = Cluster()
    message = str(await cluster.error(a_token(job_audience("team-a.other"))))
    assert message == (
        "the token of team-a:default with the audience adascale.dev/jobs/team-a.other may not report for "
        "team-a.digits: send a token of a service account in namespace team-a with the audience "
        "adascale.dev/jobs/team-a.digits, or a token of adascale-system:adascale-controller with the "
        "audience adascale.dev/api. Nothing was stored"
    )
    message = str(await cluster.error(a_token(job_audience(JOB)), Role.CONTROLLER))
    assert message == (
        "the token of team-a:default with the audience adascale.dev/jobs/team-a.digits may not control "
        "team-a.digits: send a token of adascale-system:adascale-controller with the audience "
        "adascale.dev/api. Nothing was stored"
    )
    message = str(await cluster.error("garbage", Role.CONTROLLER))
    assert message == (
        "not a service account token: send a token of adascale-system:adascale-controller with the "
        "audience adascale.dev/api"
    )
    message = str(await cluster.error(a_token("https://example.org"), Role.CONTROLLER))
    assert message.startswith("the token has the audience https://example.org: send a token of ")
    message = str(await cluster.error(a_token(job_audience(JOB), expires_at=960)))
    assert message.startswith("the token expired 40 s ago: ")
    cluster.user = None
    assert str(await cluster.error(a_token(job_audience(JOB), nonce=2))) == (
        "the Kubernetes API rejects the token: token is revoked"
    )


@pytest.mark.parametrize("name", ["", "a", "a:", ":b", "a:b:c"])
def test_an_invalid_account_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="must be NAMESPACE:NAME"):
        ServiceAccountAuthorizer(Cluster(), name)


# -- tokens that are refused without a review -----------------------------------------------------------

GARBAGE: list[Any] = [
    "garbage",
    "a.b.c",
    "..",
    "a.b.c.d",
    "é.é.é",
    jwt([]),
    jwt({}),
    jwt({"aud": API_AUDIENCE}),
    jwt({"exp": 10_000}),
    jwt({"aud": API_AUDIENCE, "exp": "soon"}),
    jwt({"aud": API_AUDIENCE, "exp": 1e400}),
    jwt({"aud": API_AUDIENCE, "exp": 10**400}),
    jwt({"aud": API_AUDIENCE, "exp": None}),
    jwt({"aud": [API_AUDIENCE, 7], "exp": 10_000}),
    jwt({"aud": {API_AUDIENCE: 1}, "exp": 10_000}),
    a_token(API_AUDIENCE, nonce="x" * 20_000),
    "e30." + base64.urlsafe_b64encode(b"[" * 9000).decode().rstrip("=") + ".c2ln",
]


@pytest.mark.parametrize("token", GARBAGE, ids=range(len(GARBAGE)))
@in_event_loop
async def test_text_that_is_not_a_service_account_token_is_refused_without_a_review(token: str) -> None:
    cluster = Cluster(OPERATOR)
    assert isinstance(await cluster.error(token), UnauthorizedError)
    assert cluster.reviews == []


@given(st.text(max_size=60) | st.builds("{}.{}.{}".format, *[st.text("ab-_=e3", min_size=1)] * 3))
def test_claims_are_read_from_any_text_without_an_exception(text: str) -> None:
    read_claims(text)


@in_event_loop
async def test_an_expired_token_is_refused_without_a_review() -> None:
    cluster = Cluster()
    assert await cluster.status(a_token(job_audience(JOB), expires_at=1000)) == 401
    assert cluster.reviews == []


# -- the cache ------------------------------------------------------------------------------------------


@in_event_loop
async def test_an_accepted_token_is_reviewed_once_a_minute() -> None:
    cluster, token = Cluster(), a_token(job_audience(JOB))
    for seconds in (0, 1, ACCEPTED_TTL - 3):
        cluster.now += seconds
        assert await cluster.status(token) == 200
        assert await cluster.status(token, Role.CONTROLLER) == 403
        assert len(cluster.reviews) == 1
    cluster.now += 1
    cluster.user = None
    assert await cluster.status(token) == 200
    cluster.now += 1
    assert await cluster.status(token) == 401
    assert len(cluster.reviews) == 2


@in_event_loop
async def test_a_rejected_token_is_reviewed_again_after_some_seconds() -> None:
    cluster, token = Cluster(None), a_token(job_audience(JOB))
    assert await cluster.status(token) == 401
    cluster.user = WORKER
    cluster.now += REJECTED_TTL - 0.1
    assert await cluster.status(token) == 401
    cluster.now += 0.1
    assert await cluster.status(token) == 200
    assert len(cluster.reviews) == 2


@in_event_loop
async def test_a_cached_review_does_not_outlive_the_token() -> None:
    cluster, token = Cluster(), a_token(job_audience(JOB), expires_at=1030)
    assert await cluster.status(token) == 200
    cluster.is_down = True
    cluster.now = 1029.9
    assert await cluster.status(token) == 200
    cluster.now = 1030
    assert await cluster.status(token) == 401


@in_event_loop
async def test_concurrent_requests_share_a_review_even_if_the_first_is_cancelled() -> None:
    cluster, token = Cluster(), a_token(job_audience(JOB))
    cluster.gate = asyncio.Event()
    waiting = [asyncio.create_task(cluster.status(token)) for _ in range(20)]
    other = asyncio.create_task(cluster.status(a_token(job_audience(JOB), nonce=2)))
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    cluster.gate.set()
    assert await asyncio.gather(*waiting[1:], other) == 20 * [200]
    assert waiting[0].cancelled()
    assert len(cluster.reviews) == 2


@in_event_loop
async def test_during_an_outage_only_accepted_tokens_stay_valid_for_some_minutes() -> None:
    cluster, token, unknown = Cluster(), a_token(job_audience(JOB)), a_token(job_audience(JOB), nonce=2)
    assert await cluster.status(token) == 200
    cluster.is_down = True
    assert await cluster.status(unknown) == 503
    cluster.now += ACCEPTED_TTL + OUTAGE_TTL - 0.1
    assert await cluster.status(token) == 200
    cluster.now += 0.1
    refused = await cluster.error(token)
    assert isinstance(refused, UnavailableError)
    assert str(refused) == "no answer; nothing was stored, try again"
    assert refused.headers["Retry-After"] == "5"
    cluster.is_down = False
    cluster.now += RETRY_INTERVAL
    assert await cluster.status(token) == 200
    assert await cluster.status(unknown) == 200


@in_event_loop
async def test_during_an_outage_reviews_are_retried_at_an_interval() -> None:
    cluster = Cluster()
    cluster.is_down = True
    for number in range(10):
        assert await cluster.status(a_token(job_audience(JOB), nonce=number)) == 503
    assert len(cluster.reviews) == 1
    cluster.now += RETRY_INTERVAL
    cluster.is_down = False
    assert await cluster.status(a_token(job_audience(JOB), nonce=1)) == 200


@in_event_loop
async def test_a_rejected_token_is_not_valid_during_an_outage() -> None:
    cluster, token = Cluster(), a_token(job_audience(JOB))
    assert await cluster.status(token) == 200
    cluster.user = None
    cluster.now += ACCEPTED_TTL
    assert await cluster.status(token) == 401
    cluster.is_down = True
    cluster.now += REJECTED_TTL
    assert await cluster.status(token) == 503


@in_event_loop
async def test_the_cache_is_bounded_and_rejected_tokens_evict_no_accepted_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_accounts, "MAX_ENTRIES", 5)

    cluster, good = Cluster(), a_token(job_audience(JOB))
    assert await cluster.status(good) == 200
    cluster.user = None
    unknown_tokens = [a_token(job_audience(JOB), nonce=number) for number in range(20)]
    for unknown in unknown_tokens:
        assert await cluster.status(unknown) == 401
    cluster.is_down = True
    assert await cluster.status(good) == 200
    assert await cluster.status(unknown_tokens[-1]) == 401
    assert await cluster.status(unknown_tokens[0]) == 503, "evicted"
    cluster.is_down, cluster.user = False, WORKER
    cluster.now += RETRY_INTERVAL
    for number in range(100, 105):
        assert await cluster.status(a_token(job_audience(JOB), nonce=number)) == 200
    cluster.user = None
    assert await cluster.status(good) == 401, "the least recently used token is evicted"


@in_event_loop
async def test_the_cache_does_not_contain_tokens() -> None:
    cluster, token = Cluster(), a_token(job_audience(JOB))
    assert await cluster.status(token) == 200
    assert token not in repr(vars(cluster.authorizer._cache))


# -- as a process ---------------------------------------------------------------------------------------


def test_without_the_kubernetes_api_the_service_answers_503_with_retry_after(tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "config", f"https://127.0.0.1:{free_port()}")
    environ = {"KUBECONFIG": str(kubeconfig)}
    token = a_token(job_audience(JOB), expires_at=2**40)
    with ServiceProcess(tmp_path, "--token-review", environ=environ) as service:
        with Client(service.port, token) as client:
            answer = client.call("POST", f"/jobs/{JOB}/gain", a_report().to_json())
            assert answer.status == 503
            assert "the Kubernetes API does not answer, so tokens can't be reviewed" in answer.body["error"]
            assert answer.headers["retry-after"] == "5"
            assert client.call("GET", "/jobs").status == 503
        with Client(service.port, None) as nobody:
            assert nobody.get("/jobs")["jobs"] == []
        assert service.stop() == 0
        assert "Traceback" not in service.log()
        assert "Unclosed" not in service.log()
        assert token not in service.log()


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ([], {"ADASCALE_TOKEN": "a"}, "--token-review and ADASCALE_TOKEN contradict each other"),
        ([], {"ADASCALE_TOKEN_FILE": "/a"}, "--token-review and ADASCALE_TOKEN_FILE contradict each other"),
        (["--controller-account", "a"], {"KUBECONFIG": "{}"}, "must be NAMESPACE:NAME"),
        ([], {"KUBECONFIG": "/no/such/file"}, "no cluster is configured to review tokens"),
        ([], {"KUBECONFIG": "/dev/null"}, "no cluster is configured to review tokens"),
        ([], {}, "Service host/port is not set.; run this in a pod, or set KUBECONFIG"),
        (
            [],
            {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"},
            "Service token file does not exist",
        ),
    ],
)
def test_unusable_options_are_refused_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environ: dict[str, str],
    message: str,
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "ADASCALE_TOKEN", "ADASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        setting = write_kubeconfig(tmp_path / "config", "https://127.0.0.1:1") if value == "{}" else value
        monkeypatch.setenv(name, str(setting))
    with pytest.raises(AdaScaleError, match=re.escape(message)) as refused:
        cli.run(["--token-review", *options], os.environ)
    assert refused.value.exit_code == 2


class SlowCluster:
    """A cluster that reviews each token when the test lets it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def review(self, token: str, audiences: Sequence[str]) -> TokenReviewResult:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((token, answer))
        await answer
        return TokenReviewResult(WORKER if token == GOOD else None, tuple(audiences))

    async def answer_all(self) -> None:
        """Answer the reviews that have begun."""
        for _, answer in self.waiting:
            answer.set_result(None)
        self.waiting.clear()
        for _ in range(10):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Do nothing."""


GOOD = a_token(job_audience(JOB), nonce="good")


@pytest.mark.parametrize("bogus_clients", [1, 20])
def test_bogus_tokens_do_not_delay_a_new_worker_for_long(bogus_clients: int) -> None:
    async def run() -> None:
        cluster = SlowCluster()
        authorizer = ServiceAccountAuthorizer(cluster, clock=lambda: 1000.0, monotonic=lambda: 1000.0)

        async def send(token: str, client: str) -> RequestError | None:
            try:
                await authorizer.authorize(token, Role.WORKER, JOB, client)
            except RequestError as error:
                return error
            return None

        bogus = [
            asyncio.create_task(
                send(a_token(job_audience(JOB), nonce=number), f"bad-{number % bogus_clients}")
            )
            for number in range(500)
        ]
        waiting = min(500, bogus_clients * MAX_REVIEWS_PER_CLIENT)
        while sum(task.done() for task in bogus) < 500 - waiting:
            await asyncio.sleep(0)
        assert len(cluster.waiting) == MAX_REVIEWS
        good = asyncio.create_task(send(GOOD, "good"))
        rounds = 0
        while not good.done():
            await asyncio.sleep(0.01)
            await cluster.answer_all()
            rounds += 1
        assert good.result() is None
        assert rounds <= 1 + bogus_clients * MAX_REVIEWS_PER_CLIENT // MAX_REVIEWS
        while not all(task.done() for task in bogus):
            await asyncio.sleep(0)
            await cluster.answer_all()
        assert all(isinstance(task.result(), UnauthorizedError | UnavailableError) for task in bogus)

    asyncio.run(run())
