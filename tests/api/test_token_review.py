"""Tokens of service accounts: who may do what, and what is remembered of reviews for how long."""

import asyncio
import base64
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_api import cli
from adascale_api import reviews as reviews_module
from adascale_api.auth import Right
from adascale_api.errors import ForbiddenError, RequestError, UnauthorizedError, UnavailableError
from adascale_api.reviews import ACCEPTED_FOR, PAUSE, REFUSED_FOR, TRUSTED_FOR, Review
from adascale_api.token_review import InvalidAccountError, TokenReviewer, read_claims
from adascale_core.errors import AdaScaleError
from adascale_core.names import API_AUDIENCE, job_audience
from api.client import Client, ServiceProcess, a_report
from support.launch import free_port

JOB = "team-a.digits"
OPERATOR = "system:serviceaccount:adascale-system:adascale-controller"
WORKER = "system:serviceaccount:team-a:default"


def a_token(*audiences: str, expires_at: float = 10_000, about: object = None) -> str:
    """As a cluster makes them, but for the signature."""
    return jwt({"aud": list(audiences), "exp": expires_at, "about": about})


def jwt(payload: object) -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(one).encode()) for one in ({"alg": "RS256"}, payload))
    return ".".join([*(part.decode().rstrip("=") for part in parts), "c2lnbmF0dXJl"])


class Cluster:
    """Reviews tokens as it is told, with clocks that are set by hand; counts what it is asked."""

    def __init__(self, user: str | None = WORKER) -> None:
        self.user = user
        self.now = 1000.0
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.is_away = False
        self.gate: asyncio.Event | None = None
        self.reviewer = TokenReviewer(self.review, clock=lambda: self.now, monotonic=lambda: self.now)

    async def review(self, token: str, audiences: Sequence[str]) -> Review:
        self.asked.append((token, tuple(audiences)))
        if self.gate is not None:
            await self.gate.wait()
        if self.is_away:
            raise UnavailableError("nobody answers")
        if self.user is None:
            return Review(None, problem="it is revoked")
        return Review(self.user, tuple(audiences))

    async def require(self, token: str, right: Right = Right.WORK, job: str | None = JOB) -> None:
        await self.reviewer.require(token, right, job)

    async def refusal(
        self, token: str, right: Right = Right.WORK, job: str | None = JOB
    ) -> RequestError | None:
        try:
            await self.require(token, right, job)
        except RequestError as error:
            return error
        return None

    async def status(self, token: str, right: Right = Right.WORK, job: str | None = JOB) -> int:
        refused = await self.refusal(token, right, job)
        return 200 if refused is None else refused.status


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test()

    asyncio.run(whole())


# -- who may do what ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "audience", "right", "job", "status"),
    [
        # the operator: everything
        (OPERATOR, API_AUDIENCE, Right.CONTROL, JOB, 200),
        (OPERATOR, API_AUDIENCE, Right.WORK, JOB, 200),
        (OPERATOR, API_AUDIENCE, Right.READ, JOB, 200),
        (OPERATOR, API_AUDIENCE, Right.READ, None, 200),
        # the operator's account, with a token that is for a job in another namespace
        (OPERATOR, job_audience(JOB), Right.CONTROL, JOB, 403),
        (OPERATOR, job_audience(JOB), Right.WORK, JOB, 403),
        # a worker of the job
        (WORKER, job_audience(JOB), Right.WORK, JOB, 200),
        (WORKER, job_audience(JOB), Right.READ, JOB, 200),
        (WORKER, job_audience(JOB), Right.CONTROL, JOB, 403),
        (WORKER, job_audience(JOB), Right.READ, None, 403),
        ("system:serviceaccount:team-a:trainer", job_audience(JOB), Right.WORK, JOB, 200),
        # of another job, of the same name elsewhere, of a name that begins alike
        (WORKER, job_audience("team-a.other"), Right.WORK, JOB, 403),
        (WORKER, job_audience("team-b.digits"), Right.WORK, JOB, 403),
        (WORKER, job_audience("team-b.digits"), Right.WORK, "team-b.digits", 403),
        (WORKER, job_audience(JOB), Right.WORK, "team-a.digits-2", 403),
        # for the job, but of an account elsewhere
        ("system:serviceaccount:team-b:default", job_audience(JOB), Right.WORK, JOB, 403),
        ("system:serviceaccount:team-a-b:default", job_audience(JOB), Right.WORK, JOB, 403),
        ("system:serviceaccount:team:a:default", job_audience(JOB), Right.WORK, JOB, 403),
        ("team-a", job_audience(JOB), Right.WORK, JOB, 403),
        ("system:admin", job_audience(JOB), Right.WORK, JOB, 403),
        # for the operator's audience, but of another account
        (WORKER, API_AUDIENCE, Right.CONTROL, JOB, 403),
        (WORKER, API_AUDIENCE, Right.WORK, JOB, 403),
        ("adascale-system:adascale-controller", API_AUDIENCE, Right.CONTROL, JOB, 403),
        (
            "system:serviceaccount:adascale-system:adascale-controller-2",
            API_AUDIENCE,
            Right.CONTROL,
            JOB,
            403,
        ),
        # that the cluster does not know, or that is for others
        (None, job_audience(JOB), Right.WORK, JOB, 401),
        (WORKER, "https://kubernetes.default.svc", Right.WORK, JOB, 401),
        (OPERATOR, "adascale.dev/api/", Right.CONTROL, JOB, 401),
    ],
)
def test_who_may_do_what(user: str | None, audience: str, right: Right, job: str | None, status: int) -> None:
    async def test() -> None:
        assert await Cluster(user).status(a_token(audience), right, job) == status

    run(test)


