"""Batch sizes and valid replica counts: tables of cases, and a brute-force search for every rule."""

import re
from itertools import count, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import (
    BatchBounds,
    BatchPlan,
    EfficiencyBound,
    InvalidBoundsError,
    LocalBszBounds,
    batch_choice,
    is_valid_replicas,
    limit_after,
    local_bsz_range,
    plan_batch,
    require_valid_replicas,
    valid_replicas,
)
from adascale_core.errors import InvalidJobError

NOISY = GradientEstimate(grad_sqr=1.0, grad_var=100.0)
"""A gradient for which large batches are worth much: the efficiency at scale S is 101 / (100 + S)."""
CLEAR = GradientEstimate(grad_sqr=1.0, grad_var=0.0)
"""A gradient without noise: a larger batch is worth nothing."""


# -- the rules as DESIGN has them, by trying everything -------------------------------------------------


def tried_local_bszs(bounds: BatchBounds, replicas: int) -> list[int]:
    """Every local batch size that `replicas` replicas may use."""
    size, most = bounds.batch_size, bounds.max_batch_size
    lower, declared = bounds.local_bsz_bounds or (1, "auto")
    upper = min(10**9 if declared == "auto" else declared, bounds.local_bsz_limit or 10**9)
    if bounds.max_batch_size is None and bounds.local_bsz_bounds is None:
        share, rest = divmod(size, replicas)
        divisors = [b for b in range(1, share + 1) if share % b == 0 and b <= upper and not rest]
        divisors = [b for b in divisors if b % bounds.processes == 0]
        return divisors[-1:]
    if replicas == 1:
        for accumulation in range(1, size + 1):
            b, rest = divmod(size, accumulation)
            if not rest and lower <= b <= upper and b % bounds.processes == 0:
                return [b]
        return []
    largest = max(size, most or 0, lower, upper if upper < 10**9 else 0)
    return [
        b
        for b in range(bounds.processes, largest + 1, bounds.processes)
        if lower <= b <= upper and (most is None or replicas * b <= most)
    ]


def tried_plans(bounds: BatchBounds, replicas: int) -> list[BatchPlan]:
    """Every plan to choose from: as few micro-batches as make up `batch_size`, else the largest batch."""
    allowed = tried_local_bszs(bounds, replicas)
    if not allowed:
        return []
    most = bounds.max_batch_size or 10**9
    for accumulation in range(1, bounds.batch_size + 1):
        plans = [BatchPlan(replicas, b, accumulation) for b in allowed]
        plans = [plan for plan in plans if bounds.batch_size <= plan.global_bsz <= most]
        if plans:
            return plans
    return [BatchPlan(replicas, max(allowed), 1)]


@st.composite
def all_bounds(draw: st.DrawFn, largest: int = 60) -> BatchBounds:
    sizes = st.integers(1, largest)
    processes = draw(st.sampled_from([1, 2, 3]))
    size = draw(sizes) * processes
    most = draw(st.none() | st.integers(size, 2 * processes * largest))
    # Wide enough for a multiple of the processes.
    pair = draw(st.none() | st.tuples(sizes, sizes).map(lambda both: (min(both), max(both) + processes - 1)))
    is_open = most is not None and draw(st.booleans())
    local: LocalBszBounds | None = (pair[0], "auto" if is_open else pair[1]) if pair else None
    return BatchBounds(size, most, local, local_bsz_limit=draw(st.none() | sizes), processes=processes)


replica_counts = st.integers(1, 70)
estimates = st.builds(GradientEstimate, grad_sqr=st.floats(-1, 1e3), grad_var=st.floats(-1, 1e3))


