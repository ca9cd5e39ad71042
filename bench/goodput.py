"""Measures the goodput of training under losses, beside torchrun and torchft.

    .venv/bin/python bench/goodput.py [--state tiny|1GB] [--schedules one-a-minute,hang] [--seconds 60]
        [--replicas 4] [--spares 0] [--contenders adascale,torchrun] [--torchft PYTHON] [--json FILE]
        [--svg FILE]

The same program (`goodput_model.py`) trains with the same losses, at the same times, of the same ranks,
which are drawn from --seed. A step has 24 samples. It takes --step-seconds with all replicas, in which each
waits for a device that it does not have, and longer in proportion with fewer replicas. Schedules, each
minute:

- one-a-minute: the process of a random rank is killed (SIGKILL); rank-0: that of rank 0; two-at-once: of
  two;
- hang: the process of a random rank is stopped (SIGSTOP), and keeps its connections open;
- slow: the device of a random rank takes 1.2 times as long until the next fault, in that process;
- all: one-a-minute, two-at-once, rank-0 and slow in a sixth of --seconds each, and hang in a third.

Contenders:

- adascale: agents, which start lost trainers again, and a metrics service. The batch of 24 stays, and is
  divided among the replicas that are there. With --spares, so many replicas more wait to take the places of
  lost ones;
- torchrun: DDP, `--max-restarts`, and `torch.distributed.checkpoint.async_save` every --checkpoint-interval
  seconds, as often as AdaScale saves; collective calls fail after 10 s;
- torchft: DDP with its defaults (a heartbeat timeout of 5 s, other timeouts of 60 s), and `torchft-tuned`,
  with 1 s and 10 s. A replica has 24 / --replicas samples in each step, so with fewer the batch is smaller.
  This program starts a group again as soon as its process has ended; one that is stopped has not.

Counted from what the processes record, in --seconds, which begin when all replicas have made 10 steps:

- goodput: samples that are in a step that was made, each once, per second, relative to the same run without
  losses if `none` is among --schedules, and otherwise to the time before the first loss;
- lost: samples that are in no step, though later ones are; repeated: how often samples were in a step again.
  A process that is killed may have sent its gradients before, so its step counts if another one has made it;
- still: the longest time between two steps, less the usual one;
- of each loss: `cost`, the seconds of training without loss that were lost until the next one; `detected`,
  until a process discards its step or ends; `still`, the longest time between two steps until one is made
  after that, less a usual one; `repeated`, from the begin of that step until training is further than before;
  `fewer`, from its end until all replicas take part; `join`, the longest time between two steps around that,
  less a usual one. `-` is what did not happen until the next loss;
- weights: those of the trained layers after the last step of which both have a record, compared with a run
  without losses. Not with torchft, whose batches are others.

Times are in seconds. `--svg` draws the samples over time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import launch

FOLDER = Path(__file__).parent
BATCH = 24
"""Samples of a step of all replicas; it is a multiple of 1, 2, 3 and 4 replicas."""
STEP_SECONDS = {"tiny": 0.1, "1GB": 0.25}
TORCHRUN_TIMEOUT, TORCHFT_TIMEOUT, TUNED_TIMEOUT = 10.0, 60.0, 10.0
JOIN_MS = 60_000
"""The default of torchft's lighthouse. With 100, groups that receive 1 GB are left behind repeatedly."""
WARM_STEPS = 10
"""Steps of all replicas before the measurement."""
PERIOD = 60.0
"""Seconds between losses."""
KINDS: tuple[str, ...] = ("one-a-minute", "two-at-once", "rank-0", "slow", "hang")
COSTS = ("detected", "still", "repeated", "fewer", "join")
MARKS = {"one-a-minute": "a loss", "two-at-once": "two losses", "rank-0": "loss of rank 0", "hang": "a hang"}

Poll = Callable[[], None]
"""Starts lost processes again where the contender does not, and raises if one has ended that must not."""
Contender = Callable[[Path, "Options"], AbstractContextManager[Poll]]
"""The folder of all files, and the options -> starts the contender's processes, and ends them."""
Until = Callable[[Path, float], bool]
"""The folder of the records and the seconds since the begin -> whether a run ends."""


@dataclass(frozen=True)
class Fault:
    """A fault, so many seconds after the begin, of processes with these ranks."""

    at: float
    kind: str
    ranks: tuple[int, ...]