def test_only_audiences_that_the_cluster_confirms_count() -> None:
    async def confirm_one(token: str, audiences: Sequence[str]) -> Review:
        return Review(WORKER, ("adascale.dev/jobs/team-a.other",))

    async def test() -> None:
        reviewer = TokenReviewer(confirm_one, clock=lambda: 0.0)
        token = a_token(job_audience(JOB), "adascale.dev/jobs/team-a.other", "https://example.org")
        await reviewer.require(token, Right.WORK, "team-a.other")
        with pytest.raises(ForbiddenError):
            await reviewer.require(token, Right.WORK, JOB)

    run(test)


def test_a_token_is_reviewed_for_our_audiences_alone() -> None:
    async def test() -> None:
        cluster = Cluster()
        await cluster.require(a_token("https://example.org", job_audience(JOB), API_AUDIENCE))
        assert cluster.asked[0][1] == (job_audience(JOB), API_AUDIENCE)

    run(test)


def test_a_refusal_says_what_was_got_and_what_is_needed() -> None:
    async def test() -> None:
        cluster = Cluster()
        told = str(await cluster.refusal(a_token(job_audience("team-a.other"))))
        assert told == (
            "the token, of team-a:default for adascale.dev/jobs/team-a.other, is not enough: working for "
            "team-a.digits needs one of namespace team-a for adascale.dev/jobs/team-a.digits, or one of "
            "adascale-system:adascale-controller for adascale.dev/api. Nothing was done"
        )
        told = str(await cluster.refusal(a_token(job_audience(JOB)), Right.CONTROL))
        assert told.endswith(
            "needs one of adascale-system:adascale-controller for adascale.dev/api. Nothing was done"
        )
        assert "the token has expired, 40 s ago" in str(
            await cluster.refusal(a_token(job_audience(JOB), expires_at=960))
        )
        cluster.user = None
        assert str(await cluster.refusal(a_token(job_audience(JOB), about=2))) == (
            "the cluster does not accept the token: it is revoked"
        )

    run(test)


@pytest.mark.parametrize("name", ["", "a", "a:", ":b", "a:b:c"])
def test_an_account_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidAccountError, match="must be NAMESPACE:NAME"):
        TokenReviewer(Cluster().review, name)


# -- what is not even asked for -------------------------------------------------------------------------

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
    a_token(API_AUDIENCE, about="x" * 20_000),
    "e30." + base64.urlsafe_b64encode(b"[" * 9000).decode().rstrip("=") + ".c2ln",
]


@pytest.mark.parametrize("token", GARBAGE, ids=range(len(GARBAGE)))
def test_what_is_no_token_of_an_account_is_refused_without_asking(token: str) -> None:
    async def test() -> None:
        cluster = Cluster(OPERATOR)
        assert isinstance(await cluster.refusal(token), UnauthorizedError)
        assert cluster.asked == []

    run(test)


