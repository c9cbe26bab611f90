"""Two releases in one cluster never lead the same namespace."""

from __future__ import annotations

import asyncio

import pytest

from spottrain_api.contract.names import ANNOTATION_WATCHED
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.lease import LeaderElection, LeaseSettings
from spottrain_operator.kube.led_namespaces import LedNamespaces
from spottrain_operator.kube.resources import LEASES
from spottrain_operator.kube.scope import Scope
from world.cluster import MemoryCluster
from world.faults import Fault

ALL, TEAM, OTHER = Scope(), Scope(names=frozenset({"team"})), Scope(names=frozenset({"other"}))


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def election(cluster: MemoryCluster, namespace: str, scope: Scope, clock: Clock | None = None) -> LeaderElection:
    settings = LeaseSettings(namespace=namespace, identity=f"pod-of-{namespace}", retry_seconds=0.001, scope=scope)
    return LeaderElection(cluster, settings, clock=clock or Clock())


async def pending(task: asyncio.Task[None]) -> bool:
    """Whether it still waits after a number of tries."""
    done, _ = await asyncio.wait({task}, timeout=0.05)
    return not done


async def test_a_second_release_waits_for_the_first_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    first, second = election(cluster, "a", ALL), election(cluster, "b", TEAM)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    assert await pending(waiting)
    assert (second.is_leader, second.is_standby) == (False, False)
    assert "the release in the namespace a leads jobs of all namespaces, and this one is to lead" in caplog.text
    assert "those of the namespaces team. Set watchNamespaces of both so that no namespace is in both" in caplog.text
    await first.release()
    await asyncio.wait_for(waiting, 5)
    assert second.is_leader


async def test_releases_with_namespaces_of_their_own_both_lead() -> None:
    cluster = MemoryCluster()
    first, second = election(cluster, "a", TEAM), election(cluster, "b", OTHER)
    await first.acquire()
    await asyncio.wait_for(second.acquire(), 5)
    assert first.is_leader
    assert second.is_leader


async def test_a_release_that_says_nothing_leads_all_namespaces() -> None:
    cluster = MemoryCluster()
    await election(cluster, "a", TEAM).acquire()
    del cluster.leases["a", "spottrain-operator"]["metadata"]["annotations"]
    waiting = asyncio.create_task(election(cluster, "b", OTHER).acquire())
    assert await pending(waiting)
    waiting.cancel()


async def test_a_release_that_is_gone_without_a_word_is_waited_for_no_longer_than_its_lease() -> None:
    cluster, clock = MemoryCluster(), Clock()
    await election(cluster, "a", ALL).acquire()
    waiting = asyncio.create_task(election(cluster, "b", ALL, clock).acquire())
    assert await pending(waiting)
    clock.seconds = 15.1
    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("annotation", [None, "nonsense", "[" * 100_000], ids=["none", "nonsense", "nested"])
async def test_a_lease_that_never_changes_keeps_nobody_from_leading(annotation: str | None) -> None:
    cluster, clock = MemoryCluster(), Clock()
    annotations = {} if annotation is None else {ANNOTATION_WATCHED: annotation}
    cluster.leases["tenant", "spottrain-operator"] = {
        "metadata": {
            "namespace": "tenant",
            "name": "spottrain-operator",
            "resourceVersion": "7",
            "annotations": annotations,
        },
        "spec": {"holderIdentity": "nobody", "leaseDurationSeconds": 2**31 - 1},
    }
    waiting = asyncio.create_task(election(cluster, "a", TEAM, clock).acquire())
    assert await pending(waiting)
    clock.seconds = 15.1
    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("num_releases", [2, 5])
async def test_of_releases_that_start_at_once_exactly_one_leads(num_releases: int) -> None:
    cluster = MemoryCluster()
    releases = [election(cluster, f"n{number}", ALL) for number in range(num_releases)]
    tasks = [asyncio.create_task(release.acquire()) for release in releases]
    async with asyncio.timeout(10):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        assert task.done() or await pending(task)
    assert sum(release.is_leader for release in releases) == 1
    for task in tasks:
        task.cancel()


async def test_who_cannot_see_the_others_does_not_lead() -> None:
    cluster = MemoryCluster()
    cluster.before.append(Fault(error=ClusterError("leases is forbidden"), verbs=("list",), resource=LEASES))
    alone = election(cluster, "a", ALL)
    waiting = asyncio.create_task(alone.acquire())
    assert await pending(waiting)
    assert not alone.is_leader
    cluster.before.clear()
    await asyncio.wait_for(waiting, 5)


async def test_a_namespace_is_led_by_its_labels_as_they_are_now() -> None:
    cluster, clock = MemoryCluster(), Clock()
    led = LedNamespaces(Scope(labels={"fleet": "a"}), cluster, clock=clock)
    assert led.may_change
    assert not await led.leads("team")
    cluster.namespaces["team"] = {"metadata": {"name": "team", "labels": {"fleet": "a"}}}
    clock.seconds = 15.0
    assert await led.leads("team")
    cluster.namespaces["team"]["metadata"]["labels"] = {"fleet": "b"}
    assert await led.leads("team"), "it was looked at just now"
    clock.seconds = 30.0
    assert not await led.leads("team")


@pytest.mark.parametrize(("scope", "led"), [(ALL, True), (TEAM, True), (OTHER, False)])
async def test_a_list_of_namespaces_needs_no_look(scope: Scope, led: bool) -> None:
    namespaces = LedNamespaces(scope, MemoryCluster())
    assert await namespaces.leads("team") is led
    assert not namespaces.may_change