def schedule(name: str, seconds: float, replicas: int, seed: int) -> list[Fault]:
    """Return the faults of a schedule."""
    generator = random.Random(f"{name} {seed}")
    if name == "all":
        period, kinds = seconds / (len(KINDS) + 1), KINDS
    else:
        period, kinds = min(PERIOD, seconds), (name,) * max(round(seconds / PERIOD), 1)
    faults = []
    for number, kind in enumerate(kinds):
        count = 2 if kind == "two-at-once" else 1
        ranks = (0,) if kind == "rank-0" else tuple(generator.sample(range(replicas), count))
        faults.append(Fault(period * (number + generator.uniform(0.4, 0.5)), kind, ranks))
    return faults


# -- records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step of one process: see `goodput_model.Records`."""

    made: bool | None
    """None: begun, and there is no record of its end."""
    begun: float
    ended: float
    step: int
    replicas: int
    rank: int
    samples: tuple[int, ...]
    pid: int


def read_steps(folder: Path, since: float = 0.0) -> list[Step]:
    """Return the steps that ended after a moment, in order of their end."""
    steps: list[Step] = []
    for file in folder.glob("steps-*"):
        pid = int(file.name.split("-")[1])
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                made, begun, ended, step, replicas, rank, samples = json.loads(line)
                read = Step(made, begun, ended, step, replicas, rank, tuple(samples), pid)
                if steps and steps[-1].pid == pid and steps[-1].made is None:
                    steps.pop()  # It has ended.
                steps.append(read)
    return sorted((step for step in steps if step.ended > since), key=lambda step: step.ended)


def made_steps(steps: Sequence[Step], lost: Collection[int]) -> list[Step]:
    """Return the steps that training went on from, in order of their end.

    A step was made if a process that lived on has made it. The others may have no record of that: a process
    that was killed when it had sent its gradients, or one that took the weights from the process that has
    made the step. What only a lost process has made is gone with it. A process that has discarded the step,
    and made it later with as many replicas, says nothing about the first time.

    Args:
        steps: of all processes, in order of their end.
        lost: the ids of the processes that faults have reached.
    """
    first: dict[int, float] = {}
    last: dict[int, Step] = {}
    for step in steps:
        first[step.pid] = min(first.get(step.pid, step.begun), step.begun)
        last[step.pid] = step
    makers: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        if step.made and not (step.pid in lost and step is last[step.pid]):
            makers.setdefault((step.step, step.replicas), []).append(step)
    discarded: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        if step.made is False:
            discarded.setdefault((step.pid, step.step), []).append(step)

    def is_same_time(step: Step, other: Step) -> bool:
        # The other process has begun the step more than once if it has discarded it.
        distance = abs(other.begun - step.begun)
        before = discarded.get((other.pid, other.step), [])
        is_nearest = all(abs(each.begun - step.begun) >= distance for each in before)
        return first[other.pid] <= step.begun <= other.ended and is_nearest

    own = {(step.pid, step.step) for step in steps if step.made}
    found = []
    for step in steps:
        # Processes that were started later have made it again.
        others = [other for other in makers.get((step.step, step.replicas), []) if is_same_time(step, other)]
        if step.made and (others or step.pid not in lost):
            found.append(step)
        elif not step.made and others and (step.pid, step.step) not in own:
            found.append(replace(step, made=True, ended=max(step.ended, others[0].ended)))
    return sorted(found, key=lambda step: step.ended)


def read_weights(folder: Path) -> dict[int, tuple[str, list[float]]]:
    """Return the digest of the weights, and some of them, by the number of the step; of the last process."""
    found = {}
    for file in sorted(folder.glob("weights-*"), key=lambda file: file.stat().st_mtime):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, digest, some = json.loads(line)
                found[step] = digest, some
    return found


# -- contenders -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What is the same for all contenders."""

    replicas: int
    spares: int
    checkpoint_interval: float
    step_seconds: float
    torchft: Path | None


