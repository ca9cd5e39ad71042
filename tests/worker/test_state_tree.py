"""Tests of state trees: every supported value comes back equal, and others are refused with their path."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adascale.errors import UnsupportedStateError
from adascale_worker.state.tree import MAX_DEPTH, InvalidSpecError, TensorIndex, flatten, layouts, unflatten


def same(left: Any, right: Any) -> bool:
    """Whether two trees have the same types and values; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        attributes = [(t.dtype, t.shape, t.requires_grad) for t in (left, right)]
        contents = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (left, right)]
        return attributes[0] == attributes[1] and torch.equal(*contents)
    if isinstance(left, (numpy.ndarray, numpy.generic)):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return (
            len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
            and all(same(left[a], right[b]) for a, b in zip(left, right, strict=True))
            and same(getattr(left, "__dict__", None), getattr(right, "__dict__", None))
        )
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def round_trip(tree: Any) -> Any:
    spec, tensors = flatten(tree)
    json.loads(spec)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors)
    described = [(layout.dtype, layout.shape) for layout in layouts(spec)]
    assert described == [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    received = [torch.empty(layout.shape, dtype=layout.dtype) for layout in layouts(spec)]
    for target, source in zip(received, tensors, strict=True):
        target.copy_(source)
    return unflatten(spec, received)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
NUMBERS = st.integers() | st.floats() | st.booleans() | st.complex_numbers(allow_nan=False)
KEYS = st.none() | st.integers() | st.text(max_size=5) | st.booleans() | st.tuples(st.integers(), st.text())
SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), SHAPES, st.sampled_from(DTYPES))
ARRAYS = st.builds(
    lambda shape, dtype: numpy.ones(shape, dtype=dtype),
    SHAPES,
    st.sampled_from(["f2", "f4", "f8", "i4", "i8", "u1", "u4", "?"]),
)
LEAVES = (
    st.none()
    | NUMBERS
    | st.text()
    | st.binary()
    | TENSORS
    | ARRAYS
    | st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 3])])
    | st.builds(numpy.float64, st.floats())
    | st.builds(numpy.int32, st.integers(-(2**31), 2**31 - 1))
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, children, max_size=4)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.builds(deque, st.lists(children, max_size=4), st.none() | st.integers(4, 9))
        | mappings
        | mappings.map(OrderedDict)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.lists(st.integers(0, 3)).map(Counter)
    )


@given(st.recursive(LEAVES, containers, max_leaves=20))
def test_every_supported_tree_comes_back_equal(tree: Any) -> None:
    assert same(round_trip(tree), tree)


def test_the_state_of_modules_and_optimizers_comes_back_equal() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.forward(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()}
    restored = round_trip(state)
    assert same(restored, state)
    assert vars(restored["model"]) == vars(state["model"]) != {}
    assert restored["model"]["0.weight"].stride() == state["model"]["0.weight"].stride()


def test_a_tensor_that_occurs_twice_is_listed_once_and_stays_one_tensor() -> None:
    weight = torch.ones(4)
    _, tensors = flatten({"encoder": weight, "decoder": weight, "part": weight[:2]})
    assert len(tensors) == 2
    restored = round_trip({"encoder": weight, "decoder": weight})
    assert restored["encoder"] is restored["decoder"]


def test_a_view_of_a_large_tensor_contains_only_its_own_elements() -> None:
    large = torch.arange(1000.0)
    _, tensors = flatten([large[10:12], large[::100], large[:1].expand(5)])
    assert [tensor.numel() for tensor in tensors] == [2, 10, 5]
    assert same(round_trip([large[::100]]), [large[::100]])


def test_flatten_shares_the_memory_of_tensors() -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    _, tensors = flatten({"weight": weight})
    assert tensors[0].data_ptr() == weight.data_ptr()


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("tree", "path", "problem"),
    [
        ({"layers": [1, object()]}, "['layers'][1]", "is of type object, which cannot be saved"),
        (Color.RED, "", "Color, which cannot be saved: use tensors"),
        ([Point(1, 2)], "[0]", "Point, which cannot be saved"),
        ({"d": defaultdict(int)}, "['d']", "is of type collections.defaultdict, which cannot be saved"),
        ({"f": lambda: 0}, "['f']", "is of type function"),
        ({(1, Color.RED): 0}, "the key (1, <Color.RED: 1>) of the state[1]", "Color"),
        ({torch.ones(1): 0}, "", "has a key of type torch.Tensor"),
        ([torch.ones(2).to_sparse()], "[0]", "is a tensor that cannot be saved (torch.sparse_coo"),
        ([torch.ones(2, device="meta")], "[0]", "on device meta"),
        ([numpy.array([object()])], "[0]", "is a numpy value of dtype object"),
        ([numpy.array(["text"])], "[0]", "is a numpy value of dtype <U4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_value_is_an_error_that_names_its_path_and_type(
    tree: Any, path: str, problem: str
) -> None:
    with pytest.raises(UnsupportedStateError) as raised:
        flatten(tree)
    assert raised.value.path == path
    assert problem in str(raised.value)


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<u2"])
def test_arrays_of_each_byte_order_come_back_in_that_of_the_machine(dtype: str) -> None:
    array = numpy.array([1, 2, 300], dtype=dtype)
    found = round_trip({"array": array, "scalar": array[2]})
    assert numpy.array_equal(found["array"], array)
    assert found["scalar"] == 300
    assert found["array"].dtype == array.dtype.newbyteorder("=")


def test_a_tree_that_contains_itself_is_an_error() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(UnsupportedStateError, match=f"more than {MAX_DEPTH} levels deep, or contains itself"):
        flatten(tree)


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"{",
        b"[]",
        b'{"tree": 1}',
        b'{"tree": {"tensor": 0}, "tensors": []}',
        b'{"tree": {"os.system": "true"}, "tensors": []}',
        b'{"tree": {}, "tensors": []}',
        b'{"tree": {"dtype": "load"}, "tensors": []}',
        b'{"tree": 1, "tensors": [["float32", [2]]]}',
        b'{"tree": 1, "tensors": [["save", [2]]]}',
        b'{"tree": 1, "tensors": 3}',
    ],
)
def test_an_invalid_spec_is_an_error(spec: bytes) -> None:
    with pytest.raises(InvalidSpecError):
        unflatten(spec, [])


def test_the_numbers_of_the_tensors_of_a_mapping() -> None:
    plain, image = torch.ones(3), torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
    tree = {
        "first": [torch.ones(1), torch.ones(2)],
        "program": {
            5: torch.ones(7),
            "model": OrderedDict(
                weight=plain,
                same=plain,
                image=image,
                array=numpy.ones(2),
                rate=0.5,
                parameter=nn.Parameter(torch.ones(2)),
                nested={"weight": torch.ones(4)},
                last=torch.ones(5),
            ),
        },
    }
    spec, tensors = flatten(tree)
    found = TensorIndex(spec).numbers
    numbers = {path[2]: number for path, number in found.items() if path[:2] == ("program", "model")}
    assert found["program", "model", "nested", "weight"] == numbers.pop("nested")
    assert set(numbers) == {"weight", "same", "last"}
    assert numbers["weight"] == numbers["same"]
    assert tensors[numbers["weight"]] is not tensors[numbers["last"]]
    assert tensors[numbers["last"]].numel() == 5
