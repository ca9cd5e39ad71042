"""Measures the live page in Chromium with many jobs: first paint, update, memory.

    python bench/page.py --jobs 500 --reports 1000000

Stores jobs with their reports, starts the metrics service, and opens the page. Then every job reports once a
second, while the list of jobs and the page of one job are open. `--serve` keeps the service running instead,
to look at the page, and `--pages 100` sends what so many open lists send. Needs Chromium, as CONTRIBUTING.md
says.
"""

import argparse
import asyncio
import http.client
import json
import math
import random
import secrets
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace

from metrics_service import RunningService, metrics_service
from playwright.sync_api import Page, sync_playwright
from reports_per_second import REPORT

from adascale_api.data.database import Database
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, reports
from adascale_api.data.store.jobs import write_changes
from adascale_api.data.store.reports import Retention
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport

HOUR = 3600.0
TARGET = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--reports", type=int, default=1_000_000, help="of all jobs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of updates (default: %(default)s)")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="default: %(default)s")
    parser.add_argument("--pages", type=int, default=0, help="measure so many clients in place of Chromium")
    parser.add_argument("--serve", action="store_true", help="only run the service, until Ctrl-C")
    options = parser.parse_args()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bench.db"
        asyncio.run(store_jobs(url, options.jobs, options.reports // options.jobs))
        kept = str(max(options.reports // options.jobs, 2000))
        with (
            suppress(KeyboardInterrupt),
            metrics_service(url, token, "--keep-newest-reports", kept) as service,
        ):
            ended = threading.Event()
            arguments = (service.port, token, options.jobs, ended)
            agents = threading.Thread(target=report_all, args=arguments, daemon=True)
            agents.start()
            if options.serve:
                print(f"http://127.0.0.1:{service.port}/", flush=True)
                service.process.wait()
            elif options.pages:
                measure_pages(service, options.pages, options.seconds)
            else:
                measure(service, options)
            ended.set()
            agents.join()


async def store_jobs(url: str, count: int, size: int) -> None:
    database = Database(url)
    generator = random.Random(1)
    for number in range(count):
        job_id = f"team-{number % 7}.job-{number:03}"

        def store(transaction: Transaction, job_id: str = job_id, number: int = number) -> None:
            began = time.time() - HOUR * generator.uniform(0.1, 1.0)
            is_queued = number % 10 == 9
            jobs.declare(transaction, job_id, JobSpec(32, 4096, (8, 512), 1, 8, TARGET), began)
            if is_queued:
                return
            write_changes(transaction, began)
            agents: dict[int, str] = {}
            for generation, replica_count in enumerate((1, 4, 2), 1):
                now = began + (generation - 1) * 0.3 * (time.time() - began)
                begin(transaction, job_id, generation, replica_count, agents, now)
                write_changes(transaction, now)
                transaction.activated.clear()
            new = [
                a_report(step / size, 1 + 3 * step // size, step, began + (time.time() - began) * step / size)
                for step in range(size)
            ]
            kept = Retention(newest=max(size, 2000))
            for start in range(0, size, 500):
                reports.post(transaction, job_id, new[start : start + 500], time.time(), kept)

        await database.write(store)
    await database.close()


def begin(
    transaction: Transaction, job_id: str, generation: int, count: int, agents: dict[int, str], now: float
) -> None:
    """Take a job into a generation: replicas join those of the generation before, or leave them."""
    jobs.allocate(transaction, job_id, Allocation(generation, count), now)
    for index in range(count):
        if index not in agents:
            agents[index] = f"agent-{index}-{generation}.1"
            waiting = a_registration(index, agents[index], ReplicaState.WAITING, 0, count)
            jobs.register(transaction, job_id, waiting, now)
    for index in [index for index in agents if index >= count]:
        del agents[index]
    for index in range(count):
        running = a_registration(index, agents[index], ReplicaState.RUNNING, generation, count)
        jobs.register(transaction, job_id, running, now)


def a_registration(index: int, agent: str, state: ReplicaState, generation: int, size: int) -> Registration:
    return Registration(
        *(index, agent, state, generation, f"10.0.0.{index}", 40000 + index),
        rank=index if generation else None,
        replicas=size if generation else None,
        assigned=generation,
        stepped=generation,
    )


def a_report(share: float, generation: int, step: int, now: float) -> GainReport:
    scale = (4.0, 16.0, 8.0)[generation - 1]
    gain = scale / (1 + scale * math.exp(-3 * share) / 8) * random.uniform(0.95, 1.05)
    return replace(
        REPORT,
        generation=generation,
        step=step,
        progress=share * TARGET * 0.8,
        scale=scale,
        replicas=(1, 4, 2)[generation - 1],
        local_bsz=128,
        gain=max(gain, 1.0),
        loss=2.3 * math.exp(-2 * share) * random.uniform(0.9, 1.1) + 0.1,
        step_time=0.05 * random.uniform(0.95, 1.05),
        time=now,
        target=float(TARGET),
    )


def report_all(port: int, token: str, count: int, ended: threading.Event) -> None:
    """Report for all jobs once per second, and send the heartbeats of their replicas."""

    def send(method: str, path: str, body: dict[str, object]) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/jobs/{path}",
            method=method,
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            print(f"{method} {path}: {error}")

    step = 1_000_000
    while not ended.wait(1.0):
        step += 1
        for number in range(count):
            if number % 10 == 9 or ended.is_set():
                continue
            job = f"team-{number % 7}.job-{number:03}"
            if (step + number) % 5 == 0:
                for index in (0, 1):
                    agent = f"agent-{index}-{index + 1}.1"
                    running = a_registration(index, agent, ReplicaState.RUNNING, 3, 2)
                    send("PUT", f"{job}/replicas/{index}", running.to_json())
            report = a_report(0.99 + (step - 1_000_000) * 1e-4, 3, step, time.time())
            send("POST", f"{job}/gain", report.to_json())


def measure_pages(service: RunningService, count: int, seconds: float) -> None:
    """Measure what the requests of open lists cost, and how late the lists get a report."""
    ended = threading.Event()
    late: list[float] = []

    def ask(path: str, interval: float, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.port)
        etag, last_step, last_time = "", 0, 0.0
        ended.wait(interval * number / count)
        while not ended.is_set():
            connection.request("GET", path, headers={"If-None-Match": etag})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 200 and path == "/summaries":
                etag = answer.headers["ETag"]
                report = json.loads(content)["jobs"][0]["latest"]
                if last_step and (new := report["step"] - last_step):
                    # The first of the new ones, which are posted at equal intervals.
                    late.append(time.time() - last_time - (report["time"] - last_time) / new)
                last_step, last_time = report["step"], report["time"]
            ended.wait(interval)

    costs = []
    for paths in ((), (("/summaries", 2.0), ("/usage?seconds=3600&points=240&by=job", 15.0))):
        for path, interval in paths:
            for number in range(count):
                threading.Thread(target=ask, args=(path, interval, number), daemon=True).start()
        time.sleep(10.0)  # until all are open
        before = service.processor_time
        time.sleep(seconds)
        costs.append((service.processor_time - before) / seconds)
    ended.set()
    print(
        f"{count} pages: {costs[1] - costs[0]:.3f} cores besides {costs[0]:.3f} for the reports; "
        f"a report is shown after {statistics.median(late):.1f} s, at most {max(late):.1f} s"
    )


def measure(service: RunningService, options: argparse.Namespace) -> None:
    url = f"http://127.0.0.1:{service.port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        jobs = browser.new_page(viewport={"width": 1280, "height": 900})
        follow(jobs, url, f"tbody tr:nth-child({options.jobs})", "all jobs")
        job = browser.new_page(viewport={"width": 1280, "height": 900})
        follow(job, f"{url}#/jobs/team-0.job-000", "figure:nth-child(6) .curve", "a job")
        before = service.processor_time
        time.sleep(options.seconds)
        share = (service.processor_time - before) / options.seconds
        for name, page in (("all jobs", jobs), ("a job", job)):
            tasks = page.evaluate("window.longTasks")
            frames = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
            longest = max(tasks, default=0)
            print(
                f"{name}: {len(tasks)} tasks of more than 50 ms, the longest {longest:.0f} ms; "
                f"{frames:.0f} MiB of JavaScript"
            )
        print(f"service: {share:.2f} cores with the reports of all jobs, {service.peak_memory:.0f} MiB")
        browser.close()


def follow(page: Page, url: str, shown: str, name: str) -> None:
    page.add_init_script(
        "window.longTasks = []; new PerformanceObserver((list) => list.getEntries().forEach("
        "(entry) => window.longTasks.push(entry.duration))).observe({type: 'longtask'});"
    )
    times = []
    for _ in range(5):
        started = time.perf_counter()
        page.goto("about:blank")
        page.goto(url)
        page.locator(shown).first.wait_for(state="attached")
        times.append(time.perf_counter() - started)
    paint = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0]"
    )
    page.evaluate("window.longTasks.length = 0")
    print(f"{name}: first paint {paint:.0f} ms, all shown after {statistics.median(times) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
