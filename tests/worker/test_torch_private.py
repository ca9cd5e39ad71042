"""What happens with a torch that does not have a private part, and with the parts on their own."""

import ast
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adascale.errors import UnsupportedTorchError
from adascale_worker.torch_private import autograd, distributed, modules
from adascale_worker.torch_private.autograd import divide_in_place, flatten_together, norms_of
from worker.adascale_problem import backward, network

ROOT = Path(__file__).parents[2]
TORCH_PRIVATE = Path(autograd.__file__).parent
OF_THE_STANDARD_LIBRARY = {"_exit", "_getframe", "_current_frames"}


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (modules.communication_hooks, "_comm_hooks"),
        (distributed.is_in_join, "_join_config"),
    ],
)
def test_a_missing_part_of_torch_raises_with_its_name_and_the_version(function: Any, missing: str) -> None:
    version = re.escape(torch.__version__)
    with pytest.raises(UnsupportedTorchError, match=rf"torch {version} has no `\w+\.{missing}`"):
        function(SimpleNamespace(reducer=SimpleNamespace()))


def test_a_backward_pass_accumulates_and_grad_does_not() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    accumulates = []
    handle = weight.register_hook(lambda _: accumulates.append(autograd.accumulates_gradient(weight)))
    backward((weight**2).sum())
    torch.autograd.grad((weight**2).sum(), [weight])
    assert accumulates == [True, False]
    autograd.remove_tensor_hook(weight, handle)
    assert weight._backward_hooks is None


def test_callbacks_run_at_the_end_of_the_backward_pass_in_their_order() -> None:
    model, events = network(), list[str]()

    def hook(_: torch.Tensor) -> None:
        autograd.call_at_end_of_backward(lambda: events.append(f"end of {autograd.backward_pass_id()}"))
        events.append(f"gradient in {autograd.backward_pass_id()}")

    for parameter in model.second.parameters():
        parameter.register_hook(hook)
    assert autograd.backward_pass_id() == -1
    backward(model(torch.ones(1, 3, dtype=torch.float64)).sum())
    (number,) = {event.split()[-1] for event in events}
    assert events == [f"gradient in {number}"] * 2 + [f"end of {number}"] * 2


def test_a_default_group_after_a_failed_formation_has_the_first_name_a_store_and_another_timeout() -> None:
    names = []
    for _ in range(2):
        distributed.reset_group_names()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        names.append(dist.distributed_c10d._get_default_group().group_name)
        distributed.set_timeout_of(dist.distributed_c10d._get_default_group(), timedelta(seconds=20))
        distributed.default_store().set("key", "value")
        assert distributed.default_store().get("key") == b"value"
        dist.destroy_process_group()
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo",
                store=dist.HashStore(),  # type: ignore[attr-defined]
                rank=0,
                world_size=2,
                timeout=timedelta(seconds=0.1),
            )
    assert names[0] == names[1]


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="needs a torch with NCCL")
@pytest.mark.parametrize("uses_nccl2", ["1", "0"])
def test_nccl_connects_at_the_first_collective_on_the_gpu_of_the_replica(
    uses_nccl2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", uses_nccl2)
    gpu, timeout = torch.device("cuda", 3), timedelta(seconds=20)
    found = distributed.nccl_options(gpu, timeout)
    if uses_nccl2 == "0" or not hasattr(torch.distributed.ProcessGroupNCCL.Options, "lazy_init"):
        assert found == {}, "it does so by default"
        return
    options = found["pg_options"]
    assert (found["device_id"], options.lazy_init, options._timeout) == (gpu, True, timeout)


def test_norms_are_those_of_each_tensor() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[6.0], [8.0]])]
    assert norms_of(tensors, 2) == [5.0, 10.0]
    assert norms_of([], 2) == []
    divide_in_place(tensors, 2.0)
    assert flatten_together(tensors).tolist() == [1.5, 2.0, 3.0, 4.0]


def test_no_other_module_uses_a_private_part_of_torch() -> None:
    private = {name for file in TORCH_PRIVATE.glob("*.py") for name in _private_names_of_torch(file)}
    assert {"_current_graph_task_id", "_milestones", "_last_lr", "_version"} <= private
    parts = [ROOT / part / f"adascale_{part}" for part in ("core", "client", "worker", "api", "controller")]
    product = [file for part in parts for file in part.rglob("*.py") if file.parent != TORCH_PRIVATE]
    assert len(product) > 200
    assert [found for file in product for found in _uses(file, private)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("scheduler._milestones[-1]", "_milestones"),
        ("scheduler._last_lr = []", "_last_lr"),
        ("getattr(scheduler, '_schedulers')", "_schedulers"),
        ("state.pop('_last_lr')", "_last_lr"),
        ("from torch.distributed import _tensor", "torch.distributed._tensor"),
        ("from torch._C import Node", "torch._C.Node"),
        ("import torch._dynamo", "torch._dynamo"),
        ("optimizer._undeclared_part()", "_undeclared_part"),
        ("self._last_lr = self._own", None),
        ("os._exit(1)", None),
    ],
)
def test_each_kind_of_use_is_found(line: str, found: str | None, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        f"class Own:\n    def _defined_here(self):\n        {line}\n        self.other._defined_here()\n"
    )
    uses = _uses(file, {"_milestones", "_last_lr", "_schedulers"})
    assert uses == ([] if found is None else [f"module.py:3: {found}"])


def _private_names_of_torch(file: Path) -> set[str]:
    """Return the private names that a module of `torch_private` mentions and does not define."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    return {name for _, name in _mentions(nodes)} - _defined(nodes)


def _uses(file: Path, private: set[str]) -> list[str]:
    """Return where a file mentions a name of `private`, or uses one that torch or another object may have.

    That is an import of a private module of torch, and a private attribute that the file does not define.
    """
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    allowed = _defined(nodes) | OF_THE_STANDARD_LIBRARY
    found = [(line, name) for line, name in _mentions(nodes) if name in private]
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private_attribute(node) and node.attr not in allowed:
            found.append((node.lineno, node.attr))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + alias.name for alias in node.names]
            found.extend((node.lineno, name) for name in names if re.match(r"torch\..*\b_", name))
    return [f"{file.name}:{line}: {name}" for line, name in sorted(set(found))]


def _mentions(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private attribute, and of each string that is a private name."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private_attribute(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
            yield node.lineno, node.value


def _is_private_attribute(node: ast.Attribute) -> bool:
    """Whether the attribute is private and of another object than the one whose method this is."""
    return _is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls", "super()")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def _defined(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of functions, classes, fields and attributes of `self` that a file defines."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names
