"""Starts and stops the operator."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kubernetes.aio import client, config

from adascale_client import MetricsServiceClient
from adascale_controller.operator.apply.kubernetes_cluster import (
    MAX_RETRY_AFTER_OF_LEASE,
    ApiServerError,
    KubernetesCluster,
)
from adascale_controller.operator.runtime.certificate_keeper import CertificateKeeper, server_hosts
from adascale_controller.operator.runtime.control_loop import OperatorLoop
from adascale_controller.operator.runtime.health import Health, OperatorMetrics
from adascale_controller.operator.runtime.lease import Election
from adascale_controller.operator.runtime.object_cache import ObjectCache, run_informers, silence_event_logs
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core import names
from adascale_core.errors import UsageError

logger = logging.getLogger(__name__)

RETRY_INTERVAL = 3.0
"""Seconds between two tries to reach the API server at the start."""
GC_THRESHOLD = 50_000
"""Allocations between two collections of the youngest objects. With Python's 700, to collect the objects of a
thousand jobs again and again takes a third of the operator's processor time."""
SWITCH_INTERVAL = 0.001
"""Seconds that a thread which computes may keep the others waiting. The event loop waits in each system call
beside a decision or a read of all jobs: with the default, 5 ms, a cycle takes several times as long."""

_FINAL_STATUSES = frozenset({401, 403, 404})
"""HTTP statuses with which the API server rejects a call for good."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")


def run_operator(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT."""
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    logging.getLogger("adascale_controller").setLevel(logging.INFO)
    silence_event_logs()
    gc.set_threshold(GC_THRESHOLD)
    sys.setswitchinterval(SWITCH_INTERVAL)
    asyncio.run(_run(settings))


async def _run(settings: OperatorSettings) -> None:
    await _load_config()
    metrics = OperatorMetrics()
    health = Health(metrics)
    async with client.ApiClient() as api, health.serve(settings.liveness):
        await _run_until_signal(_run_as_leader(settings, api, health, metrics))


async def _run_as_leader(
    settings: OperatorSettings, api: client.ApiClient, health: Health, metrics: OperatorMetrics
) -> None:
    """Run once no other operator does."""
    if settings.lease_namespace is None:
        await _run_control_loop(settings, api, health, metrics)
        return
    # Not the calls of the control loop, which wait for each other while the API server is busy.
    cluster = KubernetesCluster(api, None, max_retry_after=MAX_RETRY_AFTER_OF_LEASE)
    place = (settings.lease_namespace, names.CONTROLLER)
    lease = Election(cluster, place, settings.identity)
    logger.info("Waiting for the lease")
    await lease.acquire()
    try:
        # The lease is renewed from the beginning: to list all objects of a large cluster may take long.
        await _until_one_ends(_run_control_loop(settings, api, health, metrics), lease.hold())
    finally:
        await lease.release()


async def _run_control_loop(
    settings: OperatorSettings, api: client.ApiClient, health: Health, metrics: OperatorMetrics
) -> None:
    """Run the informers and the control loop until one of them ends."""
    health.record_progress()
    cluster = KubernetesCluster(api, settings.namespace, metrics.count_api_request)
    cache = ObjectCache()
    certificates = await _certificates(settings, cluster, cache, health)
    ca_file = certificates.ca_file if certificates is not None else None
    service, reader = (
        MetricsServiceClient(settings.api_url, token_file=settings.token_file, ca_file=ca_file)
        for _ in range(2)
    )
    resources = await _retry(lambda: _watched_resources(settings, cluster), health)
    loop = OperatorLoop(
        *(cache, cluster, service, settings, resources),
        reader=reader,
        # The kubelet mounts the authority into them, and waits before it tries again.
        before_pods=certificates.publish_to if certificates is not None else None,
        metrics=metrics,
        on_progress=health.record_progress,
    )
    try:
        await _retry(loop.list_all, health)
    except ApiServerError as error:
        if error.status == 404:
            raise UsageError(
                f"the cluster has no resource {names.PLURAL}.{names.API_GROUP}: apply its "
                "CustomResourceDefinition with kubectl apply -f deploy/base/crd.yaml, which is a part of "
                "kubectl apply -k deploy"
            ) from error
        raise
    health.record_progress()
    metrics.leader.set(1)
    logger.info("Running in %s", settings.namespace or "all namespaces")
    try:
        await _until_one_ends(
            run_informers(cache, resources, settings),
            loop.run(),
            *([certificates.run()] if certificates is not None else []),
        )
    finally:
        if certificates is not None:
            certificates.close()
        service.close()
        reader.close()
    logger.info("Stopped")


async def _certificates(
    settings: OperatorSettings, cluster: KubernetesCluster, cache: ObjectCache, health: Health
) -> CertificateKeeper | None:
    """Return what keeps the certificates of the metrics service, once there are some. None without TLS."""
    if settings.tls_secret is None:
        return None
    keeper = CertificateKeeper(
        cluster,
        settings.tls_secret,
        server_hosts(settings.api_url, settings.url_in_pods),
        lambda: {namespace for namespace, _ in cache.keys(Resource.ADASCALEJOBS)},
        is_external=settings.tls_external,
    )
    await _retry(keeper.refresh, health)
    return keeper


async def _until_one_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one of them ends or fails, and cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watched_resources(settings: OperatorSettings, cluster: KubernetesCluster) -> list[Resource]:
    """Return the resources that the operator may watch."""
    resources = [Resource.ADASCALEJOBS, Resource.PODS]
    if settings.namespace is None and await cluster.may_list_nodes():
        return [*resources, Resource.NODES]
    logger.info("Not allowed to list nodes: free capacity is unknown and found out by trying")
    return resources


async def _retry(call: Callable[[], Awaitable[T]], health: Health) -> T:
    """Return the result of a call as soon as the API server answers it. An error is progress too."""
    while True:
        try:
            return await call()
        except ApiServerError as error:
            if error.status in _FINAL_STATUSES:
                raise
            logger.warning("%s; retrying", error)
        health.record_progress()
        await asyncio.sleep(RETRY_INTERVAL)


async def _run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Cancel the work at SIGTERM or SIGINT. Once kopf watches, it handles the signals itself."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logger.info("Stopped before the first cycle")
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _load_config() -> None:
    """Load the configuration of the pod, or else of a kubeconfig."""
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            await config.load_kube_config()
        except config.ConfigException as error:
            raise UsageError(
                f"no cluster is configured: not in a pod, and no valid kubeconfig ({error}); set KUBECONFIG"
            ) from error
