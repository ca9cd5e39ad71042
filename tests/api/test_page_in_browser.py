"""The page in Chromium: what it shows, by keyboard, on a phone, and for assistive technology."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.job_summary import JobStateName, RunEntry, RunView
from api.client import TOKEN, Client, ServiceProcess, a_registration, a_report
from api.page_jobs import HOSTILE, fill, running

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
matplotlib_image = pytest.importorskip("matplotlib.image", reason="Matplotlib is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
from playwright.sync_api import Browser, ConsoleMessage, Page, expect  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
READ_TOKEN = "the-read-token-of-these-tests"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    # Playwright's loop runs in a greenlet of its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with a job that trains, one that waits, and one that has failed."""
    environ = {"ADASCALE_TOKEN": TOKEN, "ADASCALE_READ_TOKEN": READ_TOKEN}
    with ServiceProcess(tmp_path_factory.mktemp("page"), environ=environ) as service:
        with Client(service.port) as client:
            fill(client)
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, shown: ServiceProcess) -> Iterator[Page]:
    """A page that fails the test by any error, and by any request to another host."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        opened = context.new_page()
        opened.set_default_timeout(30_000)
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda message: _note_error(message, problems))
        opened.on("request", lambda request: _check_host(request.url, shown.port, problems))
        yield opened
        assert problems == []


# What Chromium ends requests with when an interface of the machine changes, as when pods start beside.
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"


def _note_error(message: ConsoleMessage, problems: list[str]) -> None:
    if message.type == "error" and NETWORK_CHANGED not in message.text:
        problems.append(message.text)


def _check_host(url: str, port: int, problems: list[str]) -> None:
    if not url.startswith(f"http://127.0.0.1:{port}/"):
        problems.append(url)


def show(page: Page, service: ServiceProcess, route: str = "#/") -> None:
    requests: list[str] = []
    page.on("response", lambda response: requests.append(f"{response.status} {response.url}"))
    page.on("requestfailed", lambda request: requests.append(f"{request.failure} {request.url}"))
    for _ in range(5):
        # From one fragment of a document to the same, Chromium would not load the document again.
        page.goto("about:blank")
        requests.clear()
        with contextlib.suppress(sync_api.Error):
            page.goto(f"http://127.0.0.1:{service.port}/{route}")
        if not any(NETWORK_CHANGED in each for each in requests):
            break
    try:
        expect(page.locator("#status")).to_have_text("Live", timeout=30_000)
    except AssertionError as error:
        raise AssertionError(f"{error}\n\nrequests: {requests}") from error


def test_the_list_shows_the_jobs_and_follows_them(page: Page, shown: ServiceProcess) -> None:
    show(page, shown)
    expect(page.get_by_role("row", name=re.compile("team.queued"))).to_contain_text("Pending")
    expect(page.get_by_role("row", name=re.compile("team.failed"))).to_contain_text("Failed")
    cells = page.get_by_role("row", name=re.compile("team.digits")).locator("td, th")
    assert cells.all_inner_texts()[1:6] == ["Running", "2", "8", "2", "50%"]
    with Client(shown.port) as client:
        last = {"generation": 2, "progress": 600.0, "replicas": 2, "local_bsz": 16, "time": 1.76e9 + 200}
        client.post_gain("team.digits", a_report(200, gain=3.0, **last))
        for column, text in enumerate(("3", "75%", "3%"), start=4):
            expect(cells.nth(column)).to_have_text(text)
        client.put("/jobs/team.new", JobSpec(8).to_json())
        expect(page.get_by_role("link", name="team.new")).to_be_visible()
        client.call("DELETE", "/jobs/team.new")
        expect(page.get_by_role("link", name="team.new")).to_have_count(0)


def test_a_job_is_opened_by_keyboard_and_its_charts_are_read_by_keyboard(
    page: Page, shown: ServiceProcess
) -> None:
    show(page, shown)
    page.get_by_role("link", name="team.digits").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="team.digits", level=1)).to_be_visible()
    chart = page.get_by_role("slider", name="Gain and scale")
    expect(chart).to_have_attribute("aria-valuetext", re.compile("gain"))
    chart.focus()
    page.keyboard.press("Home")
    first = chart.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowRight")
    assert first is not None
    expect(chart).not_to_have_attribute("aria-valuetext", first)


def test_each_logged_metric_has_a_chart_from_its_first_report_on(page: Page, shown: ServiceProcess) -> None:
    with Client(shown.port) as client:
        client.post_gain("team.metrics", a_report(1), a_report(2, metrics={"accuracy": 0.25}))
        show(page, shown, "#/jobs/team.metrics")
        chart = page.get_by_role("slider", name="accuracy")
        expect(chart).to_have_attribute("aria-valuetext", re.compile(r": 0\.25$"))
        charts = page.locator(".charts > *")
        before = charts.count()
        client.post_gain("team.metrics", a_report(3, metrics={"grad_norm": 2.0, "accuracy": 0.5}))
        expect(page.get_by_role("slider", name="grad_norm")).to_be_visible()
        expect(charts).to_have_count(before + 1)
        client.call("DELETE", "/jobs/team.metrics")


def test_a_job_that_is_opened_before_its_first_report_shows_all_reports(
    page: Page, shown: ServiceProcess
) -> None:
    with Client(shown.port) as client:
        client.put("/jobs/team.new", JobSpec(8, max_replicas=4).to_json())
        show(page, shown, "#/jobs/team.new")
        expect(page.get_by_text("Predictions need the declaration")).to_be_visible()
        chart = page.locator(".charts [role=slider]").first
        for step in range(1, 4):
            client.post_gain("team.new", a_report(step))
            expect(chart).to_have_attribute("aria-valuemax", str(step - 1), timeout=30_000)
        client.call("DELETE", "/jobs/team.new")
        client.post_gain("team.new", a_report(1), a_report(2))
        expect(chart).to_have_attribute("aria-valuemax", "1", timeout=30_000)
        client.call("DELETE", "/jobs/team.new")


def test_a_link_shows_a_job_over_progress_with_its_generations(page: Page, shown: ServiceProcess) -> None:
    show(page, shown, "#/jobs/team.digits?x=progress")
    expect(page.get_by_role("radio", name="progress")).to_be_checked()
    chart = page.get_by_role("slider", name="Gain and scale")
    expect(chart.locator("path.curve")).to_have_count(2)
    expect(chart.locator("line.mark")).to_have_count(1)
    expect(page.get_by_role("region", name="Generations")).to_contain_text("replicas changed")
    page.get_by_role("radio", name="time").check()
    assert page.url.endswith("#/jobs/team.digits")


def test_a_job_shows_the_stored_decision_and_follows_it(page: Page, shown: ServiceProcess) -> None:
    show(page, shown, "#/jobs/team.digits")
    section = page.get_by_role("heading", name="Why it has this replica count").locator("+ div")
    expect(section).to_contain_text("2 replicas, decided")
    expect(section).to_contain_text("predicted goodput is 1.5 times that of 1")
    expect(section.locator("ul")).to_have_text("0 of 2 replicas are free")
    counts = page.get_by_role("region", name="Counts in the decision")
    assert [row.locator("th, td").all_inner_texts() for row in counts.locator("tbody tr").all()] == [
        ["1", "1", "10", "1\u00d7", "50 s", "\u2013", "slower"],
        ["2", "5.71 (4.7 to 6)", "15", "1.5\u00d7", "40 s", "\u2013", "chosen"],
        ["4", "\u2013", "25", "2.5\u00d7", "30 s", "2 of team.queued", HOSTILE],
    ]
    expect(counts.locator("tr.current th").first).to_have_text("2")
    assert page.evaluate("window.hacked") is None

    show(page, shown, "#/jobs/team.queued")
    expect(section).to_contain_text("It waits for capacity")
    expect(section).to_contain_text("needs 1, free are 0")
    with Client(shown.port) as client:
        decision = client.get("/jobs/team.queued/decision")
        client.put("/jobs/team.queued/decision", {**decision, "time": 1.77e9, "reason": "still needs 1"})
        expect(section).to_contain_text("still needs 1", timeout=30_000)
        client.put("/jobs/team.queued/decision", decision)


def test_a_slow_replica_is_named_until_it_is_slow_no_more(page: Page, shown: ServiceProcess) -> None:
    with Client(shown.port) as client:
        client.put("/jobs/team.slow/allocation", {"generation": 1, "replicas": 2})
        for rank in range(2):
            client.register("team.slow", a_registration(rank))
        for rank in range(2):
            client.register("team.slow", running(rank, 1, 2))
        slow = a_report(40, generation=1, slow_replica=1, slow_factor=1.234, accelerator="cpu")
        client.post_gain("team.slow", slow)
        show(page, shown, "#/jobs/team.slow")
        named = page.get_by_text(
            "Replica 1 is slow: in each step it computes 1.23 times as long as the others"
        )
        expect(named).to_contain_text("the usual cause is that more processes compute than it has free cores")
        expect(page.get_by_role("cell", name="running, slow")).to_be_visible()
        client.post_gain("team.slow", a_report(41, generation=1))
        expect(named).to_be_hidden()
        client.register("team.slow", a_registration(2))
        client.put("/jobs/team.slow/allocation", {"generation": 2, "replicas": 2, "spares": 1})
        for rank in range(2):
            client.register("team.slow", running(rank, 2, 2))
        client.post_gain("team.slow", a_report(42, generation=2, slow_replica=1, slow_factor=1.234))
        client.register("team.slow", running(0, 3, 2))
        client.post_gain("team.slow", a_report(43, generation=3))
        replaced = (
            "Replica 1 was slow, it computed 1.23 times as long as the others: replica 2, a spare, trains"
        )
        expect(page.get_by_text(replaced)).to_be_visible(timeout=30_000)
        client.call("DELETE", "/jobs/team.slow")


def test_counts_are_predicted_until_the_controller_has_decided(page: Page, shown: ServiceProcess) -> None:
    spec = JobSpec(8, 256, (4, 64), 1, 4, 20_000)
    predictions = page.get_by_role("region", name="Predictions for other replica counts")
    with Client(shown.port) as client:
        client.put("/jobs/team.early", spec.to_json())
        client.post_gain("team.early", *(a_report(step) for step in range(3)))
        show(page, shown, "#/jobs/team.early")
        expect(predictions).to_be_visible(timeout=30_000)
        expect(page.get_by_text("No decision about this job is stored")).to_be_visible()
        client.call("DELETE", "/jobs/team.early")
    show(page, shown, "#/jobs/team.digits")
    expect(page.get_by_role("region", name="Counts in the decision")).to_be_visible()
    expect(predictions).to_have_count(0)


def test_a_job_that_has_ended_shows_what_became_of_it(page: Page, shown: ServiceProcess) -> None:
    with Client(shown.port) as client:
        client.put("/jobs/team.done", JobSpec(8, scale_invariant_steps=100).to_json())
        client.put("/jobs/team.done/allocation", {"generation": 1, "replicas": 1})
        client.register("team.done", a_registration())
        client.register("team.done", running(0, 1, 1))
        client.post_gain("team.done", a_report(90, progress=100.0, loss=0.25))
        client.register("team.done", a_registration(replica_state=ReplicaState.FINISHED, generation=1))
        show(page, shown, "#/jobs/team.done")
        result = page.get_by_text("Complete at progress 100, in 90 steps")
        expect(result).to_contain_text("on 1 replica; the last loss was 0.25.", timeout=30_000)
        expect(result).to_contain_text(
            re.compile(r"One replica would have made 100 steps in an estimated [\d.]+ ")
        )
        expect(page.get_by_role("heading", name="Why it has this replica count")).to_be_hidden()
        client.call("DELETE", "/jobs/team.done")
    show(page, shown, "#/jobs/team.failed")
    expect(page.get_by_text("The output of its last replica is below")).to_be_visible(timeout=30_000)
    expect(page.get_by_role("region", name="Replicas", exact=True)).to_contain_text(
        "has failed (exit code 1)"
    )


def test_an_unknown_job_and_an_empty_list_say_how_to_start_one(
    browser: Browser, page: Page, shown: ServiceProcess, tmp_path: Path
) -> None:
    show(page, shown, "#/jobs/team.nowhere")
    expect(page.get_by_text("There is no job default.nowhere")).to_have_count(0)
    expect(page.get_by_text("There is no job team.nowhere here")).to_be_visible()
    expect(page.get_by_role("slider")).to_have_count(0)
    with ServiceProcess(tmp_path) as service, browser.new_context() as context:
        empty = context.new_page()
        show(empty, service)
        expect(empty.get_by_text("adascale run deploy/adascalejob.yaml")).to_be_visible()


def test_a_part_of_a_chart_is_shown_by_dragging_and_by_keys(page: Page, shown: ServiceProcess) -> None:
    show(page, shown, "#/jobs/team.digits?x=progress")
    chart = page.get_by_role("slider", name="Gain and scale")
    labels = chart.locator("text.axis:not([text-anchor=end]):not([x='54'])")
    expect(chart.locator("path.curve")).to_have_count(2)
    whole = labels.all_text_contents()
    assert len(whole) > 2
    assert all(int(label) % 100 == 0 for label in whole)
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    others = page.get_by_role("slider", name="Efficiency").locator("text.axis")
    assert others.all_text_contents()[-1] != whole[-1], "all charts show the same part"
    page.get_by_role("button", name="Show all").click()
    assert labels.all_text_contents() == whole
    chart.focus()
    page.keyboard.press("+")
    expect(page.get_by_role("button", name="Show all")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Show all")).to_be_hidden()


def test_the_loss_is_shown_smoothed_and_by_its_logarithm(page: Page, shown: ServiceProcess) -> None:
    with Client(shown.port) as client:
        losses = [10.0 ** (-step / 20) for step in range(60)]
        reports = (a_report(step, time=1.76e9 + step, loss=loss) for step, loss in enumerate(losses))
        client.post_gain("team.loss", *reports)
        show(page, shown, "#/jobs/team.loss")
        chart = page.get_by_role("slider", name="Loss")
        expect(chart.locator("path.curve")).to_have_count(1)
        page.get_by_label("Logarithmic").check()
        labels = chart.locator("text.axis[text-anchor=end][x='54']")
        assert labels.all_text_contents()[0] == "0.001"
        page.get_by_label("Smoothing of the loss").select_option("0.9")
        expect(chart.locator("path.faint")).to_have_count(1)
        weights = [0.9 ** (59 - step) for step in range(60)]
        mean = sum(map(operator.mul, weights, losses)) / sum(weights)
        expect(chart).to_have_attribute("aria-valuetext", re.compile(f": {mean:.3g}"))
        with page.expect_download() as downloaded:
            page.get_by_role("button", name="Download CSV").click()
        lines = downloaded.value.path().read_text().splitlines()
        assert lines[0].startswith("time,generation,step,progress")
        assert len(lines) == 61
        client.call("DELETE", "/jobs/team.loss")


def test_numbers_of_replicas_are_whole_and_every_job_is_counted(page: Page, shown: ServiceProcess) -> None:
    show(page, shown, "#/jobs/team.digits")
    labels = page.get_by_role("slider", name="Replicas").locator("text.axis[text-anchor=end]")
    expect(labels.first).to_have_text("0")
    assert all("." not in label for label in labels.all_text_contents())
    show(page, shown)
    counted = page.locator("dl.facts")
    expect(counted).to_contain_text(
        re.compile(r"Jobs\s*3\s*Training\s*1\s*Starting\s*0\s*Pending\s*1\s*Stopped\s*0\s*Failed\s*1")
    )


def test_jobs_are_shown_over_each_other_by_progress_or_time(page: Page, shown: ServiceProcess) -> None:
    with Client(shown.port) as client:
        client.post_gain("team.first", *(a_report(n, progress=2.0 * n, time=1.76e9 + n) for n in range(50)))
        client.post_gain("team.second", *(a_report(n, progress=3.0 * n, time=1.77e9 + n) for n in range(50)))
        show(page, shown)
        compare = page.get_by_role("button", name="Compare")
        expect(compare).to_be_disabled()
        for job in ("first", "second"):
            page.get_by_role("checkbox", name=f"Compare team.{job}").check()
        page.get_by_role("button", name="Compare 2 jobs").click()
        chart = page.get_by_role("slider", name="Efficiency")
        expect(chart.locator("path.curve")).to_have_count(2)
        # 50 places of each job, of which those of progress 0, 6, 12 ... 96 are the same.
        expect(chart).to_have_attribute("aria-valuemax", "82")
        expect(page.get_by_role("region", name="Compared jobs")).to_contain_text("147")
        page.get_by_role("radio", name="time since the start").check()
        expect(chart).to_have_attribute("aria-valuemax", "49")
        assert page.url.endswith("#/compare?jobs=team.first+team.second&x=time")
        results = axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        client.call("DELETE", "/jobs/team.first")
        client.call("DELETE", "/jobs/team.second")
    show(page, shown, "#/compare?jobs=team.digits")
    expect(page.get_by_text("Mark two or more jobs")).to_be_visible()


def test_a_chart_is_downloaded_as_a_picture(page: Page, shown: ServiceProcess) -> None:
    show(page, shown, "#/jobs/team.digits")
    expect(page.get_by_role("slider", name="Gain and scale").locator("path.curve")).to_have_count(2)
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Download Gain and scale as PNG").click()
    picture = matplotlib_image.imread(downloaded.value.path())
    assert picture.shape[0] > 300
    # The curve has the color of its series, and most of the picture that of the page.
    colors = {tuple(int(255 * part) for part in pixel) for pixel in picture[:, :, :3].reshape(-1, 3)}
    assert {(5, 80, 174), (149, 56, 0), (255, 255, 255)} <= colors


def test_the_output_of_a_run_on_this_machine_is_followed(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    log = folder / "logs" / "replica-0.log"
    log.write_text(f"{HOSTILE}\n")
    with ServiceProcess(folder) as service, Client(service.port) as client:
        client.put("/jobs/digits/allocation", {"generation": 1, "replicas": 1})
        client.register("digits", a_registration())
    reason, result, versions = f"the disk was full {'/a' * 50}", {"accuracy": 0.91}, {"torch": "2.9"}
    known = RunView(str(folder), None, 1.76e9, 1.76e9 + 60, reason, result, versions)
    entry = RunEntry(
        "default.digits~1", "default.digits", str(folder / "service.db"), str(folder / "logs"),
        JobStateName.FAILED, 1.76e9, known,
    )  # fmt: skip
    (tmp_path / "runs.json").write_text(json.dumps([entry.to_json()]))
    environ = {"ADASCALE_TOKEN": TOKEN, "ADASCALE_READ_TOKEN": READ_TOKEN}
    with (
        ServiceProcess(tmp_path, runs=tmp_path / "runs.json", environ=environ) as service,
        page.context.browser.new_context() as context,  # type: ignore[union-attr]
    ):
        opened = context.new_page()
        show(opened, service, f"#/?token={READ_TOKEN}")
        assert "token" not in opened.url
        expect(opened.get_by_role("row", name=re.compile("digits"))).to_contain_text("the disk was full")
        table = opened.get_by_role("region", name="All jobs")
        assert table.evaluate("(node) => node.scrollWidth - node.clientWidth") == 0, "it fits 1,280 pixels"
        opened.get_by_role("link", name="digits").click()
        expect(opened.get_by_text("The result is accuracy 0.91.")).to_be_visible()
        expect(opened.get_by_role("region", name="Versions")).to_contain_text("2.9")
        output = opened.get_by_label("Output of replica 0")
        expect(output).to_have_text(f"{HOSTILE}\n")
        with log.open("a") as file:
            file.write("more\n")
        expect(output).to_have_text(f"{HOSTILE}\nmore\n")
        assert opened.evaluate("window.hacked") is None


def test_logs_need_the_read_token_and_are_shown_as_text(page: Page, shown: ServiceProcess) -> None:
    show(page, shown, "#/jobs/team.failed")
    expect(page.get_by_text("The output of failed replicas is shown with a read token")).to_be_visible()
    assert page.locator("pre").count() == 0
    page.get_by_role("button", name="Read token").click()
    page.get_by_label("Token", exact=True).fill(READ_TOKEN)
    page.get_by_role("button", name="Use").click()
    expect(page.locator("pre")).to_have_text(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("pre img, pre script").count() == 0


def test_no_markup_can_be_set(browser: Browser, shown: ServiceProcess) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        show(page, shown)
        script = """(markup) => {
            try { document.body.innerHTML = markup; } catch (error) { return error.name; }
        }"""
        assert page.evaluate(script, HOSTILE) == "TypeError"


@pytest.mark.parametrize(
    ("route", "size", "scheme"),
    [
        ("#/", "desktop", "light"),
        ("#/", "phone", "dark"),
        ("#/jobs/team.digits", "desktop", "dark"),
        ("#/jobs/team.digits", "phone", "light"),
        ("#/jobs/team.failed", "desktop", "light"),
        ("#/jobs/team.failed", "phone", "dark"),
    ],
)
def test_the_page_is_accessible(
    browser: Browser, shown: ServiceProcess, route: str, size: str, scheme: Literal["light", "dark"]
) -> None:
    width, height = SIZES[size]
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        page = context.new_page()
        show(page, shown, route)
        expect(page.locator(".chart path").first).to_be_attached()
        results = axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        # Nothing but tables scrolls sideways.
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_long_names_and_very_small_numbers_have_room(browser: Browser, shown: ServiceProcess) -> None:
    width, height = SIZES["phone"]
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        with Client(shown.port) as client:
            metrics = {"m" * 64: -5e-10}
            client.post_gain("team.long-name", *(a_report(step, metrics=metrics) for step in (1, 2)))
            show(page, shown, "#/jobs/team.long-name")
            chart = page.get_by_role("slider", name="m" * 64)
            expect(chart).to_have_attribute("aria-valuetext", re.compile(r": -5e-10$"))
            client.call("DELETE", "/jobs/team.long-name")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lefts = chart.locator(".axis").evaluate_all("(labels) => labels.map((each) => each.getBBox().x)")
        assert min(lefts) >= 0


def test_the_page_of_a_run_that_has_ended_says_so_and_continues_with_the_next_run(
    browser: Browser, tmp_path: Path
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        with ServiceProcess(tmp_path) as service, Client(port := service.port) as client:
            client.put("/jobs/default.done/allocation", {"generation": 1, "replicas": 1})
            ended = a_registration(replica_state=ReplicaState.FINISHED, generation=1)
            for registration in (a_registration(), running(0, 1, 1), ended):
                client.register("default.done", registration)
            show(page, service, "#/jobs/done")
            expect(page.get_by_text(re.compile("^Complete,"))).to_be_visible(timeout=30_000)
        expect(page.locator("#status")).to_have_text("The run is over", timeout=30_000)
        expect(page.get_by_text("adascale ui")).to_be_visible()
        expect(page.locator(".notice.bad:visible")).to_have_count(0)
        with ServiceProcess(tmp_path, "--port", str(port)):
            expect(page.locator("#status")).to_have_text("Live", timeout=60_000)


def test_the_charts_have_the_reports_that_came_while_the_page_was_disconnected(
    browser: Browser, tmp_path: Path
) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        chart = page.locator(".charts [role=slider]").first
        with ServiceProcess(tmp_path) as service, Client(service.port) as client:
            port = service.port
            client.post_gain("team.digits", *(a_report(step) for step in range(10)))
            show(page, service, "#/jobs/team.digits")
            expect(chart).to_have_attribute("aria-valuemax", "9")
        expect(page.locator("#status")).to_contain_text("Disconnected", timeout=30_000)
        context.set_offline(True)
        with ServiceProcess(tmp_path, "--port", str(port)), Client(port) as client:
            client.post_gain("team.digits", *(a_report(step) for step in range(10, 30)))
            context.set_offline(False)
            expect(chart).to_have_attribute("aria-valuemax", "29", timeout=60_000)


def test_the_page_is_live_again_once_the_jobs_can_be_read_again(
    browser: Browser, shown: ServiceProcess
) -> None:
    problem = {"error": "the database is away"}
    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/summaries", lambda route: route.fulfill(status=503, json=problem))
        page.goto(f"http://127.0.0.1:{shown.port}/")
        status = page.locator("#status")
        expect(status).to_have_text("Disconnected: the database is away. Trying again.")
        page.unroute("**/summaries")
        expect(status).to_have_text("Live", timeout=30_000)


def test_a_service_that_no_longer_answers_is_shown_as_disconnected(browser: Browser, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        show(page, service)
        service.send_signal(signal.SIGSTOP)
        page.clock.fast_forward(60_000)
        expect(page.locator("#status")).to_contain_text("Disconnected", timeout=30_000)
        expect(page.get_by_text(re.compile(r"What is shown is from .*, \d+ .* ago"))).to_be_visible()
        service.send_signal(signal.SIGCONT)
        page.clock.fast_forward(60_000)
        expect(page.locator("#status")).to_have_text("Live", timeout=30_000)
        expect(page.locator("#stale")).to_be_hidden()