@contextmanager
def by_agents(folder: Path, options: Options) -> Iterator[Poll]:
    """Train with agents."""
    spec = {
        "batch_size": BATCH,
        "max_batch_size": BATCH,
        "local_bsz_bounds": [BATCH // options.replicas, BATCH],
        "max_replicas": options.replicas,
    }
    command = [sys.executable, "-m", "adascale_worker.agent", "--", sys.executable]
    agents: list[subprocess.Popen[bytes]] = []

    def poll() -> None:
        for replica, agent in enumerate(agents):
            if (code := agent.poll()) is not None:
                raise launch.EndedError(f"the agent of replica {replica} has ended with exit code {code}")

    with launch.service(folder, lambda _: spec) as (environ, allocate):
        allocate(1, options.replicas, spares=options.spares)
        try:
            for replica in range(options.replicas + options.spares):
                own = {
                    **environ,
                    **launch.settings(spec),
                    "ADASCALE_CHECKPOINT_INTERVAL": str(options.checkpoint_interval),
                    "ADASCALE_REPLICA": str(replica),
                }
                agents.append(launch.start([*command, str(FOLDER / "goodput_program.py")], folder, own))
            yield poll
        finally:
            end(agents)


@contextmanager
def by_torchrun(folder: Path, options: Options) -> Iterator[Poll]:
    """Train with torchrun."""
    steps = max(round(options.checkpoint_interval / max(options.step_seconds, 0.01)), 1)
    environ = {
        "BENCH_CHECKPOINTS": str(folder / "checkpoints"),
        "BENCH_CHECKPOINT_STEPS": str(steps),
        "BENCH_TIMEOUT": str(TORCHRUN_TIMEOUT),
        # With the store of torchrun (torch 2.15), processes that are started again find the addresses of
        # those before them, and training never goes on.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"),
        *("--nproc-per-node", str(options.replicas), str(FOLDER / "goodput_torchrun.py")),
    ]
    run = launch.start(command, folder, environ)

    def poll() -> None:
        if (code := run.poll()) is not None:
            raise launch.EndedError(f"torchrun has ended with exit code {code}")

    try:
        yield poll
    finally:
        run.terminate()
        run.wait()


@contextmanager
def by_torchft(folder: Path, options: Options, heartbeat_ms: int, timeout: float) -> Iterator[Poll]:
    """Train with one process for each replica group of torchft; start one again when it has ended."""
    assert options.torchft is not None, "without --torchft it is no contender"
    lighthouse, address = launch.start_lighthouse(folder, options.torchft, heartbeat_ms, JOIN_MS)
    groups: list[subprocess.Popen[bytes]] = []

    def start(replica: int) -> subprocess.Popen[bytes]:
        environ = {
            "PYTHONPATH": str(FOLDER),
            "TORCHFT_LIGHTHOUSE": address,
            "BENCH_TIMEOUT": str(timeout),
            "REPLICA": str(replica),
        }
        command = [str(options.torchft), str(FOLDER / "goodput_torchft.py")]
        return launch.start(command, folder, environ)

    def poll() -> None:
        for replica, group in enumerate(groups):
            if group.poll() is not None:
                groups[replica] = start(replica)
        if lighthouse.poll() is not None:
            raise launch.EndedError("the lighthouse has ended")

    try:
        groups += [start(replica) for replica in range(options.replicas)]
        yield poll
    finally:
        end([*groups, lighthouse])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


# -- a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of a contender, as its processes have recorded it."""

    begun: float
    seconds: float
    steps: list[Step]
    faults: list[tuple[float, Fault, tuple[int, ...]]]
    """With the moment, and the process ids that they reached."""
    weights: dict[int, tuple[str, list[float]]]


def train(folder: Path, contender: Contender, options: Options, faults: Sequence[Fault], until: Until) -> Run:
    """Train with faults.

    Args:
        folder: of all files.
        contender: starts the processes.
        options: of the contender.
        faults: in order of time.
        until: whether the run ends.
    """
    records = folder / "records"
    records.mkdir()
    os.environ |= {"BENCH_FOLDER": str(records), "CUDA_VISIBLE_DEVICES": ""}
    stopped: list[int] = []
    reached = []
    waiting = list(faults)
    with contender(folder, options) as poll:

        def warm() -> bool:
            poll()
            last = [step for step in read_steps(records) if step.made and step.replicas == options.replicas]
            counts = Counter(step.rank for step in last)
            return len(counts) == options.replicas and min(counts.values()) >= WARM_STEPS

        try:
            launch.wait_until(warm, "training on all replicas")
            begun = time.time()
            while not until(records, time.time() - begun):
                poll()
                if waiting and time.time() >= begun + waiting[0].at:
                    fault = waiting.pop(0)
                    pids = inject(fault, records)
                    if fault.kind == "hang":
                        stopped += pids
                    reached.append((time.time(), fault, pids))
                time.sleep(0.02)
            seconds = time.time() - begun
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
    steps = [step for step in read_steps(records) if step.ended <= begun + seconds]
    return Run(begun, seconds, steps, reached, read_weights(records))


def inject(fault: Fault, records: Path) -> tuple[int, ...]:
    """Cause a fault, and return the ids of the processes that it has reached."""
    made = [step for step in read_steps(records) if step.made]
    # Of the ranks that train now: the newest step of each.
    newest = {step.rank: step.pid for step in made if step.step >= made[-1].step - 1}
    ranks = sorted(newest)
    for file in records.glob("slow-*"):
        file.unlink()
    pids = tuple({newest[ranks[rank % len(ranks)]] for rank in fault.ranks})
    for pid in pids:
        if fault.kind == "slow":
            (records / f"slow-{pid}").touch()
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if fault.kind == "hang" else signal.SIGKILL)
    return pids


