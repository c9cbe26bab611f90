"""The operator as a process.

It starts and stops control API, lease, watches and passes in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from spottrain_api.contract.names import HEALTH_PORT, METRICS_PORT
from spottrain_operator.clock import FAR_OFF, SteadyClock
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.control_api.certificate_keeper import CertificateKeeper, CertificateSource
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.control_api.observability import health_application, metrics_application
from spottrain_operator.control_api.server import ControlApi
from spottrain_operator.control_api.sockets import Port, keep_tls_buffers_small
from spottrain_operator.controller import Controller, PassResult, Priority, Published
from spottrain_operator.core.plan import plan
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing
from spottrain_operator.heap import keep_trimmed
from spottrain_operator.kube.cache import Change
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.election_thread import ElectionThread
from spottrain_operator.kube.errors import ClusterError, ConflictError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.kopf_watch import watch_jobs
from spottrain_operator.kube.kubernetes_cluster import KubernetesCluster
from spottrain_operator.kube.leader_label import LeaderLabel
from spottrain_operator.kube.lease import LeaderElection, LeaseSettings
from spottrain_operator.kube.led_namespaces import LedNamespaces
from spottrain_operator.kube.limits import ClientLimits
from spottrain_operator.kube.resources import JOBS, NODE_POOLS, WORKLOADS, Resource
from spottrain_operator.metrics import Metrics
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.definitions import warn_of_other_definitions
from spottrain_operator.objects.history import HistoryKeeper
from spottrain_operator.objects.isolation import Isolation
from spottrain_operator.objects.placement import Site
from spottrain_operator.objects.watched_cluster import Watch, WatchedCluster
from spottrain_operator.reconcile import Reconciler
from spottrain_operator.tracing import ChangeTracer, processor_from_environment
from spottrain_operator.wakes import first_wakes, wakes

logger = logging.getLogger(__name__)

# How long agents are kept out at most while a new operator decides on their jobs.
FIRST_PASSES_SECONDS = 15.0
# Between two looks at whether the clock is far off.
CLOCK_SECONDS = 1.0
# Until a namespace that isn't led may have got the labels for it.
NOT_LED_SECONDS = 30.0
ANY_ADDRESS = ("0.0.0.0", "::")


# The history is written once for so many records of progress.
RECORDS_PER_HISTORY = 10


class LeadershipLostError(Exception):
    """Another operator may lead now, so this process has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings of the process.

    Attributes:
        control_url: Address at which agents reach the control API.
        pod_labels: Of the operator's pods, among which the leader's gets the leader's label. Empty: none gets it.
        host, port: Where the control API listens. The other ports are on the same host.
        certificate: Who makes the certificate of the control API.
        metrics_token_file: Holds the token that /metrics asks for, over TLS. None: anybody may read it.
        site: What the administrator says, for all jobs.
        limits: Of the requests to the API server.
        timing: The durations that decisions depend on.
    """

    control_url: str
    lease: LeaseSettings
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    host: str = "0.0.0.0"
    port: int
    certificate: CertificateSource = CertificateSource.OPERATOR
    health_port: int = HEALTH_PORT
    metrics_port: int = METRICS_PORT
    metrics_token_file: Path | None = None
    site: Site = Site()
    limits: ClientLimits = ClientLimits()
    timing: Timing = DEFAULT_TIMING


class Operator:
    """Connects the parts and runs them until `stop` is set or the lease is lost."""

    def __init__(
        self,
        settings: OperatorSettings,
        cluster: Cluster,
        keys: ClusterKeys,
        election: LeaderElection | ElectionThread,
        *,
        watch_jobs: Watch | None = None,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._keys = keys
        self._watched = WatchedCluster(
            cluster, self._on_change, watch_jobs=watch_jobs, optional=_optional(settings.site)
        )
        self._election = election
        self._namespaces = LedNamespaces(settings.lease.scope, cluster)
        self._label = LeaderLabel(
            cluster,
            namespace=settings.lease.namespace,
            pod=settings.lease.identity,
            labels=settings.pod_labels,
        )
        self._board = AssignmentBoard()
        self._clock = SteadyClock()
        self._reports = ReportBox(self._wake, now=self._clock, without_relay=settings.timing.without_relay)
        self._metrics = Metrics(
            num_agents=lambda: self._reports.num_present,
            leads=lambda: self._controller is not None,
            last_contact=self._reports.last_contact,
        )
        self._tracer = ChangeTracer(processor_from_environment())
        self._controller: Controller | None = None
        self._listening_since: datetime | None = None
        self._synced = asyncio.Event()
        self._certificates = CertificateKeeper(
            cluster,
            namespace=settings.lease.namespace,
            source=settings.certificate,
            hosts=_hosts(settings),
            may_write=lambda: self._election.is_leader,
            now=lambda: datetime.now(UTC),
        )

    def _control(self) -> ControlAddress:
        """What new pods are given now."""
        return ControlAddress(url=self._settings.control_url, ca=self._certificates.ca)

    def _trust_changed(self) -> None:
        if self._controller is not None:
            self._controller.wake_all()

    def _wake(self, job: JobKey, *, urgent: bool) -> None:
        if self._controller is not None:
            self._controller.wake(job, Priority.URGENT if urgent else Priority.NORMAL)

    def _on_change(self, resource: Resource, change: Change) -> None:
        if self._controller is not None:
            for job, priority in wakes(resource, change, self._watched.jobs_on):
                self._controller.wake(job, priority)

    def _is_ready(self) -> bool:
        return self._election.is_leader and self._is_prepared()

    def _is_probed_ready(self, control: Port) -> bool:
        """Whether Kubernetes may count on this process: it leads, or can take over."""
        return (self._is_ready() and control.is_open) or self._election.is_standby

    def _is_prepared(self) -> bool:
        """Whether passes can be made.

        Before the first lists, jobs would seem to have no pods. Without a certificate, new pods would trust nobody.
        """
        return self._synced.is_set() and self._certificates.opened.is_set()

    async def _prepared(self) -> None:
        await self._synced.wait()
        await self._certificates.opened.wait()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or SIGTERM comes, and everything has ended.

        Raises:
            LeadershipLostError: The lease is lost.
        """
        async with AsyncExitStack() as stack:
            trimming = asyncio.create_task(keep_trimmed(), name="heap")
            stack.callback(trimming.cancel)
            control = await self._serve(stack)
            await _first_of(stop.wait(), self._acquire())
            if stop.is_set():
                return
            stack.push_async_callback(self._election.release)
            following = asyncio.create_task(self._watched.follow(self._synced), name="watches")
            stack.push_async_callback(_end, following)
            await _first_of(stop.wait(), self._election.hold(), asyncio.shield(following), self._prepared())
            if self._is_prepared():
                comparing = asyncio.create_task(warn_of_other_definitions(self._cluster), name="CRDs")
                stack.push_async_callback(_end, comparing)
            while self._is_prepared() and self._election.is_leader and not stop.is_set():
                await self._act(control, stop, following)
                if not stop.is_set():
                    await _first_of(stop.wait(), self._election.regain(), asyncio.shield(following))
            if not self._election.is_leader and not stop.is_set():
                raise LeadershipLostError
        logger.info("stopped")

    async def _act(self, control: Port, stop: asyncio.Event, following: asyncio.Task[None]) -> None:
        """Make passes as long as this process leads, and its clock isn't far off.

        A leader that can't renew its lease stops at once, and is not ready, because another may lead. If it leads on
        later, it begins as a new operator does: what it knew of the agents is old by then. So does one whose clock
        is far off: it can't compare earlier times with later ones, and may have been suspended while another led.

        Agents are kept out until the first passes have decided on their jobs: nobody could tell them anything before,
        and with a thousand jobs, the operator would do little but refuse them. Until then, none counts as silent.
        """
        self._listening_since = None
        self._reports.shift(self._clock.set())
        self._controller = controller = self._build_controller()
        label = asyncio.create_task(self._label.keep(), name="leader label")
        holding = asyncio.create_task(self._election.hold(), name="lease")
        try:
            deciding = self._first_passes(controller)
            await _first_of(stop.wait(), asyncio.shield(holding), asyncio.shield(following), deciding)
            if self._election.is_leader and not stop.is_set():
                await control.open()
                self._listening_since = self._clock()
                far_off = self._until_clock_is_far_off()
                await _first_of(stop.wait(), asyncio.shield(holding), asyncio.shield(following), far_off)
        finally:
            holding.cancel()
            label.cancel()
            self._controller = None
            await controller.stop()

    async def _until_clock_is_far_off(self) -> None:
        while abs(off := self._clock.off) <= FAR_OFF:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(CLOCK_SECONDS)
        logger.warning(
            "the clock was set by %+.0f s, or the machine was suspended; this operator begins anew",
            off.total_seconds(),
        )

    async def _acquire(self) -> None:
        await self._label.drop()
        await self._election.acquire()

    async def _serve(self, stack: AsyncExitStack) -> Port:
        """Serve probes and metrics, and take the port of the control API.

        That one is closed until this process can answer agents. Otherwise each agent would shake hands once a second
        to be refused.
        """
        api = ControlApi(
            cluster=self._cluster,
            keys=self._keys,
            board=self._board,
            reports=self._reports,
            is_ready=self._is_ready,
            now=self._clock,
            record_interval=self._settings.timing.record_interval,
        )
        settings, tls = self._settings, self._certificates.context
        keep_tls_buffers_small()
        keeping = asyncio.create_task(self._certificates.run(self._trust_changed), name="certificates")
        stack.callback(keeping.cancel)
        control = self._port(stack, "control API", api.application(), settings.port, tls)
        metrics = metrics_application(self._metrics.exposition, settings.metrics_token_file)
        probes = health_application(lambda: self._is_probed_ready(control))
        for port in (
            self._port(stack, "probes", probes, settings.health_port),
            self._port(
                stack, "metrics", metrics, settings.metrics_port, tls if settings.metrics_token_file else None
            ),
        ):
            await port.open()
        return control

    def _port(
        self,
        stack: AsyncExitStack,
        name: str,
        application: web.Application,
        number: int,
        tls: ssl.SSLContext | None = None,
    ) -> Port:
        port = Port(name, application, self._settings.host, number, tls)
        stack.push_async_callback(port.close)
        return port

    def _build_controller(self) -> Controller:
        reconciler = Reconciler(
            plan=plan,
            cluster=self._watched,
            tainted_nodes=self._watched.tainted_nodes,
            board=self._board,
            reports=self._reports,
            metrics=self._metrics,
            tracer=self._tracer,
            history=HistoryKeeper(
                self._cluster, write_seconds=RECORDS_PER_HISTORY * self._settings.timing.record_interval
            ),
            isolation=Isolation(self._cluster) if self._settings.site.isolates_jobs else None,
            control=self._control,
            now=self._clock,
            listening_since=lambda: self._listening_since or self._clock(),
            site=self._settings.site,
            timing=self._settings.timing,
        )

        async def measured(key: JobKey, published: Published) -> PassResult:
            begun = time.perf_counter()
            try:
                if not await self._namespaces.leads(key.namespace):
                    return await self._leave(key, reconciler)
                return await reconciler.reconcile(key, published)
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

        return Controller(measured)

    async def _leave(self, key: JobKey, reconciler: Reconciler) -> PassResult:
        """Leave the job to the release that leads its namespace.

        Look again if that may change.
        """
        job = None
        if self._namespaces.may_change:
            job = await self._watched.get(JOBS, key.name, namespace=key.namespace)
        reconciler.leave(key, job)
        return PassResult(requeue_after=NOT_LED_SECONDS, gone=job is None)

    async def _first_passes(self, controller: Controller) -> None:
        """Wake each job, and each that is gone but has left something.

        That is pods, NodePools, or series and reports in this process.

        Ends once there is a decision on each job that isn't over, or after some time.
        """
        found = await self._watched.list(JOBS)
        jobs = first_wakes(found.items, self._watched.nodes(), self._watched.jobs_on)
        for key, priority in jobs.items():
            controller.wake(key, priority)
        known = self._watched.jobs_that_left_something() | self._metrics.jobs | self._reports.jobs
        for key in known - jobs.keys():
            controller.wake(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PASSES_SECONDS):
                await controller.decided(key for key, priority in jobs.items() if priority is not Priority.LAST)


def _optional(site: Site) -> list[Resource]:
    """What to watch, as the administrator says, of what a cluster may not have."""
    return [WORKLOADS] * site.uses_kueue + [NODE_POOLS] * site.uses_karpenter


def _hosts(settings: OperatorSettings) -> list[str]:
    """Names and addresses of the control API, for its certificate."""
    listening = [] if settings.host in ANY_ADDRESS else [settings.host]
    return list(dict.fromkeys([ControlAddress(url=settings.control_url).host, *listening]))


async def run_operator(settings: OperatorSettings, stop: asyncio.Event) -> None:
    """Run until `stop` is set.

    Raises:
        ClusterError: No cluster is configured.
        LeadershipLostError: The lease is lost, so this process has to end.
    """
    async with (
        KubernetesCluster(settings.limits) as cluster,
        ElectionThread(settings.lease, KubernetesCluster) as election,
    ):
        keys = ClusterKeys(cluster.get_raw)
        await Operator(settings, cluster, keys, election, watch_jobs=watch_jobs).run(stop)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _first_of(*doing: Awaitable[object]) -> None:
    """Wait until one of them ends, cancel the others, and raise what that one raised."""
    tasks = [asyncio.ensure_future(each) for each in doing]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for task in done:
        task.result()
