"""The operator as a process that is terminated during its start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.api_server import write_kubeconfig
from support.launch import free_port, wait_until
from support.operator_process import OperatorProcess


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGTERM, []), (signal.SIGINT, ["--lease-namespace", "default"])],
    ids=["alone", "with a lease"],
)
def test_the_operator_stops_at_once_while_the_api_server_does_not_answer(
    number: int, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("none")
    kubeconfig = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{free_port()}")
    url = "http://127.0.0.1:1"
    operator = OperatorProcess(str(kubeconfig), url, tmp_path / "token", tmp_path, *options)
    wait_until(lambda: "does not answer" in operator.log or "Cannot connect" in operator.log, "a try")
    assert operator.stop(number) == 0, operator.log
    assert "Traceback" not in operator.log
