"""When an operator acts and answers: as it begins, and while its lease is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import datetime

import pytest

from operator_world import KEY, older_definition
from running_operator import SYSTEM, LeaseAway, Running, begin, settings_of
from spottrain_api import crd
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_operator import process
from spottrain_operator.controller import PLACES, Priority
from spottrain_operator.core.model import Observed, Plan
from spottrain_operator.core.plan import plan
from spottrain_operator.kube import led_namespaces
from spottrain_operator.kube.lease import LEASE_NAME
from spottrain_operator.kube.resources import JOBS, LEASES, PODS, Manifest
from spottrain_operator.kube.scope import Scope
from spottrain_operator.process import LeadershipLostError
from world.faults import Fault


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


async def test_the_metrics_show_the_jobs_only_while_the_operator_leads(operator: Running) -> None:
    phase = "spottrain_job_phase"
    await operator.until_measured({KEY.name}, by=phase)
    operator.cluster.is_away = True
    await operator.until_measured(set(), by=phase)
    operator.cluster.is_away = False
    await operator.until_measured({KEY.name}, by=phase)


def unwritten(job: str) -> Fault:
    """A fault that lets no status of the job be written until it is released."""
    return Fault(verbs=("replace",), resource=JOBS, name=job, answers=asyncio.Event())


async def test_a_slow_renewal_goes_on_when_the_first_passes_have_decided() -> None:
    cluster, settings, stop = LeaseAway(), settings_of("a"), asyncio.Event()
    first, lease = unwritten(KEY.name), Fault(verbs=("get",), resource=LEASES)
    cluster.before += [first, lease]
    patient = replace(settings.lease, renew_deadline_seconds=60.0)
    task = begin(replace(settings, lease=patient), cluster, stop)
    running = Running(cluster, task, settings)
    running.apply(KEY.name)
    try:
        await running.until(lambda: first.num_waiting == 1)
        lease.answers = asyncio.Event()
        await running.until(lambda: lease.num_waiting == 1)
        first.release()
        await running.until_ready(True)
        assert lease.num_waiting == 1
    finally:
        lease.release()
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
    creating = Fault(verbs=("create",), resource=PODS, answers=asyncio.Event())
    cluster.before.append(creating)
    for name in others:
        del cluster.pods[KEY.namespace, f"{name}-1"]
    operator.place("with-notice", on="spot-1", taint=TAINT_PREEMPTION)
    await operator.keep_trying(20)  # until the watches have shown all this
    cluster.is_away = False
    # The status counts a pod before it is created: here, that which replaces the one on the node.
    await operator.until(lambda: operator.status("with-notice")["lastSequence"] == 4)
    assert operator.num_pods("other-0") == 2
    creating.release()
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
    await cluster.create(
        LEASES,
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": "another", "name": LEASE_NAME},
            "spec": {"holderIdentity": "b", "leaseDurationSeconds": 60},
        },
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
    slow = unwritten("slow")
    cluster.before.append(slow)
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
        slow.release()
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
    cluster.before.append(unwritten("slow"))
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
