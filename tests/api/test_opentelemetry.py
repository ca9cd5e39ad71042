"""What a service sends to a collector of OpenTelemetry."""

from __future__ import annotations

import gzip
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from adascale_controller.local.service_process import STOP_TIMEOUT
from adascale_core.messages.registration import ReplicaState
from api.client import TOKEN, Client, ServiceProcess, a_heartbeat, a_registration, wait_until
from support.launch import free_port


class Collector(ThreadingHTTPServer):
    """Receives OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.seconds: dict[str, float] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        collector = self.server
        assert isinstance(collector, Collector)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
        else:
            for resource_metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource_metrics.scope_metrics:
                    for metric in scope.metrics:
                        assert metric.name == "adascale.replica.seconds"
                        collector.seconds |= {
                            point.attributes[0].value.string_value: point.as_double
                            for point in metric.sum.data_points
                        }
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running
        running.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def start(folder: Path, port: int) -> ServiceProcess:
    environ = {
        "ADASCALE_TOKEN": TOKEN,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    return ServiceProcess(folder, environ=environ, own_interpreter=True)


def test_generations_and_losses_are_spans_and_the_seconds_a_counter(
    tmp_path: Path, collector: Collector
) -> None:
    with start(tmp_path, collector.server_port) as service, Client(service.port) as client:
        client.put("/jobs/a/allocation", {"generation": 1, "replicas": 1})
        client.register("a", a_heartbeat(0, seconds={"starting": 2.0}))
        running = a_registration(0, ReplicaState.RUNNING, generation=1, assigned=1, stepped=1, replicas=1)
        client.register("a", running)
        lost = a_registration(0, ReplicaState.LOST, generation=1, assigned=1, stepped=1, exit_code=-9)
        client.register("a", lost)
        client.register("a", a_heartbeat(0, instance="agent-0.2", seconds={"starting": 2.0, "useful": 5.0}))
        wait_until(lambda: collector.named("generation"), "the span of the first generation")
        wait_until(lambda: collector.seconds.get("useful") == 5.0, "the seconds")
        client.put("/jobs/a/allocation", {"generation": 9, "replicas": 0})
        wait_until(lambda: len(collector.named("generation")) == 2, "the span of the second generation")
        assert service.stop() == 0
        assert "Traceback" not in service.log()
    first, second = collector.named("generation")
    (loss,) = collector.named("loss")
    assert attributes(first)["adascale.job"] == "default.a"
    assert attributes(first)["adascale.cause"] == "start"
    assert attributes(second)["adascale.cause"] == "disruption"
    assert attributes(second)["adascale.replicas"] == 1
    assert loss.parent_span_id == second.span_id
    assert first.start_time_unix_nano < first.end_time_unix_nano == loss.start_time_unix_nano
    assert loss.end_time_unix_nano == second.start_time_unix_nano < second.end_time_unix_nano


def test_a_collector_that_does_not_answer_delays_neither_the_service_nor_its_end(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], free_port()):
            with start(tmp_path, port) as service, Client(service.port) as client:
                client.register("a", a_heartbeat(0, seconds={"starting": 2.0}))
                assert client.get("/jobs/a/goodput")["replica_seconds"]["starting"] == 2.0
                # Its exporters would try for longer than the service has to end.
                service.send_signal(signal.SIGTERM)
                wait_until(lambda: service.code is not None, "the end", patience=3 * STOP_TIMEOUT)
                assert service.code == 0
