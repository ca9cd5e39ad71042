"""The gain that a single replica predicts, beside that which four replicas measure.

    OMP_NUM_THREADS=1 python bench/single_replica.py [TASK ...] [--seeds 3] [--fraction 1.0]

Trains each task of `bench/accuracy.py`, and the network of `examples/cnn.py` (`cnn`), at S = 1 for T steps,
once for each way to measure the gain. S = 1 makes the same steps with each of them. At five points of
training the gain is predicted for S = 4, 16, 64 and 128.

The gain that four replicas measure: in each of the steps 9 to 40 and in every 20th later, 8 groups of four
batches at the weights of that step, averaged with the paper's smoothing at S = 1, over 1,000 steps. Four
replicas with the same weights have just such gradients, and estimates from them have the same means, whatever
the number of gradients, because they are unbiased. The groups make their noise small: what remains is the
error of the single replica.

The ways:
- "divided": the default of `ElasticTrainer`. Some steps are divided into micro-batches.
- "divided, each step": all of them, for the noise that is left without a limit of the cost.
- "consecutive": gradients of consecutive steps, `single_replica_gain="consecutive"`.
- "norm layers": only the gradients of LayerNorm, RMSNorm and GroupNorm weights, which Gray et al. (arXiv
  2411.00999) measure for each sample at no cost. From the gradients of the four replicas, so nearly
  without noise.

Prints a Markdown table for each task: the median and the largest error of the gain over points and seeds, the
share of the predictions within 15%, and how often the gain of the four replicas is within twice the standard
error of the prediction. Then how much processor time a divided step of `ElasticTrainer` takes, in units of
another step, both in turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import accuracy
import torch
from accuracy import Task, loss_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_worker.adascale import AdaScale
from adascale_worker.gradients import step_division
from adascale_worker.gradients.step_division import OBSERVED_STEPS, StepDivision
from adascale_worker.scaling.rules import scaling_rule_of
from adascale_worker.scaling.statistics.estimates import from_micro_gradients
from adascale_worker.scaling.statistics.metric import Metric

SCALES = (4, 16, 64, 128)
POINTS = (0.05, 0.2, 0.4, 0.65, 0.95)
DENSE_STEPS, REFERENCE_EVERY = 40, 20
GROUPS, REPLICAS = 8, 4
SMOOTHING = 0.999
WARM_UP, TIMED_STEPS = 50, 300
MAX_INTERVAL = step_division.MAX_INTERVAL
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def cnn(device: torch.device) -> Task:
    """The network, the data and the hyperparameters of `examples/cnn.py`."""
    digits = accuracy.digits_adamw(device)
    return replace(
        digits,
        name="cnn",
        batch_size=16,
        steps=3_000,
        lr=3e-3,
        inputs=digits.inputs.view(-1, 1, 8, 8),
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        ),
    )


TASKS: dict[str, Callable[[torch.device], Task]] = {**accuracy.TASKS, "cnn": cnn}


class SingleReplica:
    """Makes the steps of a task with S = 1."""

    def __init__(self, task: Task, seed: int, *, is_divided: Callable[[int], int], compares: bool) -> None:
        torch.manual_seed(seed)
        self.task = task
        self.model = task.model()
        self.inner = task.new_optimizer(self.model)
        self.optimizer = AdaScale(self.inner, scale=1.0, is_scaled_loss=False, disjoint_pairs=True)
        self.samples = torch.Generator().manual_seed(seed)
        self.steps = 0
        self._interval = is_divided
        self._compares = compares

    def draw(self, count: int, samples: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.task.inputs), (count,), generator=samples)
        return self.task.inputs[chosen], self.task.targets[chosen]

    def step(self) -> None:
        interval = self._interval(self.steps)
        parts = 2 if interval else 1
        self.optimizer.statistics.change_options(
            accumulation=parts, interval=interval, compares_steps=self._compares
        )
        for group in self.inner.param_groups:
            group["lr"] = self.task.lr_at(self.steps)
        x, y = self.draw(self.task.batch_size, self.samples)
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss_of(self.model, part_x, part_y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


class FourReplicas:
    """Measures what four replicas with the weights of a single one would measure."""

    def __init__(self, single: SingleReplica, seed: int) -> None:
        self.single = single
        self.metric = Metric(scaling_rule_of(single.inner))
        self.samples = torch.Generator().manual_seed(1000 + seed)
        norms = {id(p) for m in single.model.modules() if isinstance(m, NORMS) for p in m.parameters()}
        parameters = list(single.model.parameters())
        self.parts = {"four replicas": parameters, "norm layers": [p for p in parameters if id(p) in norms]}
        self.sums = {name: [0.0, 0.0, 0.0] for name, part in self.parts.items() if part}

    def measure(self) -> None:
        steps = self.single.steps
        if steps < OBSERVED_STEPS or (steps >= DENSE_STEPS and steps % REFERENCE_EVERY):
            return
        interval = 1 if steps < DENSE_STEPS else REFERENCE_EVERY
        self.metric.begin_step()
        task, single = self.single.task, self.single
        parameters = self.parts["four replicas"]
        for _ in range(GROUPS):
            gradients = []
            for _ in range(REPLICAS):
                x, y = single.draw(task.batch_size, self.samples)
                found = torch.autograd.grad(loss_of(single.model, x, y), parameters)
                gradients.append(dict(zip(parameters, found, strict=True)))
            for name, sums in self.sums.items():
                self._add(sums, self.parts[name], gradients, SMOOTHING ** (interval / GROUPS))

    def _add(
        self,
        sums: list[float],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[dict[nn.Parameter, Tensor]],
        theta: float,
    ) -> None:
        each = [[found[p] for p in parameters] for found in gradients]
        mean = [torch.stack(column).mean(0) for column in zip(*each, strict=True)]
        norms = [self.metric.sqr_norm(0, parameters, own, torch.device("cpu")) for own in (*each, mean)]
        *own, of_mean = torch.stack(norms).tolist()
        sqr, var = from_micro_gradients(REPLICAS, sum(own) / len(own), of_mean, REPLICAS)
        for number, value in enumerate((sqr, var, 1.0)):
            sums[number] = theta * sums[number] + (1 - theta) * value

    def estimate(self, name: str) -> GradientEstimate:
        sqr, var, weight = self.sums[name]
        return GradientEstimate(sqr / weight, var / weight)


def default_division(task: Task) -> Callable[[int], int]:
    """Return the interval for which a step is measured, or 0, as `ElasticTrainer` divides steps."""
    size = task.batch_size
    division = StepDivision(lambda: BatchBounds(size, 128 * size), observed_steps=0)
    plan = BatchPlan(1, size)
    return lambda step: division.step_at(step * size, plan).interval if step >= OBSERVED_STEPS else 0


def ways(task: Task) -> dict[str, tuple[Callable[[int], int], bool]]:
    return {
        "divided": (default_division(task), False),
        "divided, each step": (lambda step: int(step >= OBSERVED_STEPS), False),
        "consecutive": (lambda _: 0, True),
    }


def train(task: Task, seed: int, steps: int) -> dict[str, list[GradientEstimate]]:
    """Return the estimates of each way, and of four replicas, at the five points."""
    points = {max(int(steps * point), 1) for point in POINTS}
    found: dict[str, list[GradientEstimate]] = {}
    for name, (is_divided, compares) in ways(task).items():
        single = SingleReplica(task, seed, is_divided=is_divided, compares=compares)
        four = FourReplicas(single, seed) if name == "divided" else None
        while single.steps < max(points):
            if four is not None:
                four.measure()
            single.step()
            if single.steps in points:
                estimate = single.optimizer.estimate
                assert estimate is not None
                found.setdefault(name, []).append(estimate)
                for part in four.sums if four is not None else ():
                    found.setdefault(part, []).append(four.estimate(part))  # type: ignore[union-attr]
    return found


def table(runs: Sequence[dict[str, list[GradientEstimate]]]) -> str:
    lines = [
        f"| way | {' | '.join(f'S = {scale}' for scale in SCALES)} | within 15% | within 2 errors |",
        f"| --- |{' --- |' * (len(SCALES) + 2)}",
    ]
    for way in runs[0]:
        if way == "four replicas":
            continue
        cells, all_errors, covered = [], [], []
        for scale in SCALES:
            errors = []
            for run in runs:
                for own, measured in zip(run[way], run["four replicas"], strict=True):
                    truth = measured.gain(scale)
                    errors.append(abs(own.gain(scale) / truth - 1))
                    twice = replace(own, grad_sqr_error=2 * own.grad_sqr_error)
                    low, high = twice.gain_range(scale)
                    covered.append(low <= truth <= high)
            cells.append(f"{statistics.median(errors):.0%}, {max(errors):.0%}")
            all_errors += errors
        within = statistics.mean(error <= 0.15 for error in all_errors)
        coverage = "" if way == "norm layers" else f"{statistics.mean(covered):.0%}"
        lines.append(f"| {way} | {' | '.join(cells)} | {within:.0%} | {coverage} |")
    return "\n".join(lines)


def gains(run: dict[str, list[GradientEstimate]], steps: int) -> str:
    """Return the gains of one run at the five points."""
    lines = [
        f"| way | {' | '.join(f'step {int(steps * point)}' for point in POINTS)} |",
        f"| --- |{' --- |' * len(POINTS)}",
    ]
    for way, estimates in run.items():
        cells = [" ".join(f"{each.gain(scale):.1f}" for scale in SCALES) for each in estimates]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost(task: Task) -> float:
    """Return how long a divided step of `ElasticTrainer` takes, in units of one that is not: the medians."""
    step_division.MAX_INTERVAL = 2
    trainer = ElasticTrainer(task.batch_size, 2 * task.batch_size, (1, task.batch_size), device="cpu")
    model = task.model()
    optimizer = task.new_optimizer(model)
    trainer.program_reentry(model, optimizer)
    times: dict[int, list[float]] = {1: [], 2: []}
    before, start = 0, time.thread_time()
    for x, y in trainer.dataloader(TensorDataset(task.inputs, task.targets)):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        if trainer.steps > before:
            now = time.thread_time()
            if before > WARM_UP:
                times[trainer.accumulation].append(now - start)
            before, start = trainer.steps, now
        if trainer.steps == WARM_UP + 2 * TIMED_STEPS:
            break
    trainer.close()
    step_division.MAX_INTERVAL = MAX_INTERVAL
    return statistics.median(times[2]) / statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the steps of a task")
    options = parser.parse_args()
    if unknown := sorted(set(options.tasks) - set(TASKS)):
        parser.error(f"got the task {unknown[0]!r}; known are {', '.join(TASKS)}")
    torch.set_num_threads(1)
    for name in options.tasks or TASKS:
        task = TASKS[name](torch.device("cpu"))
        steps = max(int(task.steps * options.fraction), 500)
        runs = [train(task, seed, steps) for seed in range(options.seeds)]
        interval = default_division(task)
        share = sum(interval(step) > 0 for step in range(steps)) / steps
        print(f"\n{name}, batch {task.batch_size}, T = {steps}, {options.seeds} seeds\n\n{table(runs)}\n")
        print(f"{gains(runs[0], steps)}\n")
        ratio = cost(task)
        print(
            f"A divided step takes {ratio:.2f} times as long as another. {share:.2%} are divided, so "
            f"training takes {share * (ratio - 1):.1%} longer.",
            flush=True,
        )


if __name__ == "__main__":
    main()