@given(st.text(max_size=60) | st.builds("{}.{}.{}".format, *[st.text("ab-_=e3", min_size=1)] * 3))
def test_any_text_is_read(text: str) -> None:
    read_claims(text)


def test_a_token_that_says_itself_that_it_has_expired_is_refused_without_asking() -> None:
    async def test() -> None:
        cluster = Cluster()
        assert await cluster.status(a_token(job_audience(JOB), expires_at=1000)) == 401
        assert cluster.asked == []

    run(test)


# -- what is remembered ---------------------------------------------------------------------------------


def test_an_accepted_token_is_asked_for_once_a_minute() -> None:
    async def test() -> None:
        cluster, token = Cluster(), a_token(job_audience(JOB))
        for seconds in (0, 1, ACCEPTED_FOR - 3):
            cluster.now += seconds
            assert await cluster.status(token) == 200
            assert await cluster.status(token, Right.CONTROL) == 403
            assert len(cluster.asked) == 1
        cluster.now += 1
        cluster.user = None
        assert await cluster.status(token) == 200
        cluster.now += 1
        assert await cluster.status(token) == 401
        assert len(cluster.asked) == 2

    run(test)


def test_a_refused_token_is_asked_for_again_after_some_seconds() -> None:
    async def test() -> None:
        cluster, token = Cluster(None), a_token(job_audience(JOB))
        assert await cluster.status(token) == 401
        cluster.user = WORKER
        cluster.now += REFUSED_FOR - 0.1
        assert await cluster.status(token) == 401
        cluster.now += 0.1
        assert await cluster.status(token) == 200
        assert len(cluster.asked) == 2

    run(test)


def test_nothing_remembered_outlives_the_token_itself() -> None:
    async def test() -> None:
        cluster, token = Cluster(), a_token(job_audience(JOB), expires_at=1030)
        assert await cluster.status(token) == 200
        cluster.is_away = True
        cluster.now = 1029.9
        assert await cluster.status(token) == 200
        cluster.now = 1030
        assert await cluster.status(token) == 401

    run(test)


def test_requests_at_the_same_time_ask_once_also_when_the_first_is_given_up() -> None:
    async def test() -> None:
        cluster, token = Cluster(), a_token(job_audience(JOB))
        cluster.gate = asyncio.Event()
        waiting = [asyncio.create_task(cluster.status(token)) for _ in range(20)]
        other = asyncio.create_task(cluster.status(a_token(job_audience(JOB), about=2)))
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        cluster.gate.set()
        assert await asyncio.gather(*waiting[1:], other) == 20 * [200]
        assert waiting[0].cancelled()
        assert len(cluster.asked) == 2

    run(test)


def test_while_nobody_answers_accepted_tokens_stay_good_for_some_minutes_and_no_other_is() -> None:
    async def test() -> None:
        cluster, token, stranger = Cluster(), a_token(job_audience(JOB)), a_token(job_audience(JOB), about=2)
        assert await cluster.status(token) == 200
        cluster.is_away = True
        assert await cluster.status(stranger) == 503
        cluster.now += ACCEPTED_FOR + TRUSTED_FOR - 0.1
        assert await cluster.status(token) == 200
        cluster.now += 0.1
        refused = await cluster.refusal(token)
        assert isinstance(refused, UnavailableError)
        assert str(refused) == "nobody answers; nothing was done, try again"
        assert refused.headers["Retry-After"] == "5"
        cluster.is_away = False
        cluster.now += PAUSE
        assert await cluster.status(token) == 200
        assert await cluster.status(stranger) == 200

    run(test)


def test_while_nobody_answers_it_is_tried_now_and_then_only() -> None:
    async def test() -> None:
        cluster = Cluster()
        cluster.is_away = True
        for number in range(10):
            assert await cluster.status(a_token(job_audience(JOB), about=number)) == 503
        assert len(cluster.asked) == 1
        cluster.now += PAUSE
        cluster.is_away = False
        assert await cluster.status(a_token(job_audience(JOB), about=1)) == 200

    run(test)


