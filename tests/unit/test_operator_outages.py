"""When an operator acts and answers: as it begins, and while its lease is away."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from benchmarks.ports import free_ports

from memory_cluster import MemoryCluster
from operator_world import KEY, job, older_definition
from pod_tokens import pod_token
from spottrain_api import crd
from spottrain_api.contract import TAINT_PREEMPTION, TOKEN_AUDIENCE, AgentPhase, AgentReport
from spottrain_operator import process
from spottrain_operator.clock import SteadyClock
from spottrain_operator.cluster import led_namespaces
from spottrain_operator.cluster.client import ClusterError, JobKey, Manifest, PodIdentity
from spottrain_operator.cluster.lease import LEASE_NAME, LeaderElection, LeaseSettings
from spottrain_operator.controller import PLACES, Priority
from spottrain_operator.core.model import DeletePod, Observed, Plan
from spottrain_operator.core.plan import plan
from spottrain_operator.core.scope import Scope
from spottrain_operator.core.timing import OPERATOR_RESTART_GRACE, SILENT_ALONE
from spottrain_operator.process import LeadershipLostError, Operator, OperatorSettings

SYSTEM = "system"
ALL = Scope()


class LeaseAway(MemoryCluster):
    """A cluster whose API server answers nothing about leases while it is away.

    It creates pods only while `creates` is set, and writes no status of jobs in `held`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.num_tries_away = 0
        self.creates = asyncio.Event()
        self.creates.set()
        self.held: dict[str, asyncio.Event] = {}

    async def create_pod(self, pod: Manifest) -> Manifest:
        await self.creates.wait()
        return await super().create_pod(pod)

    async def replace_job_status(self, job: Manifest) -> Manifest:
        if job["metadata"]["name"] in self.held:
            await self.held[job["metadata"]["name"]].wait()
        return await super().replace_job_status(job)

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        if self.is_away:
            self.num_tries_away += 1
            raise ClusterError("connection refused")
        return await super().read_lease(namespace, name)


