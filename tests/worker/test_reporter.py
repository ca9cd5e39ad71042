"""The reporter, against the real metrics service: nothing waits for it, and little is lost."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adascale_client import MetricsServiceClient
from adascale_core.batch import BatchBounds
from adascale_core.messages import GainReport
from adascale_worker import reporter as reporter_module
from adascale_worker.reporter import Reporter
from adascale_worker.telemetry import Telemetry
from support.launch import wait_until
from support.service import TOKEN, Service
from support.training import FIXED, MakeTrainer, network, samples, sgd, train


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.stop(signal.SIGKILL)


class Desk:
    """A service with a job of its own for each test, and the reporters to it."""

    def __init__(self, service: Service, job: str) -> None:
        self.service = service
        self.job = job
        self.reporters: list[Reporter] = []

    def reporter(self, generation: int = 1, token: str = TOKEN) -> Reporter:
        client = MetricsServiceClient(self.service.url, token)
        self.reporters.append(Reporter(client.for_job(self.job), generation))
        return self.reporters[-1]

    def steps(self) -> list[int]:
        """The steps that were reported."""
        self.service._job = self.job
        try:
            points: list[dict[str, Any]] = self.service.call("GET", "/gain/history?points=5000")["points"]
        except OSError:
            return []
        return [point["step"] for point in points]

    def allocate(self, generation: int, replicas: int) -> None:
        self.service._job = self.job
        self.service.allocate(generation, replicas)


@pytest.fixture
def desk(running: Service, request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(running, f"default.job-{abs(hash(request.node.name)) % 10**9}")
    yield desk
    for reporter in desk.reporters:
        reporter.close()
    wait_until(
        lambda: not any(thread.name == "adascale-reporter" for thread in threading.enumerate()),
        "the end of all reporters",
    )


def report(step: int, **changes: Any) -> GainReport:
    members = {
        "generation": 1,
        "step": step,
        "progress": 1.5 * step,
        "epoch": 0,
        "replicas": 2,
        "local_bsz": 8,
        "accumulation": 1,
        "scale": 2.0,
        "gain": 1.5,
        "grad_sqr": 1.0,
        "grad_var": 2.0,
        "step_time": 0.1,
        "time": time.time(),
        **changes,
    }
    return GainReport(**members)


def test_reports_arrive(desk: Desk) -> None:
    reporter = desk.reporter()
    for step in range(1, 6):
        reporter.report(report(step))
    wait_until(lambda: desk.steps() == [1, 2, 3, 4, 5], "five reports")


def test_what_waits_is_posted_when_it_closes(desk: Desk) -> None:
    reporter = desk.reporter()
    for step in range(1, 200):
        reporter.report(report(step))
    reporter.close()
    reporter.close()
    assert desk.steps() == list(range(1, 200))


def test_reports_wait_while_the_service_is_away_the_newest_of_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporter_module, "MAX_WAITING", 50)
    reporter = desk.reporter()
    reporter.report(report(1))
    wait_until(lambda: desk.steps() == [1], "a first report")
    desk.service.stop(signal.SIGKILL)
    for step in range(2, 102):
        reporter.report(report(step))
    told = ""
    while "reports wait" not in told:
        told += capsys.readouterr().out
        time.sleep(0.01)
    desk.service.start()
    wait_until(lambda: desk.steps() == [1, *range(52, 102)], "the newest fifty")
    told += capsys.readouterr().out
    assert told.count("does not answer") == 1, "told once, and not at each attempt"
    assert "the metrics service answers again" in told


def test_a_report_that_is_refused_takes_no_other_with_it(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.service.stop(signal.SIGKILL)
    reporter = desk.reporter()
    for step in range(1, 8):
        reporter.report(report(step, gain=float("nan") if step == 4 else 1.5))
    desk.service.start()
    wait_until(lambda: desk.steps() == [1, 2, 3, 5, 6, 7], "all but the refused one")
    reporter.report(report(8))
    wait_until(lambda: desk.steps()[-1:] == [8], "those that come after it")
    assert "gain" in capsys.readouterr().out


def test_a_token_that_is_not_taken_stalls_nothing(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = desk.reporter(token="wrong")
    told = ""
    for step in range(1, 4):
        reporter.report(report(step))
    while "answers 401" not in told:
        told += capsys.readouterr().out
        time.sleep(0.01)
    began = time.monotonic()
    reporter.close()
    assert time.monotonic() - began < 10


def test_closing_while_the_service_is_silent_is_bounded_in_time(desk: Desk) -> None:
    """A service that is stopped takes connections and never answers."""
    assert desk.service._process is not None
    reporter = desk.reporter()
    desk.service._process.send_signal(signal.SIGSTOP)
    try:
        reporter.report(report(1))
        began = time.monotonic()
        reporter.close(patience=0.3)
        assert time.monotonic() - began < 4, "less than the service's own time to answer"
    finally:
        desk.service._process.send_signal(signal.SIGCONT)


def test_a_newer_generation_is_heard_of(desk: Desk) -> None:
    reporter = desk.reporter(generation=1)
    desk.allocate(1, 0)
    assert not reporter.generation_is_over
    desk.allocate(2, 0)  # of no replicas, so it is active at once
    wait_until(lambda: reporter.generation_is_over, "the end of the generation")


def test_a_trainer_without_an_agent_reports_and_is_never_told_to_leave(
    desk: Desk, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.allocate(5, 0)
    monkeypatch.setenv("ADASCALE_API_URL", desk.service.url)
    monkeypatch.setenv("ADASCALE_JOB_ID", desk.job)
    monkeypatch.setenv("ADASCALE_TOKEN", TOKEN)
    monkeypatch.setattr("adascale_worker.telemetry.REPORT_INTERVAL", 0.0)
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    wait_until(lambda: trainer._telemetry._reporter._view is not None, "an answer")  # type: ignore[union-attr]
    assert len(train(trainer, model, optimizer, data=samples())) == 6
    wait_until(lambda: desk.steps() == [1, 2, 3, 4, 5, 6], "the reports of all steps")


def test_losses_of_any_shape_are_averaged_and_kept_until_the_next_report_only() -> None:
    class Kept:
        def __init__(self) -> None:
            self.reports: list[GainReport] = []

        def report(self, report: GainReport) -> None:
            self.reports.append(report)

    kept = Kept()
    telemetry = Telemetry(BatchBounds(8), 1, kept)  # type: ignore[arg-type]
    losses: list[torch.Tensor | float] = [
        torch.tensor(1.0),
        torch.tensor([2.0, 4.0]),
        5.0,
        torch.tensor(3.0, dtype=torch.bfloat16),
    ]
    for loss in losses:
        telemetry.log_loss(loss)
    assert telemetry._mean_loss() == 3.0
    assert telemetry._mean_loss() is None
    telemetry.log_loss(torch.tensor(float("nan")))
    assert telemetry._mean_loss() is None