# -- what the records show --------------------------------------------------------------------------------


def summary(run: Run, replicas: int, undisturbed: float | None = None) -> dict[str, Any]:
    """Return what a run has shown: see the text of this program.

    Args:
        run: what its processes have recorded.
        replicas: their number.
        undisturbed: samples per second without losses; None for those before the first loss.
    """
    lost = {pid for _, fault, pids in run.faults if fault.kind != "slow" for pid in pids}
    made = made_steps(run.steps, lost)
    times, counts = curve(run, made)
    first = run.faults[0][0] - run.begun if run.faults else run.seconds
    undisturbed = undisturbed or samples_until(first, times, counts) / first
    before = [step for step in made if run.begun <= step.ended <= run.begun + first]
    usual = median([later - earlier for earlier, later in pairwise(ends(before))])
    rate = samples_until(run.seconds, times, counts) / run.seconds
    times_made = Counter(sample for step in made for sample in step.samples)
    # Before, the replicas do not all train; those of the last steps may be in steps that are being made.
    counted = range(min(before[0].samples), max(times_made) + 1 - 4 * BATCH)
    moments = [moment for moment, _, _ in run.faults]
    losses = []
    for number, until in enumerate([*moments[1:], run.begun + run.seconds][: len(moments)]):
        since = moments[number] - run.begun
        count = samples_until(until - run.begun, times, counts) - samples_until(since, times, counts)
        shown = loss(run, made, usual, replicas, number, until)
        losses.append({**shown, "cost": until - moments[number] - count / undisturbed})
    still = longest_wait(run, made, run.begun, run.begun + run.seconds)
    return {
        "samples per second without loss": undisturbed,
        "samples per second": rate,
        "goodput": rate / undisturbed,
        "lost": sum(sample not in times_made for sample in counted),
        "repeated": sum(count - 1 for count in times_made.values()),
        "still": max(still - usual, 0.0),
        "losses": losses,
        "curve": [
            [0.25 * n, samples_until(0.25 * n, times, counts)] for n in range(int(4 * run.seconds) + 1)
        ],
    }


def ends(made: Sequence[Step]) -> list[float]:
    """Return when each step ended on its last rank."""
    last: dict[int, float] = {}
    for step in made:
        last[step.step] = step.ended
    return sorted(last.values())


def curve(run: Run, made: Sequence[Step]) -> tuple[list[float], list[int]]:
    """Return the times of steps after the begin, and how many samples had been in a step since then."""
    seen = {sample for step in made if step.ended <= run.begun for sample in step.samples}
    at_begin = len(seen)
    times, counts = [0.0], [0]
    for step in made:
        if step.ended > run.begun:
            seen.update(step.samples)
            times.append(step.ended - run.begun)
            counts.append(len(seen) - at_begin)
    return times, counts


def samples_until(seconds: float, times: Sequence[float], counts: Sequence[int]) -> int:
    """Return the samples until a moment of a curve."""
    return counts[bisect_right(times, seconds) - 1]


def longest_wait(run: Run, made: Sequence[Step], since: float, until: float) -> float:
    """Return the longest time between two steps, of any replicas, in a time; it may go on at its end."""
    moments = [step.ended for step in made if since <= step.ended <= until]
    return max(
        later - earlier for earlier, later in pairwise([since, *moments, min(until, run.begun + run.seconds)])
    )


