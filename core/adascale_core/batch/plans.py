"""Which batch sizes a job may use, and which replica counts are valid.

With K replicas, local batch size b and a accumulation steps, the global batch of a step has K*b*a samples.
The learning rate was tuned for `batch_size`; `max_batch_size` is an upper bound of the global batch, and
`local_bsz_bounds` are bounds of b. Sizes are always rounded down, and b is the same on all replicas.
An upper bound of `AUTO` is what fits into memory, which is found in training.
`local_bsz_limit` is what fits into memory, as far as training has shown. It bounds b, never the global batch:
where b is not enough, replicas accumulate.
The processes of a replica divide each of its micro-batches equally, so b is a multiple of their number.

Replicas accumulate to reach `batch_size`, and further, within `max_batch_size`, where the goodput is known:
a larger step needs less communication per sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Final, Literal

from adascale_core.batch.gain import GradientEstimate
from adascale_core.errors import InvalidJobError
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET, DEFAULT_EFFICIENCY_TARGET_OF_SAMPLES

Auto = Literal["auto"]
AUTO: Final = "auto"
"""The upper bound of the local batch size that is found in training: what fits into memory."""
LocalBszBounds = tuple[int, int | Auto]
"""(lower, upper) bounds of the local batch size, in samples."""


class InvalidBoundsError(InvalidJobError):
    """Bounds that contradict each other."""


@dataclass(frozen=True)
class BatchBounds:
    """The batch sizes that a job allows.

    Without either bound, the batch is not elastic: every step has `batch_size` samples.
    """

    batch_size: int  # the global batch size for which the learning rate was tuned (B0), in samples
    max_batch_size: int | None = None  # upper bound of the global batch size, in samples; None if unbounded
    # (lower, upper) bounds of the local batch size, in samples; None if unbounded. An upper bound of
    # "auto" means what fits into memory, up to `max_batch_size`.
    local_bsz_bounds: LocalBszBounds | None = None
    # whether the batch of a single replica may be larger than `batch_size` too; it has at least two
    # micro-batches then, since the noise is measured by comparing them
    elastic_single_replica: bool = False
    # the largest local batch size that is used, since a larger one did not fit into memory; None if none
    # has failed
    local_bsz_limit: int | None = None
    processes: int = 1  # the processes of a replica, which divide its local batch

    def __post_init__(self) -> None:
        _require_positive_integer("batch_size", self.batch_size)
        _require_positive_integer("processes_per_replica", self.processes)
        if self.batch_size % self.processes:
            raise InvalidBoundsError(
                f"batch_size {self.batch_size} is not a multiple of processes_per_replica {self.processes}: "
                "the processes of a replica divide its batches equally, so change one of them"
            )
        if self.max_batch_size is not None:
            _require_positive_integer("max_batch_size", self.max_batch_size)
            if self.max_batch_size < self.batch_size:
                raise InvalidBoundsError(
                    f"max_batch_size {self.max_batch_size} is less than batch_size {self.batch_size}: "
                    "raise max_batch_size, or lower batch_size"
                )
        if self.local_bsz_bounds is not None:
            _require_pair("local_bsz_bounds", self.local_bsz_bounds)
            lower, upper = self.local_bsz_bounds
            _require_positive_integer("local_bsz_bounds lower", lower)
            if upper == AUTO:
                if self.max_batch_size is None:
                    raise InvalidBoundsError(
                        f"local_bsz_bounds upper is {AUTO}, which needs max_batch_size: set max_batch_size, "
                        "or an integer as upper"
                    )
                return
            _require_positive_integer("local_bsz_bounds upper", upper, otherwise=AUTO)
            if lower > upper:
                raise InvalidBoundsError(
                    f"local_bsz_bounds lower {lower} is greater than upper {upper}: "
                    "lower must be at most upper"
                )
            if upper // self.processes < -(-lower // self.processes):
                raise InvalidBoundsError(
                    f"local_bsz_bounds {lower} to {upper} have no multiple of processes_per_replica "
                    f"{self.processes}: the processes of a replica divide its local batch equally, so widen "
                    "the bounds"
                )

    def per_process(self) -> BatchBounds:
        """Return the bounds of what each process of a replica has of a batch, in samples."""
        count = self.processes
        pair = self.local_bsz_bounds
        if pair is not None:
            pair = -(-pair[0] // count), pair[1] if pair[1] == AUTO else pair[1] // count
        return BatchBounds(
            self.batch_size // count,
            None if self.max_batch_size is None else self.max_batch_size // count,
            pair,
            self.elastic_single_replica,
            None if self.local_bsz_limit is None else self.local_bsz_limit // count,
        )

    @property
    def elastic(self) -> bool:
        """Whether the global batch may differ from `batch_size`."""
        return self.max_batch_size is not None or self.local_bsz_bounds is not None

    @property
    def lower(self) -> int:
        """The smallest local batch size allowed."""
        return self.local_bsz_bounds[0] if self.local_bsz_bounds else 1

    @property
    def declared_upper(self) -> int | None:
        """The upper bound of the local batch size that the user has set; None if it is found in training."""
        upper = self.local_bsz_bounds[1] if self.local_bsz_bounds else AUTO
        return None if upper == AUTO else upper

    @property
    def upper(self) -> int | None:
        """The largest local batch size allowed; None if unbounded."""
        if self.declared_upper is None or self.local_bsz_limit is None:
            return self.declared_upper or self.local_bsz_limit
        return min(self.declared_upper, self.local_bsz_limit)

    def with_limit(self, limit: int | None) -> BatchBounds:
        """Return these bounds for devices whose memory holds local batches of at most `limit` samples."""
        if limit is None or (self.local_bsz_limit is not None and self.local_bsz_limit <= limit):
            return self
        return replace(self, local_bsz_limit=limit)


def limit_after(too_large: int, fitting: int) -> int:
    """Return the limit of the local batch size after a batch did not fit into memory.

    Half way to the largest batch that is known to fit, so that repeated failures end there. 0 if no smaller
    batch is left.
    """
    if fitting >= too_large:
        # Samples differ in size, so the finished step shows nothing.
        fitting = 0
    if fitting and too_large - fitting <= max(fitting // _LIMIT_PRECISION, 1):
        return fitting
    return (fitting + too_large) // 2


_LIMIT_PRECISION = 8
"""The search for the largest fitting local batch ends within this fraction of the largest that fits."""


def _require_pair(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise InvalidBoundsError(f"{name} must be a pair (lower, upper), got {value!r}")


def _require_positive_integer(name: str, value: object, otherwise: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        allowed = f"a positive integer or {otherwise!r}" if otherwise else "a positive integer"
        raise InvalidBoundsError(f"{name} must be {allowed}, got {value!r}")


@dataclass(frozen=True)
class BatchPlan:
    """The samples of one step."""

    replicas: int
    local_bsz: int  # samples in one micro-batch of one replica (b)
    accumulation: int = 1  # micro-batches whose gradients a replica accumulates in one step (a)

    @property
    def global_bsz(self) -> int:
        """Samples in one step: K*b*a."""
        return self.replicas * self.local_bsz * self.accumulation

    def scale(self, bounds: BatchBounds) -> float:
        """The scale S = K*b*a / batch_size."""
        return self.global_bsz / bounds.batch_size

    def times(self, processes: int) -> BatchPlan:
        """Return the plan of replicas of several processes, of which this plan is the share of one."""
        return replace(self, local_bsz=self.local_bsz * processes)

    def per_process(self, processes: int) -> BatchPlan:
        """Return the plan in which each process of the replicas counts as a replica."""
        return BatchPlan(self.replicas * processes, self.local_bsz // processes, self.accumulation)


@dataclass(frozen=True)
class Prediction:
    """The predicted performance of a replica count."""

    plan: BatchPlan
    scale: float
    gain: float  # steps at `batch_size` per step
    step_time: float  # seconds per optimizer step
    # the gains at one standard error of the estimate; twice `gain` if the error is not known
    gain_range: tuple[float, float]

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def goodput(self) -> float:
        """Steps at `batch_size` per second: throughput times gain (Qiao et al. 2021, section 3).

        With the lower gain of the range, which decides.
        """
        return self.gain_range[0] / self.step_time


TOLERANCE = 1e-9
"""Relative rounding error of an efficiency."""

Throughput = Callable[[BatchPlan], float]
"""Predicted optimizer steps per second of a plan."""


def local_bsz_range(bounds: BatchBounds, replicas: int) -> range:
    """Return the local batch sizes that `replicas` replicas may use; empty if none is valid.

    There is at most one size for a single replica, which keeps the global batch at `batch_size`, and for a
    job without bounds, whose replicas divide the batch.
    """
    empty = range(0)
    if replicas < 1:
        return empty
    if bounds.processes > 1:
        return _times(local_bsz_range(bounds.per_process(), replicas), bounds.processes)
    if not bounds.elastic:
        quotient, remainder = divmod(bounds.batch_size, replicas)
        local_bsz = None if remainder or not quotient else _largest_divisor(quotient, bounds)
        return range(local_bsz, local_bsz + 1) if local_bsz else empty
    if replicas == 1:
        local_bsz = _largest_divisor(bounds.batch_size, bounds)
        return range(local_bsz, local_bsz + 1) if local_bsz else empty
    limits = []
    if bounds.upper is not None:
        limits.append(bounds.upper)
    if bounds.max_batch_size is not None:
        limits.append(bounds.max_batch_size // replicas)
    largest = min(limits)
    return range(bounds.lower, largest + 1) if largest >= bounds.lower else empty


def _times(sizes: range, factor: int) -> range:
    return range(sizes.start * factor, (sizes.stop - 1) * factor + 1, factor) if sizes else sizes


def _largest_divisor(samples: int, bounds: BatchBounds) -> int | None:
    """Return the local batch size with which one replica makes `samples` in the fewest micro-batches."""
    if bounds.upper is None:
        return samples if samples >= bounds.lower else None
    fitting = [size for size in _divisors(samples) if bounds.lower <= size <= bounds.upper]
    return fitting[-1] if fitting else None


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def is_valid_replicas(bounds: BatchBounds, replicas: int) -> bool:
    """Whether a job with these bounds can run on `replicas` replicas."""
    return len(local_bsz_range(bounds, replicas)) > 0


def valid_replicas(bounds: BatchBounds, limit: int) -> list[int]:
    """Return the valid replica counts from 1 to `limit`, ascending."""
    if bounds.processes > 1:
        return valid_replicas(bounds.per_process(), limit)
    if not bounds.elastic:
        return [
            count
            for count in _divisors(bounds.batch_size)
            if count <= limit and is_valid_replicas(bounds, count)
        ]
    largest = _max_replicas(bounds)
    limit = limit if largest is None else min(limit, largest)
    return [count for count in range(1, limit + 1) if is_valid_replicas(bounds, count)]


def _max_replicas(bounds: BatchBounds) -> int | None:
    """Return a count above which no count is valid; None if counts are unbounded."""
    if not bounds.elastic:
        return bounds.batch_size
    return None if bounds.max_batch_size is None else bounds.max_batch_size // bounds.lower


def require_valid_replicas(bounds: BatchBounds, minimum: int, maximum: int) -> list[int]:
    """Return the valid replica counts from `minimum` to `maximum`, ascending."""
    if minimum > maximum:
        raise InvalidJobError(
            f"minReplicas {minimum} is greater than maxReplicas {maximum}: "
            "lower minReplicas, or raise maxReplicas"
        )
    counts = [count for count in valid_replicas(bounds, maximum) if count >= minimum]
    if not counts:
        raise InvalidJobError(
            f"no replica count from {minimum} to {maximum} is valid with {_describe(bounds)}: "
            f"widen the bounds, or change minReplicas and maxReplicas; {_describe_valid(bounds)}"
        )
    return counts


def invalid_count(bounds: BatchBounds, replicas: int) -> InvalidJobError:
    """Return the error for a replica count that is not valid with these bounds."""
    subject = "1 replica is" if replicas == 1 else f"{replicas} replicas are"
    return InvalidJobError(
        f"{subject} not valid with {_describe(bounds)}: {_describe_valid(bounds)}. "
        "Change the number of replicas or the bounds"
    )


def _describe(bounds: BatchBounds) -> str:
    parts = [f"batch_size {bounds.batch_size}"]
    if bounds.max_batch_size is not None:
        parts.append(f"max_batch_size {bounds.max_batch_size}")
    if bounds.local_bsz_bounds is not None:
        parts.append(f"local_bsz_bounds {bounds.lower} to {bounds.local_bsz_bounds[1]}")
    if bounds.local_bsz_limit is not None:
        parts.append(f"memory for local batches of at most {bounds.local_bsz_limit}")
    if bounds.processes > 1:
        parts.append(f"replicas of {bounds.processes} processes")
    return ", ".join(parts)


def _describe_valid(bounds: BatchBounds) -> str:
    processes = bounds.processes
    bounds = bounds.per_process()
    if bounds.upper is not None and bounds.upper < bounds.lower:
        return "no count is valid"
    if not bounds.elastic:
        counts = _divisors(bounds.batch_size)
        listed = ", ".join(str(count) for count in counts[:8])
        share = "batch_size" if processes == 1 else f"batch_size / {processes}"
        return f"valid are the divisors of {share}, {listed}{', ...' if len(counts) > 8 else ''}"
    first, last = 1 if is_valid_replicas(bounds, 1) else 2, _max_replicas(bounds)
    if last is None:
        return f"valid are {first} and more"
    if last < first:
        return "no count is valid"
    return f"valid are {first} to {last}" if last > first else f"valid is {first}"


@dataclass(frozen=True)
class BatchChoice:
    """The batch plans of a replica count with the fewest micro-batches."""

    replicas: int
    local_bsz: range  # the local batch sizes, ascending; empty if the replica count is not valid
    accumulation: int = 1  # micro-batches per step, the same for all local batch sizes (a)

    def __len__(self) -> int:
        return len(self.local_bsz)

    def __getitem__(self, index: int) -> BatchPlan:
        return BatchPlan(self.replicas, self.local_bsz[index], self.accumulation)

    def spread(self, max_plans: int = 64) -> list[BatchPlan]:
        """Return at most `max_plans` (at least 2) plans: both ends, and a geometric series between them."""
        last = len(self) - 1
        if last < max_plans:
            return [self[index] for index in range(len(self))]
        first_bsz, last_bsz, unit = self.local_bsz[0], self.local_bsz[last], self.local_bsz.step
        ratio = (last_bsz / first_bsz) ** (1 / (max_plans - 1))
        between = (round(first_bsz // unit * ratio**i) * unit for i in range(1, max_plans - 1))
        sizes = {first_bsz, *between, last_bsz}
        return [BatchPlan(self.replicas, size, self.accumulation) for size in sorted(sizes)]


def batch_choice(bounds: BatchBounds, replicas: int) -> BatchChoice:
    """Return the plans with the fewest micro-batches for `replicas` replicas, by ascending global batch.

    The global batch is at least `batch_size` if the bounds allow it. Several replicas accumulate only if the
    largest local batch size is not enough for that.
    """
    if bounds.processes > 1:
        choice = batch_choice(bounds.per_process(), replicas)
        return replace(choice, local_bsz=_times(choice.local_bsz, bounds.processes))
    local = local_bsz_range(bounds, replicas)
    if not local:
        return BatchChoice(replicas, local)
    if replicas == 1:
        return BatchChoice(1, local, bounds.batch_size // local[0])
    smallest, largest = local[0], local[-1]
    # The samples of one replica in a step, b*a, must be from `lower` to `upper`.
    lower = -(-bounds.batch_size // replicas)
    upper = None if bounds.max_batch_size is None else bounds.max_batch_size // replicas
    accumulation = _fewest_micro_batches(smallest, largest, lower, upper)
    if accumulation is None:
        return BatchChoice(replicas, range(largest, largest + 1))
    first = max(smallest, -(-lower // accumulation))
    last = largest if upper is None else min(largest, upper // accumulation)
    return BatchChoice(replicas, range(first, last + 1), accumulation)


def candidate_plans(bounds: BatchBounds, replicas: int, max_plans: int = 64) -> list[BatchPlan]:
    """Return the plans among which the goodput decides, by ascending global batch; empty if not valid.

    They are those of `batch_choice`, then plans with more micro-batches up to `max_batch_size`, spread
    geometrically. Each has the fewest micro-batches of its size.
    """
    if bounds.processes > 1:
        plans = candidate_plans(bounds.per_process(), replicas, max_plans)
        return [plan.times(bounds.processes) for plan in plans]
    choice = batch_choice(bounds, replicas)
    if not choice:
        return []
    accumulating = _accumulating_plans(bounds, choice, max_plans // 2)
    return choice.spread(max(max_plans - len(accumulating), 2)) + accumulating


def _accumulating_plans(bounds: BatchBounds, choice: BatchChoice, max_plans: int) -> list[BatchPlan]:
    replicas = choice.replicas
    if not bounds.elastic or bounds.max_batch_size is None:
        return []
    if replicas == 1 and not bounds.elastic_single_replica:
        return []
    # The samples of one replica in a step, b*a.
    smallest = choice[len(choice) - 1].global_bsz // replicas
    largest = bounds.max_batch_size // replicas
    if largest <= smallest or max_plans < 1:
        return []
    ratio = (largest / smallest) ** (1 / max_plans)
    least = 2 if replicas == 1 else 1
    lower, upper = bounds.lower, bounds.upper
    plans = {}
    for share in [*(int(smallest * ratio**i) for i in range(1, max_plans)), largest]:
        plan = _fewest_for_share(lower, upper, replicas, share, least)
        if plan is not None and plan.accumulation * plan.local_bsz > smallest:
            plans[plan.global_bsz] = plan
    return [plans[size] for size in sorted(plans)]


def _fewest_for_share(
    lower: int, upper: int | None, replicas: int, share: int, least: int
) -> BatchPlan | None:
    """Return the plan of at most `share` samples per replica, with the fewest micro-batches."""
    accumulation = least if upper is None else max(least, -(-share // upper))
    local_bsz = share // accumulation
    return BatchPlan(replicas, local_bsz, accumulation) if local_bsz >= lower else None


def allows(bounds: BatchBounds, plan: BatchPlan) -> bool:
    """Whether a job with these bounds may use a plan on its replica count."""
    if bounds.processes > 1:
        share, rest = divmod(plan.local_bsz, bounds.processes)
        return not rest and allows(bounds.per_process(), replace(plan, local_bsz=share))
    choice = batch_choice(bounds, plan.replicas)
    if plan.accumulation == choice.accumulation and plan.local_bsz in choice.local_bsz:
        return True
    if not choice or not bounds.elastic or bounds.max_batch_size is None:
        return False
    if plan.replicas == 1 and (not bounds.elastic_single_replica or plan.accumulation < 2):
        return False
    within = bounds.lower <= plan.local_bsz <= (bounds.upper or plan.local_bsz)
    return within and bounds.batch_size <= plan.global_bsz <= bounds.max_batch_size


def _fewest_micro_batches(smallest: int, largest: int, lower: int, upper: int | None) -> int | None:
    """Return the smallest a with lower <= b*a <= upper for a b from `smallest` to `largest`, or None."""
    accumulation = -(-lower // largest)
    if upper is None:
        return accumulation
    while accumulation * smallest <= upper:
        local_bsz = min(largest, upper // accumulation)
        if local_bsz * accumulation >= lower:
            return accumulation
        # A larger a allows no larger b, so the next candidate is the smallest a that is enough for this b.
        accumulation = -(-lower // local_bsz)
    return None


@dataclass(frozen=True)
class EfficiencyBound:
    """How much of the progress per sample a larger batch may cost."""

    # the least efficiency, gain / scale, of a batch, above 0 and at most 1; None for the default
    target: float | None = None
    # whether the length of training is in samples. An efficiency below 1 is then progress that is never made,
    # so `target` always holds. If not, training takes more samples, which the goodput counts, and `target`
    # holds only while the throughput is unknown.
    counts_samples: bool = False

    @property
    def least(self) -> float:
        """The least efficiency of a batch while the throughput is unknown."""
        if self.target is not None:
            return self.target
        return DEFAULT_EFFICIENCY_TARGET_OF_SAMPLES if self.counts_samples else DEFAULT_EFFICIENCY_TARGET

    @property
    def least_at_goodput(self) -> float:
        """The least efficiency of a batch that is chosen by its goodput; 0 if there is no bound."""
        return self.least if self.counts_samples else 0.0


DEFAULT_EFFICIENCY = EfficiencyBound()
"""That of a job with a length in scale-invariant steps, without a target of its own."""


def plan_batch(
    bounds: BatchBounds,
    replicas: int,
    *,
    estimate: GradientEstimate | None = None,
    throughput: Throughput | None = None,
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY,
) -> BatchPlan:
    """Return the plan of the highest goodput: steps per second times gain (Qiao et al. 2021, section 3).

    Without throughput it is the largest batch of the required efficiency, without an estimate the smallest
    batch of at least `batch_size`. The smallest batch is always allowed.
    """
    choice = batch_choice(bounds, replicas)
    if not choice:
        raise invalid_count(bounds, replicas)
    if estimate is None:
        return choice[0]

    def reaches(plan: BatchPlan, target: float) -> bool:
        # Rounding makes the efficiency slightly non-monotonic, and may make 1 slightly less.
        return estimate.efficiency(plan.scale(bounds)) >= target * (1 - TOLERANCE)

    if throughput is None:
        efficient = bisect_left(
            range(len(choice)), True, key=lambda index: not reaches(choice[index], efficiency.least)
        )
        return choice[max(efficient - 1, 0)]
    plans = candidate_plans(bounds, replicas)
    return max(
        [plan for plan in plans if reaches(plan, efficiency.least_at_goodput)] or plans[:1],
        key=lambda plan: (throughput(plan) * estimate.gain(plan.scale(bounds)), -plan.global_bsz),
    )