@dataclass
class Running:
    cluster: LeaseAway
    task: asyncio.Task[None]
    settings: OperatorSettings

    async def is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.settings.health_port}/readyz"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:  # it does not listen yet
            return False

    async def answer_to_agents(self) -> int | None:
        """The status that an agent without a token gets; None if the kernel refuses it."""
        try:
            url = f"https://127.0.0.1:{self.settings.port}/v1/assignment"
            async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as answer:
                return answer.status
        except aiohttp.ClientConnectorError:
            return None

    async def report_until(self, condition: Callable[[], bool], pod: str, **state: object) -> None:
        """Report as the agent of a pod does, again and again."""
        uid = self.cluster.pods[KEY.namespace, pod]["metadata"]["uid"]
        identity = PodIdentity(namespace=KEY.namespace, pod=pod, uid=uid)
        token = pod_token(identity)
        self.cluster.tokens[token, TOKEN_AUDIENCE] = identity
        values = {"pod": pod, "pod_uid": uid, "warm": True, "rendezvous_port": 4000, "sent_at": datetime.now(UTC)}
        body, headers = AgentReport.model_validate(values | state).to_json(), {"Authorization": f"Bearer {token}"}
        url = f"https://127.0.0.1:{self.settings.port}/v1/report"
        async with asyncio.timeout(20), aiohttp.ClientSession(headers=headers) as session:
            while not condition():
                async with session.post(url, data=body, ssl=False):
                    await asyncio.sleep(0.01)

    def run_pods(self) -> None:
        """Let all pods be up, each on a node of its own."""
        at = datetime.now(UTC).isoformat()
        conditions = [
            {"type": each, "status": "True", "lastTransitionTime": at} for each in ("PodScheduled", "Ready")
        ]
        for (_, name), pod in self.cluster.pods.items():
            node = {"metadata": {"name": f"node-of-{name}"}, "spec": {}}
            self.cluster.put_node(node | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
            pod["spec"]["nodeName"] = f"node-of-{name}"
            containers = [{"name": "trainer", "ready": True, "state": {"running": {"startedAt": at}}}]
            status = {"phase": "Running", "podIP": "127.9.0.1", "conditions": conditions}
            pod["status"] = status | {"containerStatuses": containers}

    def apply(self, name: str) -> None:
        manifest = job(checkpoint={"uri": f"s3://bucket/{name}"})
        self.cluster.put_job(manifest | {"metadata": manifest["metadata"] | {"name": name}})

    def num_pods(self, name: str) -> int:
        return sum(pod.startswith(f"{name}-") for _, pod in self.cluster.pods)

    def status(self, name: str) -> Manifest:
        found: Manifest = self.cluster.jobs[JobKey(namespace=KEY.namespace, name=name)]["status"]
        return found

    def place(self, name: str, *, on: str, taint: str) -> None:
        """Let the first pod of a job have been for long on a node, which has a taint now."""
        node = {"metadata": {"name": on}, "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}}
        self.cluster.put_node(node | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        pod = self.cluster.pods[KEY.namespace, f"{name}-1"]
        pod["spec"]["nodeName"] = on
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        pod.setdefault("status", {})["conditions"] = [placed]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def until_pods(self, name: str, number: int) -> None:
        await self.until(lambda: self.num_pods(name) == number)

    async def keep_trying(self, times: int) -> None:
        """Wait until the operator has asked for its lease so many times in vain."""
        before = self.cluster.num_tries_away
        await self.until(lambda: self.cluster.num_tries_away > before + times)

    async def until_measured(self, names: set[str]) -> None:
        """Wait until the jobs with metrics are these."""
        url, found = f"http://127.0.0.1:{self.settings.metrics_port}/metrics", None
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            while found != names:
                async with session.get(url) as answer:
                    found = set(re.findall(r'job_name="([^"]+)"', await answer.text()))

    async def until_ready(self, expected: bool) -> None:
        async with asyncio.timeout(20):
            while await self.is_ready() is not expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def settings_of(identity: str, scope: Scope = ALL) -> OperatorSettings:
    ports = free_ports(3)
    return OperatorSettings(
        control_url="https://127.0.0.1:1",
        lease=LeaseSettings(
            namespace=SYSTEM,
            identity=identity,
            duration_seconds=2,
            renew_deadline_seconds=0.5,
            retry_seconds=0.02,
            scope=scope,
        ),
        host="127.0.0.1",
        port=ports[0],
        health_port=ports[1],
        metrics_port=ports[2],
    )


def begin(settings: OperatorSettings, cluster: LeaseAway, stop: asyncio.Event) -> asyncio.Task[None]:
    election = LeaderElection(cluster, settings.lease)
    return asyncio.create_task(Operator(settings, cluster, cluster, election).run(stop))  # type: ignore[arg-type]


@pytest.fixture
async def operator() -> AsyncIterator[Running]:
    cluster, settings = LeaseAway(), settings_of("a")
    stop = asyncio.Event()
    task = begin(settings, cluster, stop)
    running = Running(cluster, task, settings)
    running.apply(KEY.name)
    await running.until(lambda: running.num_pods(KEY.name) == 3)
    yield running
    stop.set()
    await asyncio.wait({task}, timeout=20)


async def test_a_leader_that_can_not_renew_stops_acting_and_leads_on_afterwards(operator: Running) -> None:
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    operator.apply("later")
    await operator.keep_trying(20)
    assert operator.num_pods("later") == 0
    cluster.is_away = False
    await operator.until_ready(True)
    await operator.until(lambda: operator.num_pods("later") == 3)
    assert operator.num_pods(KEY.name) == 3
    assert cluster.leases[SYSTEM, LEASE_NAME]["spec"]["leaseTransitions"] == 0


class SlowLease(LeaseAway):
    """Answers no read of the lease until `answers` is set again."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_waiting = 0
        self.num_decided = 0

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        self.num_waiting += 1
        try:
            await self.answers.wait()
        finally:
            self.num_waiting -= 1
        return await super().read_lease(namespace, name)

    async def replace_job_status(self, job: Manifest) -> Manifest:
        self.num_decided += 1
        return await super().replace_job_status(job)


async def test_a_slow_renewal_goes_on_when_the_first_passes_have_decided() -> None:
    cluster, settings, stop = SlowLease(), settings_of("a"), asyncio.Event()
    cluster.held[KEY.name] = asyncio.Event()
    patient = replace(settings.lease, renew_deadline_seconds=60.0)
    task = begin(replace(settings, lease=patient), cluster, stop)
    running = Running(cluster, task, settings)
    running.apply(KEY.name)
    try:
        await running.until(lambda: cluster.num_decided == 1)
        cluster.answers.clear()
        await running.until(lambda: cluster.num_waiting == 1)
        cluster.held[KEY.name].set()
        await running.until_ready(True)
        assert cluster.num_waiting == 1
    finally:
        cluster.answers.set()
        stop.set()
        await asyncio.wait({task}, timeout=20)


async def test_a_notice_during_an_outage_goes_before_all_else_afterwards(operator: Running) -> None:
    cluster = operator.cluster
    others = [f"other-{number}" for number in range(2 * PLACES[Priority.NORMAL])]
    for name in [*others, "with-notice"]:
        operator.apply(name)
        await operator.until_pods(name, 3)
    cluster.is_away = True
    await operator.until_ready(False)
    # More jobs have something to do than there are places for passes, and none of these passes ends.
    cluster.creates.clear()
    for name in others:
        del cluster.pods[KEY.namespace, f"{name}-1"]
    operator.place("with-notice", on="spot-1", taint=TAINT_PREEMPTION)
    await operator.keep_trying(20)  # until the watches have shown all this
    cluster.is_away = False
    # The status counts a pod before it is created: here, that which replaces the one on the node.
    await operator.until(lambda: operator.status("with-notice")["lastSequence"] == 4)
    assert operator.num_pods("other-0") == 2
    cluster.creates.set()
    await operator.until_pods("with-notice", 4)


async def test_nothing_is_kept_of_a_job_that_is_deleted_during_an_outage(operator: Running) -> None:
    operator.apply("other")
    await operator.until_pods("other", 3)
    await operator.until_ready(True)
    await operator.until_measured({KEY.name, "other"})
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    del cluster.jobs[KEY]
    for name in [pod for pod in cluster.pods if pod[1].startswith(f"{KEY.name}-")]:
        del cluster.pods[name]
    await operator.keep_trying(20)  # until the watches have shown this
    cluster.is_away = False
    await operator.until_measured({"other"})


@dataclass
class Clocks:
    """The clocks of the operator's machine.

    A test can let time pass, or set the time of day.
    """

    passed: float = 0.0
    ahead: float = 0.0

    def wall(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.passed + self.ahead)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@dataclass
class Decisions:
    """What is decided, and by what."""

    made: list[tuple[Observed, Plan]] = field(default_factory=list)

    def __call__(self, observed: Observed, now: datetime) -> Plan:
        self.made.append((observed, plan(observed, now)))
        return self.made[-1][1]

    def heed(self, pod: str, phase: AgentPhase) -> Callable[[], bool]:
        """Whether the newest decision is by such a report."""

        def heeded() -> bool:
            reports = self.made[-1][0].reports.values() if self.made else ()
            return any((view.report.pod, view.report.phase) == (pod, phase) for view in reports)

        return heeded


@dataclass
class Training:
    """An operator whose clocks a test can set, and a job in its first generation."""

    running: Running
    clocks: Clocks
    decisions: Decisions
    pods: list[str]

    @property
    def cluster(self) -> LeaseAway:
        return self.running.cluster

    @property
    def generation(self) -> Manifest:
        found: Manifest = self.running.status(KEY.name)["generation"]
        return found

    async def hear(self, *pods: str, phase: AgentPhase) -> None:
        """Let these pods report, until a decision is by their reports."""
        for pod in pods:
            await self.running.report_until(self.decisions.heed(pod, phase), pod, generation=1, phase=phase)

    def assert_undisturbed(self) -> None:
        made = (action for _, plan in self.decisions.made for action in plan.actions)
        assert not any(isinstance(action, DeletePod) for action in made)
        assert self.generation["state"] == "Active"


@pytest.fixture
async def training(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Training]:
    clocks, decisions = Clocks(), Decisions()
    monkeypatch.setattr(process, "SteadyClock", lambda: SteadyClock(wall=clocks.wall, monotonic=clocks.monotonic))
    monkeypatch.setattr(process, "CLOCK_SECONDS", 0.01)
    monkeypatch.setattr(process, "plan", decisions)
    cluster, settings, stop = LeaseAway(), settings_of("a"), asyncio.Event()
    task = begin(settings, cluster, stop)
    running = Running(cluster, task, settings)
    running.apply(KEY.name)
    pods = [f"{KEY.name}-{number}" for number in (1, 2, 3)]
    training = Training(running, clocks, decisions, pods)
    try:
        await running.until_pods(KEY.name, 3)
        await running.until_ready(True)
        running.run_pods()
        for pod in pods:
            await running.report_until(decisions.heed(pod, AgentPhase.IDLE), pod)
        await running.until(lambda: "generation" in running.status(KEY.name))
        await training.hear(*pods, phase=AgentPhase.STARTING)
        yield training
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)


async def test_agents_that_come_back_after_an_outage_one_after_the_other_are_not_missed(training: Training) -> None:
    """Nobody could hear them meanwhile. One that stays away is missed later."""
    cluster, running = training.cluster, training.running
    cluster.is_away = True
    await running.until_ready(False)
    training.clocks.passed += 2 * SILENT_ALONE
    training.decisions.made.clear()
    cluster.is_away = False
    await training.hear(*training.pods[:2], phase=AgentPhase.RUNNING)
    training.assert_undisturbed()
    training.clocks.passed += SILENT_ALONE + 2 * OPERATOR_RESTART_GRACE
    going = {"generation": 1, "phase": AgentPhase.RUNNING}
    await running.report_until(lambda: training.generation.get("reason") == "NodeLost", training.pods[0], **going)


@pytest.mark.parametrize("jump", [timedelta(minutes=5), timedelta(minutes=-5)], ids=["forward", "back"])
async def test_a_leader_whose_clock_is_set_leads_on_by_the_new_time(training: Training, jump: timedelta) -> None:
    """As after a suspension of its machine. No agent counts as silent for that."""
    decisions = training.decisions
    before = decisions.made[-1][0].listening_since
    decisions.made.clear()
    training.clocks.ahead = jump.total_seconds()
    await training.hear(*training.pods, phase=AgentPhase.RUNNING)
    await training.running.until(lambda: abs(decisions.made[-1][0].listening_since - before) > abs(jump) / 2)
    await training.hear(*training.pods, phase=AgentPhase.RUNNING)
    training.assert_undisturbed()


async def test_a_leader_ends_if_another_has_led_meanwhile(operator: Running) -> None:
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    cluster.leases[SYSTEM, LEASE_NAME]["spec"]["holderIdentity"] = "b"
    cluster.is_away = False
    with pytest.raises(LeadershipLostError):
        await asyncio.wait_for(operator.task, 20)


async def test_a_leader_ends_if_another_release_leads_its_namespaces_meanwhile(operator: Running) -> None:
    cluster = operator.cluster
    cluster.is_away = True
    await operator.until_ready(False)
    await cluster.write_lease(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": "another", "name": LEASE_NAME},
            "spec": {"holderIdentity": "b", "leaseDurationSeconds": 60},
        }
    )
    cluster.is_away = False
    with pytest.raises(LeadershipLostError):
        await asyncio.wait_for(operator.task, 20)
    assert cluster.leases[SYSTEM, LEASE_NAME]["spec"]["holderIdentity"] == ""


async def test_a_leader_says_that_the_crd_is_an_older_one(caplog: pytest.LogCaptureFixture) -> None:
    cluster, settings, stop = LeaseAway(), settings_of("a"), asyncio.Event()
    cluster.other_definitions[crd.NAME] = older_definition()
    task = begin(settings, cluster, stop)
    try:
        await Running(cluster, task, settings).until(lambda: "is that of another version" in caplog.text)
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)


async def test_who_could_take_over_is_ready_but_refuses_agents(operator: Running) -> None:
    settings, stop = settings_of("b"), asyncio.Event()
    task = begin(settings, operator.cluster, stop)
    second = Running(operator.cluster, task, settings)
    try:
        await second.until_ready(True)
        assert await second.answer_to_agents() is None
        assert operator.cluster.leases[SYSTEM, LEASE_NAME]["spec"]["holderIdentity"] == "a"
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)


@dataclass
class Plans:
    """The passes over a job, by the time since when the operator listens."""

    name: str
    listening_since: list[datetime] = field(default_factory=list)

    def __call__(self, observed: Observed, now: datetime) -> Plan:
        if observed.job.name == self.name:
            self.listening_since.append(observed.listening_since)
        return plan(observed, now)


async def test_agents_are_kept_out_until_there_is_a_decision_on_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no silence counts before, as nobody can report."""
    cluster, settings, stop = LeaseAway(), settings_of("a"), asyncio.Event()
    cluster.held["slow"] = asyncio.Event()
    plans = Plans(KEY.name)
    monkeypatch.setattr(process, "plan", plans)
    task = begin(settings, cluster, stop)
    running = Running(cluster, task, settings)
    running.apply(KEY.name)
    running.apply("slow")

    async def lose_a_pod() -> None:
        await running.until_pods(KEY.name, 3)
        seen = len(plans.listening_since)
        del cluster.pods[next(pod for pod in cluster.pods if pod[1].startswith(f"{KEY.name}-"))]
        await running.until(lambda: len(plans.listening_since) > seen)

    try:
        for _ in range(3):
            await lose_a_pod()
        assert await running.answer_to_agents() is None
        assert not await running.is_ready()
        before = list(plans.listening_since)
        assert len(before) == len(set(before)) > 3
        cluster.held.pop("slow").set()
        await running.until_ready(True)
        assert await running.answer_to_agents() == 401
        seen = len(plans.listening_since)
        for _ in range(3):
            await lose_a_pod()
        assert len(set(plans.listening_since[seen:])) == 1
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)


async def test_a_job_that_can_not_be_decided_on_keeps_agents_out_for_some_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "FIRST_PASSES_SECONDS", 0.2)
    cluster, settings, stop = LeaseAway(), settings_of("a"), asyncio.Event()
    cluster.held["slow"] = asyncio.Event()
    task = begin(settings, cluster, stop)
    running = Running(cluster, task, settings)
    running.apply("slow")
    try:
        await running.until_ready(True)
        assert await running.answer_to_agents() == 401
        assert running.num_pods("slow") == 0
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=20)


async def test_a_job_whose_namespace_leaves_the_release_leaves_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release that leads it now shows it."""
    monkeypatch.setattr(led_namespaces, "REMEMBERED_SECONDS", 0.0)
    cluster, stop = LeaseAway(), asyncio.Event()
    namespace: Manifest = {"metadata": {"name": KEY.namespace, "labels": {"fleet": "a"}}}
    cluster.namespaces[KEY.namespace] = namespace
    settings = settings_of("a", Scope(labels={"fleet": "a"}))
    running = Running(cluster, begin(settings, cluster, stop), settings)
    try:
        running.apply(KEY.name)
        await running.until_pods(KEY.name, 3)
        await running.until_measured({KEY.name})
        namespace["metadata"]["labels"] = {"fleet": "b"}
        running.apply(KEY.name)  # any change leads to a pass
        await running.until_measured(set())
    finally:
        stop.set()
        await asyncio.wait({running.task}, timeout=20)
