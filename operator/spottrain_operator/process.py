"""The operator as a process.

It starts and stops control API, lease, watches and passes in that order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import kopf
from aiohttp import web

from spottrain_operator.clock import SteadyClock
from spottrain_operator.cluster.client import ClusterError, ConflictError, JobKey
from spottrain_operator.cluster.history import HistoryKeeper
from spottrain_operator.cluster.kubernetes_client import KubernetesCluster, client_configuration
from spottrain_operator.cluster.leader_label import LeaderLabel
from spottrain_operator.cluster.lease import LeaderElection, LeaseSettings
from spottrain_operator.cluster.led_namespaces import LedNamespaces
from spottrain_operator.cluster.placement import Site
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.control_api.server import ControlApi
from spottrain_operator.controller import Controller, PassResult
from spottrain_operator.core.plan import plan
from spottrain_operator.handlers import NodeIndex, build_registry, build_settings
from spottrain_operator.metrics import Metrics
from spottrain_operator.reconcile import Reconciler
from spottrain_operator.tracing import ChangeTracer, processor_from_environment

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
# Until a namespace that isn't led may have got the labels for it.
NOT_LED_SECONDS = 30.0


class LeadershipLostError(Exception):
    """Another operator may lead now, so this process has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings of the process.

    - control_url: address at which agents reach the control API.
    - pod_labels: of the operator's pods, among which the leader's gets the leader's label. Empty: none gets it.
    - site: what the administrator says, for all jobs.
    """

    control_url: str
    lease: LeaseSettings
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    host: str = "0.0.0.0"
    port: int
    max_concurrent_passes: int = 8
    site: Site = Site()


class Operator:
    """Connects the parts and runs them until `stop` is set or the lease is lost."""

    def __init__(self, settings: OperatorSettings, cluster: KubernetesCluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._election = LeaderElection(cluster, settings.lease)
        self._namespaces = LedNamespaces(settings.lease.scope, cluster)
        self._label = LeaderLabel(
            cluster,
            namespace=settings.lease.namespace,
            pod=settings.lease.identity,
            labels=settings.pod_labels,
        )
        self._board = AssignmentBoard()
        self._clock = SteadyClock()
        self._reports = ReportBox(self._wake, now=self._clock)
        self._metrics = Metrics(num_agents=lambda: self._board.num_waiting)
        self._tracer = ChangeTracer(processor_from_environment())
        self._controller: Controller | None = None
        self._watching = asyncio.Event()

    def _wake(self, job: JobKey) -> None:
        if self._controller is not None:
            self._controller.wake(job)

    def _is_ready(self) -> bool:
        return self._election.is_leader and self._watching.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or SIGTERM comes, and everything has ended.

        Raises:
            LeadershipLostError: The lease is lost.
        """
        async with AsyncExitStack() as stack:
            await self._serve(stack)
            await _first_of(stop.wait(), self._acquire())
            if stop.is_set():
                return
            stack.push_async_callback(self._election.release)
            self._metrics.leader.set(1)
            label = asyncio.create_task(self._label.keep(), name="leader label")
            stack.callback(label.cancel)
            self._controller = self._build_controller()
            stack.push_async_callback(self._controller.stop)
            watches = await self._watch(stack, self._controller)
            await _first_of(stop.wait(), self._election.hold(), watches)
            # From here on kopf handles the signals: at SIGTERM its watches end without an error.
            if not self._election.is_leader:
                raise LeadershipLostError
        logger.info("stopped")

    async def _acquire(self) -> None:
        await self._label.drop()
        await self._election.acquire()

    async def _serve(self, stack: AsyncExitStack) -> None:
        api = ControlApi(
            reviewer=self._cluster,
            board=self._board,
            reports=self._reports,
            is_ready=self._is_ready,
            is_standby=lambda: self._election.is_standby,
            metrics=self._metrics.exposition,
            now=self._clock,
        )
        runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self._settings.host, self._settings.port).start()
        logger.info("control API on %s:%d", self._settings.host, self._settings.port)

    def _build_controller(self) -> Controller:
        reconciler = Reconciler(
            plan=plan,
            cluster=self._cluster,
            board=self._board,
            reports=self._reports,
            metrics=self._metrics,
            tracer=self._tracer,
            history=HistoryKeeper(self._cluster),
            control_url=self._settings.control_url,
            now=self._clock,
            site=self._settings.site,
        )

        async def measured(key: JobKey) -> PassResult:
            begun = time.perf_counter()
            try:
                if not await self._namespaces.leads(key.namespace):
                    return await self._leave(key)
                return await reconciler.reconcile(key)
            except ConflictError:
                self._metrics.reconcile_errors.labels("conflict").inc()
                raise
            except ClusterError:
                self._metrics.reconcile_errors.labels("cluster").inc()
                raise
            except Exception:
                self._metrics.reconcile_errors.labels("internal").inc()
                raise
            finally:
                self._metrics.reconcile_seconds.observe(time.perf_counter() - begun)

        return Controller(measured, max_concurrent=self._settings.max_concurrent_passes)

    async def _leave(self, key: JobKey) -> PassResult:
        """Leave the job to the release that leads its namespace, but look again if that may change."""
        gone = not self._namespaces.may_change or await self._cluster.get_job(key) is None
        return PassResult(requeue_after=NOT_LED_SECONDS, gone=gone)

    async def _watch(self, stack: AsyncExitStack, controller: Controller) -> asyncio.Task[None]:
        stop_watching = asyncio.Event()
        watches = asyncio.create_task(
            kopf.operator(
                registry=build_registry(controller, NodeIndex()),
                settings=build_settings(),
                standalone=True,
                clusterwide=True,
                stop_flag=stop_watching,
                ready_flag=self._watching,
            ),
            name="watches",
        )

        async def end() -> None:
            stop_watching.set()
            await asyncio.wait({watches}, timeout=STOP_SECONDS)
            watches.cancel()

        stack.push_async_callback(end)
        return watches


async def run_operator(settings: OperatorSettings, stop: asyncio.Event) -> None:
    """Run until `stop` is set.

    Raises:
        ClusterError: No cluster is configured.
        LeadershipLostError: The lease is lost, so this process has to end.
    """
    cluster = KubernetesCluster(client_configuration())
    try:
        await Operator(settings, cluster).run(stop)
    finally:
        cluster.close()


async def _first_of(*doing: Awaitable[object]) -> None:
    """Wait until one of them ends, cancel the others, and raise what that one raised."""
    tasks = [asyncio.ensure_future(each) for each in doing]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for task in done:
        task.result()
