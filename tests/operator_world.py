"""The operator's passes over one job on a cluster in memory.

Kubelets and agents do as the operator says.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from spottrain_api import crd
from spottrain_api.contract.names import LABEL_CAPACITY_TYPE
from spottrain_api.v1alpha1.pod_template import Network
from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.resources import EVENTS, JOBS, NETWORK_POLICIES, PODS, Manifest, Resource
from spottrain_operator.metrics import Metrics
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.history import HistoryKeeper
from spottrain_operator.objects.isolation import Isolation
from spottrain_operator.objects.placement import Site
from spottrain_operator.reconcile import Reconciler
from spottrain_operator.tracing import ChangeTracer
from spottrain_simulator.agents import Agent
from spottrain_simulator.clock import EPOCH
from spottrain_simulator.ranks import Pace, Training
from world.cluster import MemoryCluster
from world.faults import WRITES, Request
from world.invariants import checked_plan
from world.kubelets import running

KEY = JobKey(namespace="team", name="gpt")
LAST_STEP = 6
PACE = Pace(start=0.0, step=1.0, save=0.0, commit_every=10**9)


def job(**changes: Any) -> Manifest:
    spec = {
        "image": "local/train",
        "entrypoint": {"script": "train.py"},
        "nodes": {"min": 2, "max": 3},
        "capacity": {"onDemand": {"min": 1}, "spot": {"max": 2}},
        "batch": {"global": 8},
        "checkpoint": {"uri": "s3://bucket/prefix"},
    }
    return {"metadata": {"namespace": KEY.namespace, "name": KEY.name}, "spec": spec | changes}


def older_definition() -> Manifest:
    """The CRD of jobs without a field of the status, as after a rollback of the CRDs alone."""
    found = crd.custom_resource_definition()
    [version] = found["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["stepsRedone"]
    return found


class CrashError(BaseException):
    """The operator ends here, as no handler of exceptions takes this one."""


class CrashingCluster(MemoryCluster):
    """Raises `crash` once, before or after its n-th write took effect.

    Leases and histories don't count, nor what is in `spares`.
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        after: bool = False,
        crash: type[BaseException] = CrashError,
        spares: frozenset[Resource] = frozenset(),
    ) -> None:
        super().__init__()
        self._crash_at = (crash_at, after)
        self._crash = crash
        self._counted = frozenset({JOBS, PODS, EVENTS, NETWORK_POLICIES}) - spares
        self.num_writes = 0
        self.num_status_writes = 0
        self.created: list[str] = []
        self.deleted: set[str] = set()
        self.before.append(self._begins)
        self.after.append(self._ends)

    def _counts(self, request: Request) -> bool:
        return request.verb in WRITES and request.resource in self._counted

    async def _begins(self, request: Request) -> None:
        if request[:2] == ("replace", JOBS):
            self.num_status_writes += 1
        if request[:2] == ("delete", PODS):
            self.deleted.add(request.name)
        if self._counts(request):
            self.num_writes += 1
            if self._crash_at == (self.num_writes, False):
                raise self._crash("before the write")

    async def _ends(self, request: Request) -> None:
        if request[:2] == ("create", PODS):
            self.created.append(request.name)
        if self._counts(request) and self._crash_at == (self.num_writes, True):
            raise self._crash("after the write")


@dataclass
class World:
    """The operator, and kubelets and agents that do as it says.

    One turn is one second, in which a generation that runs makes a step.
    """

    cluster: CrashingCluster
    client: Cluster | None = None  # through which the operator sees it; None: without caches
    now: datetime = EPOCH
    last_step: InitVar[int] = LAST_STEP
    num_crashes: int = 0
    agents: dict[str, Agent] = field(default_factory=dict)
    allowed_networks: frozenset[Network] = frozenset()
    control: ControlAddress = ControlAddress(url="https://control:8443", ca="CA")
    isolates_jobs: bool = False
    groups_pods: bool = False
    uses_kueue: bool = False
    uses_karpenter: bool = False
    restarts: bool = True  # the operator, after a pass that failed

    def __post_init__(self, last_step: int) -> None:
        self.training = Training(total_steps=last_step, pace=PACE)
        self.start_operator()

    def start_operator(self) -> None:
        started_at = self.now
        self.board = AssignmentBoard()
        self.reports = ReportBox(lambda _job, urgent: None, now=lambda: self.now)
        self.metrics = Metrics(num_agents=lambda: 0)
        self.reconciler = Reconciler(
            plan=checked_plan,
            cluster=self.client or self.cluster,
            tainted_nodes=lambda: list(self.cluster.nodes.values()),
            board=self.board,
            reports=self.reports,
            metrics=self.metrics,
            tracer=ChangeTracer(None),
            history=HistoryKeeper(self.cluster),
            isolation=Isolation(self.cluster) if self.isolates_jobs else None,
            control=lambda: self.control,
            now=lambda: self.now,
            listening_since=lambda: started_at,
            site=Site(
                allowed_networks=self.allowed_networks,
                groups_pods=self.groups_pods,
                uses_kueue=self.uses_kueue,
                uses_karpenter=self.uses_karpenter,
            ),
        )

    async def turn(self) -> None:
        try:
            await self.reconciler.reconcile(KEY)
        except (ClusterError, CrashError):
            self.num_crashes += 1
            if self.restarts:
                self.start_operator()
        self.cluster.finish_deletions()
        pods = {pod["metadata"]["uid"]: pod for pod in self.cluster.pods.values()}
        for uid in self.agents.keys() - pods.keys():
            self.training.lose(self.agents.pop(uid))
        for pod in pods.values():
            self._run(pod)
        for uid, agent in self.agents.items():
            assigned = await self.board.next(uid, after=None, timeout_seconds=0)
            if assigned is not None:
                agent.receive(assigned)
        self.training.advance(self.now)
        for uid, agent in self.agents.items():
            self.reports.put(
                PodIdentity(namespace=KEY.namespace, pod=agent.pod, uid=uid), agent.report(self.now, port=4000)
            )
        self.now += timedelta(seconds=1)

    def _run(self, pod: Manifest) -> None:
        """As the scheduler and the kubelet would."""
        name, kind = pod["metadata"]["name"], pod["metadata"]["labels"][LABEL_CAPACITY_TYPE]
        pod["spec"]["nodeName"] = node = f"{kind}-{name}"
        self.cluster.nodes[node] = {
            "metadata": {"name": node},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        pod["status"] = running(EPOCH, ip="127.9.0.1")
        uid = pod["metadata"]["uid"]
        if uid not in self.agents:
            self.agents[uid] = Agent(name, uid, node, self.training)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.cluster.jobs[KEY].get("status", {}))

    @property
    def generation(self) -> dict[str, Any]:
        """The newest generation, as in the status; empty before the first."""
        return dict(self.status.get("generation", {}))

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the job; empty if there is none."""
        return next((dict(each) for each in self.status.get("conditions", ()) if each["type"] == kind), {})

    async def until_running(self) -> None:
        for _ in range(30):
            await self.turn()
            if self.status.get("phase") == "Running":
                return
        raise AssertionError(f"not running: {self.status}")

    async def until_finished(self) -> None:
        for _ in range(90):
            await self.turn()
            if self.status.get("phase") in ("Succeeded", "Failed") and not self.cluster.pods:
                return
        raise AssertionError(f"not finished: {self.status}")