def loss(
    run: Run, made: Sequence[Step], usual: float, replicas: int, number: int, until: float
) -> dict[str, Any]:
    """Return what a fault has cost, in seconds; None is what did not happen until the next one."""
    moment, fault, victims = run.faults[number]
    trained = {step.pid for step in made if step.ended <= moment} - set(victims)
    discarded = [
        step.ended
        for step in run.steps
        if step.made is False and moment < step.ended < until and step.pid in trained
    ]
    found: dict[str, Any] = {"kind": fault.kind, "at": moment - run.begun}
    found |= dict.fromkeys(COSTS)
    if not discarded:
        return found
    found["detected"] = discarded[0] - moment
    # Not those in which the lost process took part.
    after = [step for step in made if discarded[0] <= step.begun and step.ended < until]
    if not after:
        return found
    found["still"] = max(longest_wait(run, made, moment, after[0].ended) - usual, 0.0)
    furthest = max(step.step for step in made if step.ended <= discarded[0])
    further = [step for step in after if step.step > furthest]
    if further:
        found["repeated"] = further[0].ended - after[0].begun
    whole = [step for step in after if step.replicas == replicas]
    if whole:
        found["fewer"] = whole[0].ended - after[0].ended
        if whole[0] is not after[0]:
            span = (whole[0].ended - 3 * usual, whole[0].ended + 10 * usual)
            found["join"] = max(longest_wait(run, made, *span) - usual, 0.0)
    return found


def compare(run: Run, reference: Run) -> str:
    """Return whether the weights are those of a run without losses, at the last step that both recorded."""
    common = max(set(run.weights) & set(reference.weights))
    (digest, some), (expected, others) = run.weights[common], reference.weights[common]
    if digest == expected:
        return f"equal bit for bit after {common} steps"
    first = reference.weights[min(reference.weights)][1]
    moved = max(abs(a - b) for a, b in zip(others, first, strict=True))
    differ = max(abs(a - b) for a, b in zip(some, others, strict=True))
    return f"{differ / moved:.0e} of their change differs after {common} steps"