@pytest.mark.parametrize(
    ("fitting", "tried"),
    [
        (0, [16, 8, 4, 2, 1, 0]),  # nothing is known to fit
        (6, [16, 11, 8, 7, 6, 3, 1, 0]),  # samples differ in size: 6 has fit, and does not fit any more
        (100, [200, 150, 125, 112, 100, 50]),
    ],
)
def test_the_limit_after_failures_goes_half_way_to_what_has_fit(fitting: int, tried: list[int]) -> None:
    for size, limit in pairwise(tried):
        assert limit_after(size, fitting) == limit


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_the_limit_is_below_what_did_not_fit_and_not_below_what_fits(too_large: int, fitting: int) -> None:
    limit = limit_after(too_large, fitting)
    assert limit < too_large
    assert fitting >= too_large or limit >= fitting


# -- validity -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "valid"),
    [
        # no bounds: the replicas divide the batch, so the count is a divisor
        (BatchBounds(12), [1, 2, 3, 4, 6, 12]),
        (BatchBounds(7), [1, 7]),
        (BatchBounds(1), [1]),
        # lower 100 and max 1000: eleven replicas are too many
        (BatchBounds(200, 1000, (100, 200)), [*range(1, 11)]),
        (BatchBounds(1000, 1000, (100, 1000)), [*range(1, 11)]),
        # sizes are rounded down: 7 * 15 = 105 exceeds 100, and 7 * 14 = 98 does not
        (BatchBounds(100, 100, (15, 100)), [*range(1, 7)]),
        (BatchBounds(100, 100, (14, 100)), [*range(1, 8)]),
        # only a maximum: the smallest local batch is one sample
        (BatchBounds(4, 16), [*range(1, 17)]),
        # only local bounds: any number of replicas
        (BatchBounds(8, None, (4, 8)), [*range(1, 21)]),
        # one replica accumulates if a divisor of the batch size is within the bounds
        (BatchBounds(100, 400, (10, 30)), [*range(1, 21)]),
        # and is not valid if no divisor is: 7 = 7 * 1
        (BatchBounds(7, None, (2, 6)), [*range(2, 21)]),
        (BatchBounds(100, None, (30, 49)), [*range(2, 21)]),
        # without an upper bound, one replica still must not be below the lower bound
        (BatchBounds(4, 64, (8, "auto")), [*range(2, 9)]),
        (BatchBounds(8, 64, (8, "auto")), [*range(1, 9)]),
        # the bounds take precedence over the batch of one replica
        (BatchBounds(8, 64, (16, 32)), [*range(2, 5)]),
        (BatchBounds(8, 8, (4, 4)), [1, 2]),
        # memory for 6 samples: a replica accumulates, so the same counts are valid
        (BatchBounds(12, local_bsz_limit=1), [1, 2, 3, 4, 6, 12]),
        (BatchBounds(8, None, (4, 8), local_bsz_limit=6), [*range(1, 21)]),
        # except where no divisor is left between the lower bound and the limit
        (BatchBounds(8, None, (5, 8), local_bsz_limit=7), [*range(2, 21)]),
        # and none if the smallest local batch does not fit
        (BatchBounds(8, None, (5, 8), local_bsz_limit=4), []),
        # the local batch is greater than the maximum of the job
        (BatchBounds(8, 15, (8, 32)), [1]),
        (BatchBounds(8, 16, (9, 32)), []),
    ],
)
def test_a_count_is_valid_if_a_local_batch_size_is_valid(bounds: BatchBounds, valid: list[int]) -> None:
    assert valid_replicas(bounds, 20) == valid
    assert [replicas for replicas in range(-1, 21) if is_valid_replicas(bounds, replicas)] == valid


@given(all_bounds(), replica_counts)
def test_validity_and_local_sizes_equal_those_of_a_brute_force_search(
    bounds: BatchBounds, replicas: int
) -> None:
    allowed = tried_local_bszs(bounds, replicas)
    assert list(local_bsz_range(bounds, replicas)) == allowed
    assert is_valid_replicas(bounds, replicas) == bool(allowed)


