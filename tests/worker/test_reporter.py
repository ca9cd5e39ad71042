"""The reporter, with a real metrics service that is stopped, killed and started again."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from adascale_client import MetricsServiceClient, ServiceError
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.registration import REPORTS_PER_POST
from adascale_core.messages.reports import GainReport
from adascale_core.views.gain import StoredReports
from adascale_worker.adascale import AdaScale
from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.program.parts import Optimizers
from adascale_worker.reporting import reports as reporter_module
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.reports import Reporter, Telemetry, require_metrics
from api.client import TOKEN
from support.launch import wait_until
from support.service import Service
from support.training import FIXED, MakeTrainer, entered, samples, train


class ServiceJob:
    """A job at the shared service, and the reporters of this job."""

    def __init__(self, service: Service, job: str) -> None:
        self.service = service
        self.job = job
        self.client = MetricsServiceClient(service.url, TOKEN)
        self.reporters: list[Reporter] = []

    def reporter(self, token: str = TOKEN) -> Reporter:
        self.reporters.append(Reporter(MetricsServiceClient(self.service.url, token), self.job))
        return self.reporters[-1]

    def steps(self) -> list[int]:
        """The steps of the stored reports."""
        try:
            history = self.client.get_history(self.job, 5000)
        except ServiceError:
            return []
        return [report.step for report in history.points]

    def allocate(self, generation: int, replicas: int) -> None:
        self.client.allocate(self.job, Allocation(generation, replicas))


@pytest.fixture
def service_job(service: Service) -> Iterator[ServiceJob]:
    service_job = ServiceJob(service, service.job_id)
    yield service_job
    for reporter in service_job.reporters:
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


def test_reports_are_posted_in_order(service_job: ServiceJob) -> None:
    reporter = service_job.reporter()
    for step in range(1, 6):
        reporter.report(report(step))
    wait_until(lambda: service_job.steps() == [1, 2, 3, 4, 5], "five reports")


def test_close_posts_the_queued_reports(service_job: ServiceJob) -> None:
    reporter = service_job.reporter()
    for step in range(1, 200):
        reporter.report(report(step))
    reporter.close()
    reporter.close()
    assert service_job.steps() == list(range(1, 200))


def test_the_newest_reports_are_queued_while_the_service_does_not_answer(
    service_job: ServiceJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporter_module, "MAX_QUEUED", 50)
    reporter = service_job.reporter()
    reporter.report(report(1))
    wait_until(lambda: service_job.steps() == [1], "a first report")
    service_job.service.stop(signal.SIGKILL)
    for step in range(2, 102):
        reporter.report(report(step))
    output = ""
    while "reports are queued" not in output:
        output += capsys.readouterr().out
        time.sleep(0.01)
    service_job.service.start()
    wait_until(lambda: service_job.steps()[-50:] == [*range(52, 102)], "the newest fifty")
    assert len(service_job.steps()) < 100, "older ones are dropped"
    reporter.close()
    output += capsys.readouterr().out
    assert output.count("does not answer") == 1, "logged once, not at each attempt"
    assert "the metrics service answers again" in output


def test_an_invalid_report_is_dropped_and_the_others_are_posted(
    service_job: ServiceJob, capsys: pytest.CaptureFixture[str]
) -> None:
    service_job.service.stop(signal.SIGKILL)
    reporter = service_job.reporter()
    for step in range(1, 8):
        reporter.report(report(step, gain=float("nan") if step == 4 else 1.5))
    service_job.service.start()
    wait_until(lambda: service_job.steps() == [1, 2, 3, 5, 6, 7], "all reports except the invalid report")
    reporter.report(report(8))
    wait_until(lambda: service_job.steps()[-1:] == [8], "the report after it")
    assert "gain" in capsys.readouterr().out


def test_a_refused_token_does_not_block_the_caller(
    service_job: ServiceJob, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = service_job.reporter(token="wrong")
    output = ""
    for step in range(1, 4):
        reporter.report(report(step))
    while "answers 401" not in output:
        output += capsys.readouterr().out
        time.sleep(0.01)
    started = time.monotonic()
    reporter.close()
    assert time.monotonic() - started < 10


def test_close_returns_after_its_timeout_if_the_service_does_not_answer(service_job: ServiceJob) -> None:
    """A service that is stopped by SIGSTOP accepts connections and never answers."""
    reporter = service_job.reporter()
    service_job.service.send_signal(signal.SIGSTOP)
    try:
        reporter.report(report(1))
        started = time.monotonic()
        reporter.close(timeout=0.3)
        assert time.monotonic() - started < 4, "less than the timeout of a request"
    finally:
        service_job.service.send_signal(signal.SIGCONT)


class BusyService:
    """Asks for a long time between two requests."""

    post_interval = 40.0

    def __init__(self) -> None:
        self.posted: list[list[int]] = []

    def post_gain(self, _job_id: str, reports: list[GainReport]) -> StoredReports:
        self.posted.append([report.step for report in reports])
        view = AllocationView(1, None, None, broken=False, complete=False)
        return StoredReports(len(reports), 0, view, post_interval=self.post_interval)


def test_reports_are_collected_for_as_long_as_the_service_asks_for() -> None:
    service = BusyService()
    reporter = Reporter(service, "a.b")  # type: ignore[arg-type]
    reporter.report(report(1))
    wait_until(lambda: reporter.interval > 0, "the first answer")
    assert reporter.interval == 40.0 / REPORTS_PER_POST
    for step in (2, 3, 4):
        reporter.report(report(step))
    assert service.posted == [[1]]
    reporter.close()
    assert service.posted == [[1], [2, 3, 4]], "the end does not wait"


def test_a_trainer_without_an_agent_reports_every_step(
    service_job: ServiceJob, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service_job.allocate(5, 0)
    monkeypatch.setenv("ADASCALE_API_URL", service_job.service.url)
    monkeypatch.setenv("ADASCALE_JOB_ID", service_job.job)
    monkeypatch.setenv("ADASCALE_TOKEN", TOKEN)
    monkeypatch.setattr("adascale_worker.reporting.reports.REPORT_INTERVAL", 0.0)
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    assert len(train(trainer, model, optimizer, data=samples())) == 6
    wait_until(lambda: service_job.steps() == [1, 2, 3, 4, 5, 6], "the reports of all steps")


class RecordingReporter:
    """Records reports instead of posting them."""

    def __init__(self) -> None:
        self.reports: list[GainReport] = []
        self.interval = 0.0

    def report(self, report: GainReport) -> None:
        self.reports.append(report)


def optimizers() -> Optimizers:
    return Optimizers({"": AdaScale(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.02))})


def test_a_report_has_the_means_of_the_metrics_since_the_last_report() -> None:
    reporter = RecordingReporter()
    group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"))
    make_reporter = lambda: reporter  # noqa: E731
    progress = TrainingProgress()
    telemetry = Telemetry(group, progress, optimizers(), make_reporter, "NVIDIA-H200")  # type: ignore[arg-type]
    telemetry.begin_generation()

    def loss_of_report(*losses: Any, **others: float) -> float | None:
        telemetry.log(others)
        for loss in losses:
            telemetry.log({"loss": loss})
        telemetry.report(BatchPlan(1, 8, 1), BatchBounds(8))
        return reporter.reports[-1].loss

    shapes = (torch.tensor(1.0), torch.tensor([2.0, 4.0]), 5.0, torch.tensor(3.0, dtype=torch.bfloat16))
    assert loss_of_report(*shapes) == 3.0
    assert (reporter.reports[-1].lr_factor, reporter.reports[-1].lr) == (1.0, 0.02)
    # There is no GPU here.
    assert (reporter.reports[-1].gpu_use, reporter.reports[-1].gpu_memory) == (None, None)
    assert reporter.reports[-1].metrics == {}
    assert reporter.reports[-1].accelerator == "NVIDIA-H200"
    assert loss_of_report(accuracy=0.5) == 3.0, "its last mean"
    own = torch.tensor(4.0)
    telemetry.log({"loss": own})
    own.zero_()
    assert loss_of_report() == 4.0, "as it was when it was logged"
    assert loss_of_report(torch.tensor(float("nan")), recall=0.25) is None
    assert reporter.reports[-1].metrics == {"accuracy": 0.5, "recall": 0.25}
    for number in (123_456_789, 10**20):
        loss_of_report(count=number)
        assert reporter.reports[-1].metrics["count"] == number
    assert loss_of_report(np.float32(1.5), np.array(2.5), np.int64(5)) == 3.0
    assert loss_of_report(2.0) == 2.0, "an invalid loss does not affect the next report"
    assert not reporter.reports[-1].counts_samples
    progress.counts_samples = True
    telemetry.report(BatchPlan(1, 8, 1), BatchBounds(8))
    assert reporter.reports[-1].counts_samples


class RecordingTracker:
    """Records its calls. It takes a while to close."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, run: str, step: int, progress: float) -> None:
        self.calls.append(f"begin {run}")

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        self.calls.append(f"log {step}")

    def close(self) -> None:
        time.sleep(0.3)
        self.calls.append("close")


