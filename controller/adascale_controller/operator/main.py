"""Starts the operator and ends it in order."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kubernetes.aio import client, config

from adascale_client import MetricsServiceClient
from adascale_controller.operator.cluster import Cluster, ClusterError
from adascale_controller.operator.cycle import Controller
from adascale_controller.operator.health import Health
from adascale_controller.operator.lease import LeaseElection
from adascale_controller.operator.settings import OperatorSettings
from adascale_controller.operator.store import Kind, Store
from adascale_controller.operator.watching import quieten, watch
from adascale_core import names
from adascale_core.errors import AdaScaleError

logger = logging.getLogger(__name__)

RETRY = 3.0
"""Seconds between two tries to reach the API server when the operator starts."""

_REFUSED = frozenset({401, 403, 404})
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")


class NoClusterError(AdaScaleError):
    """There is nothing that says where the cluster is."""

    exit_code = 2


def run_operator(settings: OperatorSettings) -> None:
    """Run until asked to end.

    Raises:
        NoClusterError: nothing says where the cluster is.
        LeaseLostError: another operator may be at work by now.
    """
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    logging.getLogger("adascale_controller").setLevel(logging.INFO)
    quieten()
    asyncio.run(_run(settings))


async def _run(settings: OperatorSettings) -> None:
    await _load_config()
    health = Health()
    async with client.ApiClient() as api, health.served(settings.liveness):
        await _until_asked_to_leave(_lead(settings, api, health))


async def _lead(settings: OperatorSettings, api: client.ApiClient, health: Health) -> None:
    """Work as soon as no other operator does."""
    if settings.lease_namespace is None:
        await _work(settings, api, health, [])
        return
    lease = LeaseElection(api, settings.lease_namespace, names.CONTROLLER, settings.identity)
    logger.info("Waiting to be the only operator at work")
    await lease.acquire()
    try:
        await _work(settings, api, health, [lease.hold()])
    finally:
        await lease.release()


async def _work(
    settings: OperatorSettings,
    api: client.ApiClient,
    health: Health,
    besides: list[Coroutine[Any, Any, None]],
) -> None:
    """Work until asked to end, or until one of the parts ends."""
    cluster = Cluster(api, settings.namespace)
    service = MetricsServiceClient(settings.api_url, token_file=settings.token_file)
    store = Store()
    kinds = await _persistently(lambda: _kinds(settings, cluster))
    controller = Controller(store, cluster, service, settings, kinds, alive=health.beat)
    await _persistently(controller.list_all)
    logger.info("At work in %s", settings.namespace or "all namespaces")
    parts = [watch(store, kinds, settings), controller.run(), *besides]
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        service.close()
    logger.info("Leaving")


async def _kinds(settings: OperatorSettings, cluster: Cluster) -> list[Kind]:
    """What there is to watch, and may be."""
    kinds = [Kind.ADASCALEJOBS, Kind.JOBS, Kind.PODS]
    if settings.namespace is None and await cluster.may_list(Kind.NODES):
        return [*kinds, Kind.NODES]
    logger.info("Nodes may not be listed: what fits is found out by trying")
    return kinds


async def _persistently(call: Callable[[], Awaitable[T]]) -> T:
    """What a call answers, as soon as the API server lets it.

    Raises:
        ClusterError: it refuses for good.
    """
    while True:
        try:
            return await call()
        except ClusterError as error:
            if error.status in _REFUSED:
                raise
            logger.warning("%s; trying again", error)
        await asyncio.sleep(RETRY)


async def _until_asked_to_leave(work: Coroutine[Any, Any, None]) -> None:
    """Break work off at SIGTERM or SIGINT. Once kopf watches, it takes the signals, and ends in order."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logger.info("Leaving before the work has begun")
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _load_config() -> None:
    """Find the cluster: that of the pod, or that of a kubeconfig."""
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            await config.load_kube_config()
        except config.ConfigException as error:
            raise NoClusterError(
                f"there is no cluster: not in a pod, and no kubeconfig is right ({error}); set KUBECONFIG"
            ) from error