@given(all_bounds(), st.integers(-1, 70))
def test_valid_replicas_returns_exactly_the_valid_counts(bounds: BatchBounds, limit: int) -> None:
    assert valid_replicas(bounds, limit) == [
        count for count in range(1, limit + 1) if is_valid_replicas(bounds, count)
    ]


# -- what there is to choose from -----------------------------------------------------------------------


@given(all_bounds(), replica_counts)
@example(BatchBounds(59, 59), 2)
@example(BatchBounds(59, 60, (1, 4)), 2)
def test_the_choice_equals_that_of_a_brute_force_search(bounds: BatchBounds, replicas: int) -> None:
    choice = batch_choice(bounds, replicas)
    plans = [choice[index] for index in range(len(choice))]
    assert plans == tried_plans(bounds, replicas)
    assert [plan.local_bsz for plan in plans] == list(choice.local_bsz)
    assert {plan.accumulation for plan in plans} <= {choice.accumulation}


@given(all_bounds(largest=10**7), replica_counts, st.integers(2, 100))
def test_the_spread_has_both_ends_and_at_most_max_plans_plans(
    bounds: BatchBounds, replicas: int, most: int
) -> None:
    choice = batch_choice(bounds, replicas)
    spread = choice.spread(most)
    if not choice:
        assert spread == []
        return
    assert spread[0] == choice[0]
    assert spread[-1] == choice[len(choice) - 1]
    assert len(spread) <= most
    assert len(choice) > most or len(spread) == len(choice)
    sizes = [plan.local_bsz for plan in spread]
    assert sizes == sorted(set(sizes))
    assert all(size in choice.local_bsz for size in sizes)
    assert all(plan == BatchPlan(replicas, plan.local_bsz, choice.accumulation) for plan in spread)


def test_the_spread_is_a_geometric_series() -> None:
    sizes = [plan.local_bsz for plan in batch_choice(BatchBounds(1, 2048), 2).spread(11)]
    assert sizes == [2**power for power in range(11)]


# -- which plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "replicas", "plan"),
    [
        (BatchBounds(64, 512, (16, 128)), 1, BatchPlan(1, 64)),
        (BatchBounds(64, 512, (16, 128)), 2, BatchPlan(2, 32)),
        (BatchBounds(64, 512, (16, 128)), 3, BatchPlan(3, 22)),
        (BatchBounds(64, 512, (16, 128)), 8, BatchPlan(8, 16)),
        (BatchBounds(64, 512, (4, 8)), 3, BatchPlan(3, 8, 3)),
        (BatchBounds(64), 4, BatchPlan(4, 16)),
    ],
)
def test_without_an_estimate_the_smallest_batch_of_at_least_the_default_is_planned(
    bounds: BatchBounds, replicas: int, plan: BatchPlan
) -> None:
    assert plan_batch(bounds, replicas) == plan
    assert plan_batch(bounds, replicas, throughput=lambda _: 1.0) == plan


@pytest.mark.parametrize(("counts_samples", "local_bsz"), [(False, 8), (True, 5)])
def test_the_efficiency_target_has_a_default(counts_samples: bool, local_bsz: int) -> None:
    """1 / S is at least 0.5 up to S = 2, and at least 0.8 up to S = 1.25."""
    bounds, efficiency = BatchBounds(16, 512, (2, 128)), EfficiencyBound(counts_samples=counts_samples)
    assert plan_batch(bounds, 4, estimate=CLEAR, efficiency=efficiency) == BatchPlan(4, local_bsz)


