"""The capacity of nodes: a table of cases, and packings checked by an independent implementation."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.placement.capacity import NodeCapacity, ReplicaCapacity
from adascale_core.placement.packing import Demand, Node
from support.examples import examples

GPU = "nvidia.com/gpu"
ONE = Demand({GPU: 1})
TWO = Demand({GPU: 2})
FOUR = Demand({GPU: 4})
NO_GPU = Demand({"cpu": 1000})


def gpus(name: str, count: int) -> Node:
    return Node(name, {GPU: count, "cpu": 8000, "pods": 10})


def on(request: int, *names: str, one_node: bool = False, nodes: frozenset[str] | None = None) -> Demand:
    """Return a demand with replicas placed on the named nodes, by rank."""
    return Demand({GPU: request}, nodes, dict(enumerate(names)), one_node)


# -- a number of replicas -------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "fits"), [(5, True), (4, False), (0, False), (-1, False)])
def test_a_replica_capacity_holds_counts_up_to_its_total(total: int, fits: bool) -> None:
    capacity = ReplicaCapacity(total)
    assert capacity.fits({"a": 2, "b": 3}) is fits
    assert capacity.fits({})
    assert capacity.max_replicas("a") == capacity.total_for(["a", "b"]) == max(total, 0)


# -- nodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "demands", "counts", "fits"),
    [
        ([], {}, {}, True),
        # limited by the number of accelerators
        ([gpus("m", 2), gpus("n", 2)], {"a": ONE, "b": ONE}, {"a": 3, "b": 1}, True),
        ([gpus("m", 2), gpus("n", 2)], {"a": ONE, "b": ONE}, {"a": 3, "b": 2}, False),
        # the largest replicas are placed first
        ([gpus("m", 4), gpus("n", 4)], {"a": ONE, "b": FOUR}, {"a": 4, "b": 1}, True),
        ([gpus("m", 4), gpus("n", 4)], {"a": ONE, "b": FOUR}, {"a": 5, "b": 1}, False),
        # unless smaller replicas are placed already
        ([gpus("m", 4), gpus("n", 4)], {"a": on(1, "m", "n"), "b": FOUR}, {"a": 1, "b": 1}, True),
        ([gpus("m", 4), gpus("n", 4)], {"a": on(1, "m", "n"), "b": FOUR}, {"a": 2, "b": 1}, False),
        # every requested resource limits the count
        ([gpus("m", 1)], {"a": Demand({"cpu": 3000})}, {"a": 3}, False),
        ([gpus("m", 4)], {"a": Demand({GPU: 1, "cpu": 4000})}, {"a": 3}, False),
        ([gpus("m", 4)], {"a": Demand({"memory": 1})}, {"a": 1}, False),
        # a replica without requests takes a pod
        ([gpus("m", 1)], {"a": Demand({})}, {"a": 10}, True),
        ([gpus("m", 1)], {"a": Demand({})}, {"a": 11}, False),
        ([gpus("m", 1)], {"a": Demand({"pods": 0})}, {"a": 11}, False),
        ([Node("m", {"cpu": 8000})], {"a": NO_GPU}, {"a": 1}, False),
        # replicas without accelerators avoid the nodes with accelerators
        (
            [gpus("m", 8), Node("n", {"cpu": 8000, "pods": 10})],
            {"a": Demand({"cpu": 4000}), "b": Demand({GPU: 1, "cpu": 1000})},
            {"a": 2, "b": 8},
            True,
        ),
        # only on eligible nodes
        (
            [gpus("m", 2), gpus("n", 2)],
            {"a": ONE, "b": Demand({GPU: 1}, frozenset("m"))},
            {"a": 2, "b": 2},
            True,
        ),
        # placed replicas stay on a node with less than their requests, and no others are placed there
        ([gpus("m", -1)], {"a": on(1, "m"), "b": ONE}, {"a": 1, "b": 1}, False),
        # jobs that need a single node
        (
            [gpus("m", 4), gpus("n", 4)],
            {"a": ONE, "b": Demand({GPU: 1}, one_node=True)},
            {"a": 4, "b": 4},
            True,
        ),
        (
            [gpus("m", 4), gpus("n", 4)],
            {"a": on(1, "m", "n"), "b": Demand({GPU: 1}, one_node=True)},
            {"a": 2, "b": 4},
            False,
        ),
    ],
)
def test_which_counts_fit_on_nodes(
    nodes: Sequence[Node], demands: Mapping[str, Demand], counts: Mapping[str, int], fits: bool
) -> None:
    assert NodeCapacity(nodes, demands).fits(counts) is fits


@pytest.mark.parametrize(
    ("demands", "number"),
    [
        ({}, 0),
        ({"a": ONE}, 6),
        ({"a": TWO}, 2),
        ({"a": Demand({GPU: 1}, one_node=True)}, 3),
        ({"a": on(1, "m"), "b": ONE}, 6),
        ({"a": TWO, "b": TWO}, 2),
        # the node that is not eligible has no accelerators
        ({"a": Demand({GPU: 1}, frozenset("mn")), "b": ONE}, 6),
        # capacities that are not a number
        ({"a": ONE, "b": TWO}, None),
        ({"a": ONE, "b": Demand({GPU: 1}, frozenset("m"))}, None),
        ({"a": ONE, "b": Demand({GPU: 1}, one_node=True)}, None),
        ({"a": on(1, "empty"), "b": ONE}, None),
        ({"a": on(1, *"mmmm"), "b": ONE}, None),
        ({"a": on(1, "deleted"), "b": ONE}, 6),
    ],
)
def test_the_capacity_for_equal_replicas_is_a_number(
    demands: Mapping[str, Demand], number: int | None
) -> None:
    capacity = NodeCapacity([gpus("m", 3), gpus("n", 3), gpus("empty", 0)], demands)
    assert capacity.total_for(list(demands)) == number


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        (4, {(1, 4): 16, (1, 8): 16}),
        (16, {(1, 4): 36, (2, 4): 24, (1, 12): 44}),
        (5, {(1, 4): 20, (1, 8): 20}),
        (3, {(4, 16): 3, (2, 8): 3, (1, 12): 6}),
    ],
)
def test_unlike_replicas_that_use_every_resource_of_every_node_fit(
    nodes: int, kinds: dict[tuple[int, int], int]
) -> None:
    """First fit would fill the first nodes with one kind, and leave the rest of their resources unused."""
    all_nodes = [Node(f"node-{i}", {GPU: 8, "cpu": 48, "pods": 100}) for i in range(nodes)]
    demands = {f"job-{kind}": Demand({GPU: kind[0], "cpu": kind[1]}) for kind in kinds}
    counts = {f"job-{kind}": number for kind, number in kinds.items()}
    packing = NodeCapacity(all_nodes, demands).pack(counts)
    assert packing is not None
    assert packing.counts == counts
    assert fits_together(all_nodes, demands, packing.placements)
    assert NodeCapacity(all_nodes[1:], demands).pack(counts) is None


def test_a_resize_that_does_not_fit_changes_nothing() -> None:
    packing = NodeCapacity([gpus("m", 2)], {"a": ONE, "b": ONE}).packing()
    assert packing.resize("a", 1)
    assert not packing.resize("b", 2)
    assert packing.counts == {"a": 1}
    assert packing.resize("a", 0)
    assert packing.resize("b", 2)
    assert packing.placements == {"b": {0: "m", 1: "m"}}


def test_a_resize_packs_all_jobs_again_if_the_job_does_not_fit_otherwise() -> None:
    packing = NodeCapacity([gpus("m", 4), gpus("n", 4)], {"a": ONE, "b": on(1, "m", "m", "m", "m")}).packing()
    assert packing.resize("a", 4)
    assert set(packing.placements["a"].values()) == {"m"}
    assert packing.resize("b", 4)
    assert set(packing.placements["a"].values()) == {"n"}


# -- properties -----------------------------------------------------------------------------------------

NAMES = ["m", "n", "o"]
units = st.integers(-1, 5)
node_sets = st.none() | st.frozensets(st.sampled_from(NAMES))
placements = st.dictionaries(st.integers(0, 3), st.sampled_from([*NAMES, "deleted"]), max_size=3)
demands_of_any = st.builds(
    Demand,
    request=st.fixed_dictionaries({GPU: st.integers(0, 3)}, optional={"cpu": st.integers(0, 3)}),
    nodes=node_sets,
    placed=placements,
    one_node=st.booleans(),
)
some_nodes = st.lists(
    st.builds(
        lambda name, gpu, cpu, pods: Node(name, {GPU: gpu, "cpu": cpu, "pods": pods}),
        st.sampled_from(NAMES),
        units,
        units,
        st.integers(0, 6),
    ),
    max_size=3,
    unique_by=lambda node: node.name,
)
several_demands = st.lists(demands_of_any, max_size=3).map(lambda each: dict(zip("abc", each, strict=False)))
some_counts = st.fixed_dictionaries({name: st.integers(0, 3) for name in "abc"})
Placements = Mapping[str, Mapping[int, str]]


def counts_of(demands: Mapping[str, Demand], counts: Mapping[str, int]) -> dict[str, int]:
    return {job: counts[job] for job in demands}


def fits_together(nodes: Sequence[Node], demands: Mapping[str, Demand], places: Placements) -> bool:
    """Whether no new replica is on a node whose resources are exceeded."""
    for node in nodes:
        here = [
            (dict(demands[job].request) | {"pods": 1}, demands[job].placed.get(rank) != node.name)
            for job, ranks in places.items()
            for rank, name in ranks.items()
            if name == node.name
        ]
        for resource in (GPU, "cpu", "pods"):
            requested = [(request.get(resource, 0), new) for request, new in here]
            exceeded = sum(units for units, _ in requested) > node.free.get(resource, 0)
            if exceeded and any(new and units for units, new in requested):
                return False
    return True


def placed_on(nodes: Sequence[Node], demand: Demand) -> dict[int, str]:
    return {rank: name for rank, name in demand.placed.items() if name in {node.name for node in nodes}}


def allowed(nodes: Sequence[Node], demand: Demand) -> set[str]:
    """Return the names of the nodes on which a new replica may be placed."""
    names = {node.name for node in nodes if demand.nodes is None or node.name in demand.nodes}
    placed = placed_on(nodes, demand)
    if demand.one_node and placed:
        tally = Counter(placed[rank] for rank in sorted(placed))
        names &= {tally.most_common(1)[0][0]}
    return names


def check(
    nodes: Sequence[Node], demands: Mapping[str, Demand], counts: Mapping[str, int], places: Placements
) -> None:
    assert {job: set(ranks) for job, ranks in places.items()} == {
        job: set(range(count)) for job, count in counts.items() if count
    }
    for job, ranks in places.items():
        placed = placed_on(nodes, demands[job])
        new = {rank: name for rank, name in ranks.items() if placed.get(rank) != name}
        assert not set(new) & set(placed), "placed replicas stay"
        assert set(new.values()) <= allowed(nodes, demands[job])
        assert not demands[job].one_node or len(set(new.values())) <= 1
    assert fits_together(nodes, demands, places)


def possible(nodes: Sequence[Node], demands: Mapping[str, Demand], counts: Mapping[str, int]) -> bool:
    """Whether a packing exists, by exhaustive search."""

    def searches(rest: list[tuple[str, int]], places: dict[str, dict[int, str]]) -> Iterator[bool]:
        if not rest:
            yield fits_together(nodes, demands, places)
            return
        (job, rank), *others = rest
        demand = demands[job]
        placed = placed_on(nodes, demand)
        if rank in placed:
            names = {placed[rank]}
        else:
            names = allowed(nodes, demand)
            new = {name for placed_rank, name in places[job].items() if placed_rank not in placed}
            if demand.one_node and new:
                names &= new
        for name in sorted(names):
            yield from searches(others, {**places, job: {**places[job], rank: name}})

    return any(
        searches(
            [(job, rank) for job, count in counts.items() for rank in range(count)],
            {job: {} for job in counts},
        )
    )


@given(some_nodes, several_demands, some_counts)
def test_a_packing_does_not_exceed_the_free_resources_of_a_node(
    nodes: Sequence[Node], demands: Mapping[str, Demand], counts: Mapping[str, int]
) -> None:
    counts = counts_of(demands, counts)
    packing = NodeCapacity(nodes, demands).pack(counts)
    if packing is not None:
        check(nodes, demands, counts, packing.placements)


@given(
    some_nodes, several_demands, st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=8)
)
def test_a_packing_is_valid_after_every_resize(
    nodes: Sequence[Node], demands: Mapping[str, Demand], changes: Sequence[tuple[str, int]]
) -> None:
    packing = NodeCapacity(nodes, demands).packing()
    for job, count in changes:
        if job not in demands:
            continue
        before, places = packing.counts, packing.placements
        if packing.resize(job, count):
            assert packing.counts.get(job, 0) == count
        else:
            assert packing.counts == before
            assert packing.placements == places
        check(nodes, demands, packing.counts, packing.placements)


@given(some_nodes, st.builds(dict, a=demands_of_any), st.integers(0, 4))
def test_a_single_job_fits_if_any_packing_exists(
    nodes: Sequence[Node], demands: Mapping[str, Demand], count: int
) -> None:
    capacity = NodeCapacity(nodes, demands)
    assert (
        capacity.fits({"a": count})
        == possible(nodes, demands, {"a": count})
        == (count <= capacity.max_replicas("a"))
    )
    assert capacity.total_for(["a"]) == capacity.max_replicas("a")


@st.composite
def equal_demands(draw: st.DrawFn) -> dict[str, Demand]:
    size, names = draw(st.integers(1, 2)), draw(node_sets)
    return {job: Demand({GPU: size}, names, draw(placements)) for job in "abc"[: draw(st.integers(1, 3))]}


@given(some_nodes, equal_demands(), some_counts)
@settings(max_examples=examples(50))
def test_equal_replicas_fit_if_any_packing_exists(
    nodes: Sequence[Node], demands: Mapping[str, Demand], counts: Mapping[str, int]
) -> None:
    nodes = [Node(node.name, {GPU: node.free[GPU], "pods": 100}) for node in nodes]
    counts = counts_of(demands, counts)
    capacity = NodeCapacity(nodes, demands)
    assert capacity.fits(counts) == possible(nodes, demands, counts)
    number = capacity.total_for(list(demands))
    if number is not None:
        assert capacity.fits(counts) == (sum(counts.values()) <= number)


@given(some_nodes, several_demands)
def test_placed_replicas_fit(nodes: Sequence[Node], demands: Mapping[str, Demand]) -> None:
    counts = {}
    for job, demand in demands.items():
        placed = placed_on(nodes, demand)
        counts[job] = next(rank for rank in range(9) if rank not in placed)
    assert NodeCapacity(nodes, demands).fits(counts)


@given(some_nodes, several_demands, some_counts)
def test_the_packing_does_not_depend_on_the_order_of_nodes_and_jobs(
    nodes: Sequence[Node], demands: Mapping[str, Demand], counts: Mapping[str, int]
) -> None:
    counts = counts_of(demands, counts)
    packing = NodeCapacity(nodes, demands).pack(counts)
    backwards = dict(reversed(list(demands.items())))
    other = NodeCapacity(list(reversed(nodes)), backwards).pack({job: counts[job] for job in backwards})
    assert (packing and packing.placements) == (other and other.placements)


@given(
    some_nodes,
    st.lists(several_demands, min_size=2, max_size=4),
    some_counts,
    st.sets(st.sampled_from("abc")),
)
def test_the_packing_does_not_depend_on_the_problems_before(
    nodes: Sequence[Node],
    problems: Sequence[Mapping[str, Demand]],
    counts: Mapping[str, int],
    unchanged: Set[str],
) -> None:
    capacity = None
    demands: dict[str, Demand] = {}
    for changed in problems:
        demands = {**changed, **{job: demands[job] for job in unchanged if job in demands}}
        wanted = counts_of(demands, counts)
        capacity = NodeCapacity(nodes, demands, capacity)
        packing, fresh = capacity.pack(wanted), NodeCapacity(nodes, demands).pack(wanted)
        assert (packing and packing.placements) == (fresh and fresh.placements)