# -- output -----------------------------------------------------------------------------------------------


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the results as text."""
    lines = []
    for name, by_contender in results.items():
        lines.append(f"{name}: goodput, samples/s without loss, lost, repeated, still; weights")
        for contender, result in by_contender.items():
            rate, weights = result["samples per second without loss"], result.get("weights", "")
            lines.append(
                f"  {contender:14} {result['goodput']:7.1%} {rate:8.1f} {result['lost']:7} "
                f"{result['repeated']:7} {result['still']:7.2f}  {weights}"
            )
            for each in result["losses"]:
                values = {what: each[what] for what in COSTS}
                text = " ".join(f"{what} {'-' if v is None else f'{v:.2f}'}" for what, v in values.items())
                lines.append(f"    {each['kind']:12} at {each['at']:5.1f}: cost {each['cost']:.2f} {text}")
    return "\n".join(lines)


def save(results: dict[str, dict[str, dict[str, Any]]], arguments: argparse.Namespace) -> None:
    """Write what has been measured until now, if the user wants it."""
    if arguments.json is not None:
        values = {**vars(arguments), "load": os.getloadavg()[1], "results": results}
        arguments.json.write_text(json.dumps(values, default=str))


LABELS = {
    "adascale": "AdaScale",
    "torchrun": "torchrun",
    "torchft": "torchft",
    "torchft-tuned": "torchft, tuned",
}
TITLES = {"one-a-minute": "A process is killed each minute"}
"""In the picture, for contenders and schedules."""


def draw(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Draw the samples over time, in seconds of training without losses."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "adascale", "svg.fonttype": "none"})
    results = {name: found for name, found in results.items() if name != "none"} or results
    figure = Figure(figsize=(5 * len(results), 3.6), layout="constrained")
    for axes, (name, by_contender) in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True
    ):
        for contender, result in by_contender.items():
            rate = result["samples per second without loss"]
            times, counts = zip(*result["curve"], strict=True)
            axes.plot(
                times, [n / rate for n in counts], label=f"{LABELS[contender]}: {result['goodput']:.0%}"
            )
        seconds = max(times)
        axes.plot([0, seconds], [0, seconds], color="#999999", linestyle="--", label="without losses")
        for each in next(iter(by_contender.values()))["losses"]:
            axes.axvline(each["at"], color="#cc3333", linewidth=0.8, linestyle=":")
            label = MARKS.get(each["kind"], each["kind"])
            axes.text(each["at"], 0, label, rotation=90, fontsize=7, va="bottom", ha="right")
        axes.set(
            title=TITLES.get(name, name),
            xlabel="seconds",
            ylabel="samples, in seconds of training without losses",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", choices=list(STEP_SECONDS), default="tiny")
    parser.add_argument("--schedules", default="one-a-minute", help="of those above, or `none`, with commas")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run (default: %(default)s)")
    parser.add_argument("--replicas", type=int, choices=(2, 3, 4), default=4, help="default: %(default)s")
    parser.add_argument("--spares", type=int, default=0, help="of adascale (default: %(default)s)")
    parser.add_argument("--contenders", help="with commas; default: all, torchft's with --torchft")
    parser.add_argument("--torchft", type=Path, metavar="PYTHON", help="the Python of an environment with it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, help="default: 0.1, with 1 GB 0.25")
    parser.add_argument("--checkpoint-interval", type=float, default=10.0, help="default: %(default)s s")
    parser.add_argument("--json", type=Path, help="the file to write all values to")
    parser.add_argument("--svg", type=Path, help="the picture to write")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the processes, too.
    schedules = sorted(arguments.schedules.split(","), key=lambda name: name != "none")
    if unknown := set(schedules) - {*KINDS, "all", "none"}:
        parser.error(f"--schedules are {', '.join(KINDS)}, all and none, got {', '.join(sorted(unknown))}")
    step_seconds = arguments.step_seconds or STEP_SECONDS[arguments.state]
    options = Options(
        arguments.replicas,
        arguments.spares,
        arguments.checkpoint_interval,
        step_seconds,
        arguments.torchft,
    )
    contenders: dict[str, Contender] = {
        "adascale": by_agents,
        "torchrun": by_torchrun,
    }
    if arguments.torchft is not None:
        contenders["torchft"] = partial(by_torchft, heartbeat_ms=5000, timeout=TORCHFT_TIMEOUT)
        contenders["torchft-tuned"] = partial(by_torchft, heartbeat_ms=1000, timeout=TUNED_TIMEOUT)
    names = arguments.contenders.split(",") if arguments.contenders else list(contenders)
    if unknown := set(names) - set(contenders):
        parser.error(
            f"--contenders are {', '.join(contenders)}, got {', '.join(sorted(unknown))}; "
            "those of torchft need --torchft"
        )
    os.environ |= {
        "BENCH_STATE": arguments.state,
        "BENCH_BATCH": str(BATCH),
        "BENCH_REPLICAS": str(options.replicas),
        "BENCH_STEP_SECONDS": str(step_seconds),
    }

    def run_one(name: str, faults: Sequence[Fault], until: Until) -> Run:
        with tempfile.TemporaryDirectory() as path:
            try:
                return train(Path(path), contenders[name], options, faults, until)
            except (TimeoutError, launch.EndedError) as error:
                log = (Path(path) / "log").read_text(errors="replace")[-3000:]
                sys.exit(f"{name}: {error}. The end of the output of its processes:\n{log}")

    results: dict[str, dict[str, dict[str, Any]]] = {}
    runs: dict[tuple[str, str], Run] = {}
    for each in schedules:
        faults = [] if each == "none" else schedule(each, arguments.seconds, options.replicas, arguments.seed)
        for name in names:
            run = run_one(name, faults, lambda _, passed: passed >= arguments.seconds)
            runs[each, name] = run
            without = results.get("none", {}).get(name, {}).get("samples per second")
            results.setdefault(each, {})[name] = summary(run, options.replicas, without)
            print(table({each: {name: results[each][name]}}), file=sys.stderr, flush=True)
            save(results, arguments)
    # The weights do not depend on time.
    os.environ["BENCH_STEP_SECONDS"] = "0"
    for name in set(names) & {"adascale", "torchrun"}:
        last = max(max(run.weights) for (_, contender), run in runs.items() if contender == name)
        reference = run_one(name, [], lambda records, _, last=last: last in read_weights(records))  # type: ignore[misc]
        for each in schedules:
            results[each][name]["weights"] = compare(runs[each, name], reference)
    sizes = f"{options.replicas} replicas, {options.spares} spares of adascale"
    load = f"{arguments.state}, {sizes}; load {os.getloadavg()[1]:.0f}"
    print(f"{load}\n{table(results)}")
    save(results, arguments)
    if arguments.svg:
        draw(results, arguments.svg)


if __name__ == "__main__":
    main()