@pytest.mark.parametrize(
    ("estimate", "seconds_fixed", "seconds_per_sample", "local_bsz"),
    [
        (NOISY, 1.0, 0.0, 64),  # steps of any size take the same time: the largest gain
        (CLEAR, 1.0, 0.0, 4),  # gains are the same too: the smallest batch
        (CLEAR, 0.0, 1.0, 4),
        (NOISY, 0.0, 1.0, 4),  # time grows with the batch: the highest efficiency
        (GradientEstimate(0.0, 1.0), 0.0, 1.0, 4),  # every batch has the same gain: the smallest batch
        (GradientEstimate(1.0, 10.0), 0.1, 0.01, 20),  # in between, at b = sqrt(10 * 4 * 10)
    ],
)
def test_the_plan_with_the_highest_goodput_is_used(
    estimate: GradientEstimate, seconds_fixed: float, seconds_per_sample: float, local_bsz: int
) -> None:
    def throughput(plan: BatchPlan) -> float:
        return 1 / (seconds_fixed + seconds_per_sample * plan.local_bsz)

    bounds = BatchBounds(16, 256, (1, 64))
    assert plan_batch(bounds, 4, estimate=estimate, throughput=throughput).local_bsz == local_bsz


@pytest.mark.parametrize(
    ("estimate", "target", "local_bsz"),
    [
        (NOISY, 0.5, 64),  # 101 / (100 + S) is at least 0.5 up to S = 102: all of them
        (NOISY, 0.935, 32),  # up to S = 8.02
        (NOISY, 1.0, 4),
        (CLEAR, 1.0, 4),
        (CLEAR, 0.1, 4),  # S = 10 is allowed, and not faster
    ],
)
def test_with_a_length_in_samples_the_goodput_decides_within_the_efficiency_target(
    estimate: GradientEstimate, target: float, local_bsz: int
) -> None:
    bounds, efficiency = BatchBounds(16, 256, (1, 64)), EfficiencyBound(target, counts_samples=True)
    plan = plan_batch(bounds, 4, estimate=estimate, throughput=lambda _: 1.0, efficiency=efficiency)
    assert plan == BatchPlan(4, local_bsz)


@given(all_bounds(), replica_counts, estimates, st.floats(0, 10), st.floats(1e-3, 10))
@example(BatchBounds(1, 14, local_bsz_limit=1), 2, GradientEstimate(0.0, 1.0), 0.0, 7.5)
def test_no_other_plan_has_a_higher_goodput(
    bounds: BatchBounds, replicas: int, estimate: GradientEstimate, fixed: float, per_sample: float
) -> None:
    def throughput(plan: BatchPlan) -> float:
        return 1 / (plan.accumulation * (fixed + per_sample * plan.local_bsz))

    plans = tried_plans(bounds, replicas)
    if plans and len(plans) <= 64:
        chosen = plan_batch(bounds, replicas, estimate=estimate, throughput=throughput)
        best = max(throughput(plan) * estimate.gain(plan.scale(bounds)) for plan in plans)
        # The chosen plan can have more micro-batches than these, and a goodput that differs by its rounding.
        goodput = throughput(chosen) * estimate.gain(chosen.scale(bounds))
        assert goodput == pytest.approx(best, rel=1e-12, abs=0.0)


@given(all_bounds(), replica_counts, estimates, st.floats(0, 1))
@example(BatchBounds(1, None, (1, 8)), 21, GradientEstimate(0.0, 1.0), 1.0)
def test_no_larger_plan_is_within_the_efficiency_target(
    bounds: BatchBounds, replicas: int, estimate: GradientEstimate, target: float
) -> None:
    plans = tried_plans(bounds, replicas)
    if plans:
        chosen = plan_batch(bounds, replicas, estimate=estimate, efficiency=EfficiencyBound(target))
        enough = [plan for plan in plans if estimate.efficiency(plan.scale(bounds)) >= target * (1 - 1e-9)]
        assert chosen == (max(enough, key=lambda plan: plan.local_bsz) if enough else plans[0])


