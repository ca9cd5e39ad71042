"""What happens with a torch that does not have a private part, and with the parts on their own."""

import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adascale_worker import torch_private
from adascale_worker.torch_private import UnsupportedTorchError
from worker.adascale_problem import backward, network


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (torch_private.communication_hooks, "_comm_hooks"),
        (torch_private.is_in_join, "_join_config"),
        (torch_private.rebuild_buckets, "_push_all_rebuilt_params"),
        (torch_private.timed_backward_pass, "_get_ddp_logging_data"),
    ],
)
def test_a_missing_part_of_torch_raises_with_its_name_and_the_version(function: Any, missing: str) -> None:
    version = re.escape(torch.__version__)
    with pytest.raises(UnsupportedTorchError, match=rf"torch {version} has no `\w+\.{missing}`"):
        function(SimpleNamespace(reducer=SimpleNamespace()))


def test_the_exchange_of_gradients_is_timed() -> None:
    model = torch.nn.Linear(3, 3)
    ddp = DistributedDataParallel(model, process_group=torch_private.local_process_group())
    torch_private.set_timing_interval(ddp, 2)
    passes = []
    for _ in range(14):
        timed = torch_private.timed_backward_pass(ddp)
        passes.append(timed and timed[0])
        assert timed is None or 0 <= timed[1] < 60
        ddp(torch.ones(1, 3)).sum().backward()
    assert passes == [None, None, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 12]


def test_a_backward_pass_accumulates_and_grad_does_not() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    accumulates = []
    handle = weight.register_hook(lambda _: accumulates.append(torch_private.accumulates_gradient(weight)))
    backward((weight**2).sum())
    torch.autograd.grad((weight**2).sum(), [weight])
    assert accumulates == [True, False]
    torch_private.remove_tensor_hook(weight, handle)
    assert weight._backward_hooks is None


def test_callbacks_run_at_the_end_of_the_backward_pass_in_their_order() -> None:
    model, events = network(), list[str]()

    def hook(_: torch.Tensor) -> None:
        torch_private.call_at_end_of_backward(
            lambda: events.append(f"end of {torch_private.backward_pass_id()}")
        )
        events.append(f"gradient in {torch_private.backward_pass_id()}")

    for parameter in model.second.parameters():
        parameter.register_hook(hook)
    assert torch_private.backward_pass_id() == -1
    backward(model(torch.ones(1, 3, dtype=torch.float64)).sum())
    (number,) = {event.split()[-1] for event in events}
    assert events == [f"gradient in {number}"] * 2 + [f"end of {number}"] * 2


def test_a_store_is_served_on_a_socket_that_already_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listen_fd = os.dup(listener.fileno())  # the store closes it
        server = torch_private.tcp_store(
            "127.0.0.1", port, 2, is_master=True, listen_fd=listen_fd, timeout=timedelta(seconds=20)
        )
        client = torch_private.tcp_store(
            "127.0.0.1", port, 2, is_master=False, listen_fd=None, timeout=timedelta(seconds=20)
        )
        server.set("key", "value")
        assert client.get("key") == b"value"


def test_a_default_group_after_a_failed_formation_has_the_first_name_a_store_and_another_timeout() -> None:
    names = []
    for _ in range(2):
        torch_private.reset_group_names()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        names.append(dist.distributed_c10d._get_default_group().group_name)
        torch_private.set_collective_timeout(timedelta(seconds=20))
        torch_private.default_store().set("key", "value")
        assert torch_private.default_store().get("key") == b"value"
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
    found = torch_private.nccl_options(gpu, timeout)
    if uses_nccl2 == "0" or not hasattr(torch.distributed.ProcessGroupNCCL.Options, "lazy_init"):
        assert found == {}, "it does so by default"
        return
    options = found["pg_options"]
    assert (found["device_id"], options.lazy_init, options._timeout) == (gpu, True, timeout)


def test_norms_are_those_of_each_tensor() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[6.0], [8.0]])]
    assert torch_private.l2_norms(tensors) == [5.0, 10.0]
    assert torch_private.l2_norms([]) == []
    torch_private.divide_in_place(tensors, 2.0)
    assert torch_private.flatten_together(tensors).tolist() == [1.5, 2.0, 3.0, 4.0]


def test_no_other_module_uses_a_private_module_of_torch() -> None:
    package = Path(torch_private.__file__).parent
    users = [
        file.name
        for file in package.rglob("*.py")
        if re.search(r"\btorch(\.\w+)*\._[a-zA-Z]", file.read_text()) and file != Path(torch_private.__file__)
    ]
    assert users == []