def test_a_token_that_was_refused_is_not_good_while_nobody_answers() -> None:
    async def test() -> None:
        cluster, token = Cluster(), a_token(job_audience(JOB))
        assert await cluster.status(token) == 200
        cluster.user = None
        cluster.now += ACCEPTED_FOR
        assert await cluster.status(token) == 401
        cluster.is_away = True
        cluster.now += REFUSED_FOR
        assert await cluster.status(token) == 503

    run(test)


def test_memory_is_bounded_and_refused_tokens_push_out_no_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews_module, "MAX_REMEMBERED", 5)

    async def test() -> None:
        cluster, good = Cluster(), a_token(job_audience(JOB))
        assert await cluster.status(good) == 200
        cluster.user = None
        strangers = [a_token(job_audience(JOB), about=number) for number in range(20)]
        for stranger in strangers:
            assert await cluster.status(stranger) == 401
        cluster.is_away = True
        assert await cluster.status(good) == 200
        assert await cluster.status(strangers[-1]) == 401
        assert await cluster.status(strangers[0]) == 503, "forgotten"
        cluster.is_away, cluster.user = False, WORKER
        cluster.now += PAUSE
        for number in range(100, 105):
            assert await cluster.status(a_token(job_audience(JOB), about=number)) == 200
        cluster.user = None
        assert await cluster.status(good) == 401, "the one that was used longest ago is forgotten"

    run(test)


def test_tokens_themselves_are_not_kept() -> None:
    async def test() -> None:
        cluster, token = Cluster(), a_token(job_audience(JOB))
        assert await cluster.status(token) == 200
        assert token not in repr(vars(cluster.reviewer._reviews))

    run(test)


# -- as a process ---------------------------------------------------------------------------------------


def kubeconfig_of(folder: Path, server: str) -> str:
    """A kubeconfig that names a server."""
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "one",
                "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
                "clusters": [{"name": "one", "cluster": {"server": server}}],
                "users": [{"name": "one", "user": {"token": "ours"}}],
            }
        )
    )
    return str(path)


def test_with_the_kubernetes_api_away_unknown_tokens_are_told_to_try_again(tmp_path: Path) -> None:
    environ = {"KUBECONFIG": kubeconfig_of(tmp_path, f"https://127.0.0.1:{free_port()}")}
    token = a_token(job_audience(JOB), expires_at=2**40)
    with ServiceProcess(tmp_path, "--token-review", environ=environ) as service:
        with Client(service.port, token) as client:
            answer = client.call("POST", f"/jobs/{JOB}/gain", a_report().to_json())
            assert answer.status == 503
            assert "the Kubernetes API, which reviews tokens, does not answer" in answer.body["error"]
            assert answer.headers["retry-after"] == "5"
            assert client.get("/jobs")["jobs"] == []
        service.process.terminate()
        assert service.process.wait(20) == 0
        assert "Traceback" not in service.log()
        assert "Unclosed" not in service.log()
        assert token not in service.log()


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (["--no-auth"], {}, "--token-review and --no-auth contradict each other"),
        ([], {"ADASCALE_TOKEN": "a"}, "--token-review and ADASCALE_TOKEN contradict each other"),
        ([], {"ADASCALE_TOKEN_FILE": "/a"}, "--token-review and ADASCALE_TOKEN_FILE contradict each other"),
        (["--controller-account", "a"], {"KUBECONFIG": "{}"}, "must be NAMESPACE:NAME"),
        ([], {"KUBECONFIG": "/no/such/file"}, "there is no cluster that could review tokens"),
        ([], {"KUBECONFIG": "/dev/null"}, "there is no cluster that could review tokens"),
        ([], {}, "Service host/port is not set.; run this in a pod, or set KUBECONFIG"),
        (
            [],
            {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"},
            "Service token file does not exist",
        ),
    ],
)
def test_what_cannot_be_followed_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environ: dict[str, str],
    message: str,
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "ADASCALE_TOKEN", "ADASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        told = kubeconfig_of(tmp_path, "https://127.0.0.1:1") if value == "{}" else value
        monkeypatch.setenv(name, told)
    with pytest.raises(AdaScaleError, match=re.escape(message)) as refused:
        cli.serve(cli._parser().parse_args(["--token-review", *options]), os.environ)
    assert refused.value.exit_code == 2