@given(
    all_bounds(),
    replica_counts,
    st.none() | estimates,
    st.none() | st.floats(1e-6, 1e6),
    st.builds(EfficiencyBound, st.floats(0, 1), st.booleans()),
)
def test_every_plan_is_within_the_bounds_and_planning_is_deterministic(
    bounds: BatchBounds,
    replicas: int,
    estimate: GradientEstimate | None,
    speed: float | None,
    efficiency: EfficiencyBound,
) -> None:
    def ask() -> BatchPlan:
        throughput = None if speed is None else (lambda plan: speed / plan.local_bsz)
        return plan_batch(bounds, replicas, estimate=estimate, throughput=throughput, efficiency=efficiency)

    if not is_valid_replicas(bounds, replicas):
        with pytest.raises(InvalidJobError):
            ask()
        return
    plan = ask()
    assert plan == ask()
    assert plan.replicas == replicas
    assert plan.accumulation >= 1
    assert plan.local_bsz >= bounds.lower
    assert bounds.upper is None or plan.local_bsz <= bounds.upper
    assert bounds.max_batch_size is None or plan.global_bsz <= bounds.max_batch_size
    if replicas == 1 or not bounds.elastic:
        assert plan.global_bsz == bounds.batch_size
        assert plan.scale(bounds) == 1.0


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "batch_size must be a positive integer, got 0"),
        ((-8,), "batch_size must be a positive integer, got -8"),
        ((8.0,), "batch_size must be a positive integer, got 8.0"),
        (("8",), "batch_size must be a positive integer, got '8'"),
        ((True,), "batch_size must be a positive integer, got True"),
        ((None,), "batch_size must be a positive integer, got None"),
        ((8, 0), "max_batch_size must be a positive integer, got 0"),
        ((8, 16.5), "max_batch_size must be a positive integer, got 16.5"),
        ((8, 7), "max_batch_size 7 is less than batch_size 8"),
        ((8, None, (0, 4)), "local_bsz_bounds lower must be a positive integer, got 0"),
        ((8, None, (1, -4)), "local_bsz_bounds upper must be a positive integer or 'auto', got -4"),
        ((8, None, (1, 4.5)), "local_bsz_bounds upper must be a positive integer or 'auto', got 4.5"),
        ((8, None, (5, 4)), "local_bsz_bounds lower 5 is greater than upper 4"),
        ((8, None, (4,)), "local_bsz_bounds must be a pair (lower, upper), got (4,)"),
        ((8, None, [4, 8]), "local_bsz_bounds must be a pair (lower, upper), got [4, 8]"),
        ((8, 64, (4, 0)), "local_bsz_bounds upper must be a positive integer or 'auto', got 0"),
        ((8, 64, (4, None)), "local_bsz_bounds upper must be a positive integer or 'auto', got None"),
        ((8, 64, (4, "Auto")), "local_bsz_bounds upper must be a positive integer or 'auto', got 'Auto'"),
        ((8, 64, (4, "64")), "local_bsz_bounds upper must be a positive integer or 'auto', got '64'"),
        ((8, 64, ("auto", 4)), "local_bsz_bounds lower must be a positive integer, got 'auto'"),
        (
            (8, None, (4, "auto")),
            "local_bsz_bounds upper is auto, which needs max_batch_size: set max_batch_size, or an integer "
            "as upper",
        ),
        ((8, None, 4), "local_bsz_bounds must be a pair (lower, upper), got 4"),
    ],
)
def test_invalid_bounds_raise_an_error_with_their_values(
    arguments: tuple[int, int | None, tuple[int, int] | None], message: str
) -> None:
    with pytest.raises(InvalidBoundsError, match=re.escape(message)):
        BatchBounds(*arguments)


@pytest.mark.parametrize(
    ("bounds", "minimum", "maximum", "parts"),
    [
        (BatchBounds(200, 1000, (100, 200)), 11, 16, ["11 to 16", "100 to 200", "1000", "1 to 10"]),
        (BatchBounds(7), 2, 6, ["2 to 6", "batch_size 7"]),
        (BatchBounds(7, None, (2, 6)), 1, 1, ["1 to 1", "batch_size 7", "2 to 6"]),
        (BatchBounds(8, 16, (9, 32)), 1, 4, ["1 to 4", "max_batch_size 16", "9 to 32"]),
        (BatchBounds(2, local_bsz_limit=1, processes=2), 1, 1, ["at most 1", "no count is valid"]),
        (BatchBounds(8, 16), 4, 2, ["minReplicas 4 is greater than maxReplicas 2"]),
    ],
)
def test_a_job_without_a_valid_count_raises_an_error_with_its_bounds(
    bounds: BatchBounds, minimum: int, maximum: int, parts: list[str]
) -> None:
    with pytest.raises(InvalidJobError) as raised:
        require_valid_replicas(bounds, minimum, maximum)
    for part in parts:
        assert part in str(raised.value)