def test_another_rank_0_continues_the_run_of_a_tracker_after_the_one_before_has_closed_it() -> None:
    trackers = [RecordingTracker(), RecordingTracker()]
    groups = [ReplicaGroup(RankAssignment(rank, 2), torch.device("cpu")) for rank in (0, 1)]
    progress = TrainingProgress()
    both = [
        Telemetry(group, progress, optimizers(), lambda: None, tracker=tracker, run=run)
        for group, tracker, run in zip(groups, trackers, ("job", None), strict=True)
    ]
    both[1].load_state_dict(both[0].state_dict())

    def begin_and_report(step: int) -> None:
        progress.step = step
        for telemetry in both:
            telemetry.begin_generation()
            telemetry.report(BatchPlan(2, 4, 1), BatchBounds(8))

    begin_and_report(1)
    wait_until(lambda: trackers[0].calls == ["begin job", "log 1"], "the run of the first rank 0")
    groups[0].rank, groups[1].rank = 1, 0
    begin_and_report(2)
    wait_until(lambda: trackers[0].calls[-1] == "close", "the end of the run there")
    assert trackers[1].calls == [], "the other one has time to close it"
    both[1].close()
    assert trackers[1].calls == ["begin job", "log 2", "close"], "the end does not wait"


@pytest.mark.parametrize("value", [True, np.bool_(True), "1", None, np.ones(2), 1j, torch.ones(0)])
def test_what_is_no_number_is_not_logged(value: object) -> None:
    with pytest.raises(WorkerError, match=r"trainer.log\(\) got .* for accuracy: pass a number or a tensor"):
        require_metrics({"accuracy": value}, 0)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1), np.array(1.0), torch.ones(2)])
def test_numbers_are_logged(value: object) -> None:
    require_metrics({"accuracy": value}, 0)