@given(all_bounds(), st.integers(1, 70), st.integers(1, 70))
def test_exactly_the_valid_counts_from_minimum_to_maximum_are_returned(
    bounds: BatchBounds, minimum: int, maximum: int
) -> None:
    expected = [count for count in range(minimum, maximum + 1) if is_valid_replicas(bounds, count)]
    try:
        assert require_valid_replicas(bounds, minimum, maximum) == expected
    except InvalidJobError:
        assert expected == []


@pytest.mark.parametrize(
    ("bounds", "replicas", "message"),
    [
        (BatchBounds(200, 1000, (100, 200)), 11, "11 replicas are not valid with batch_size 200"),
        (BatchBounds(200, 1000, (100, 200)), 11, "valid are 1 to 10"),
        (BatchBounds(12), 5, "valid are the divisors of batch_size, 1, 2, 3, 4, 6, 12"),
        (BatchBounds(5040), 11, "1, 2, 3, 4, 5, 6, 7, 8, ..."),
        (BatchBounds(8, 16, (9, 32)), 1, "no count is valid"),
        (BatchBounds(8, 15, (8, 32)), 2, "valid is 1"),
        (BatchBounds(8, 10**7), 10**7 + 1, "valid are 1 to 10000000"),
        (BatchBounds(7, None, (2, 6)), 1, "valid are 2 and more"),
        (BatchBounds(7, None, (2, 6)), 0, "valid are 2 and more"),
    ],
)
def test_a_plan_for_an_invalid_count_raises_an_error_with_the_valid_counts(
    bounds: BatchBounds, replicas: int, message: str
) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(message)) as raised:
        plan_batch(bounds, replicas)
    assert len(str(raised.value)) < 300


# -- large numbers --------------------------------------------------------------------------------------

PRIME = 9_999_991


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "bounds",
    [
        BatchBounds(10**7, 10**7, (1, 10**7)),
        BatchBounds(10**7, None, (1, 1)),
        BatchBounds(PRIME),
        BatchBounds(PRIME, PRIME),
        BatchBounds(PRIME, PRIME + 1, (1, 3)),
        BatchBounds(PRIME, PRIME, (2, 5000)),
        BatchBounds(PRIME, None, (2, PRIME - 1)),
    ],
)
def test_large_bounds_are_planned_without_exhaustive_search(bounds: BatchBounds) -> None:
    """A hundred plans take a fraction of a second; trying all sizes for them would take minutes."""
    for replicas in [*range(1, 100), 10**6, 10**7]:
        if is_valid_replicas(bounds, replicas):
            plan = plan_batch(bounds, replicas, estimate=NOISY, throughput=lambda plan: 1 / plan.local_bsz)
            assert plan.global_bsz <= (bounds.max_batch_size or 10**9)


@pytest.mark.timeout(10)
def test_counts_above_the_bounds_are_not_examined() -> None:
    assert valid_replicas(BatchBounds(PRIME), 10**12) == [1, PRIME]
    assert valid_replicas(BatchBounds(200, 1000, (100, 200)), 10**12) == [*range(1, 11)]
    assert require_valid_replicas(BatchBounds(200, 1000, (100, 200)), 4, 10**12) == [*range(4, 11)]
    assert next(size for size in count(1) if len(valid_replicas(BatchBounds(size), size)) > 9) == 48
