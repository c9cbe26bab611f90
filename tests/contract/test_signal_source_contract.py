"""The contract of every SignalSource.

It holds for the source in memory, for those of the clouds, and for that of the API server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
from aiohttp import web

from signal_clouds import (
    DEADLINE,
    NODE,
    Cloud,
    Ec2Cloud,
    KubernetesCloud,
    LocalCloud,
    MemoryCloud,
    listening,
    local_cloud,
    node_object,
    serve,
    source_of,
    until_trouble,
    within,
)
from signal_clouds import Provider as LocalProvider
from spottrain_api.contract.names import ENV_NODE_NAME
from spottrain_api.contract.notices import Notice, NoticeKind
from spottrain_watcher import kubernetes_api
from spottrain_watcher.__main__ import _cloud_source
from spottrain_watcher.azure import PATH_EVENTS, PATH_NAME
from spottrain_watcher.ec2 import ENV_ENDPOINT, PATH_INSTANCE_ACTION, PATH_MAINTENANCE, PATH_REBALANCE, Ec2Source
from spottrain_watcher.gce import ENV_HOST
from spottrain_watcher.kubernetes_api import WATCH_TIMEOUT, KubernetesApi
from spottrain_watcher.kubernetes_signals import KubernetesSource
from spottrain_watcher.node_marker import NodeMarker
from spottrain_watcher.provider import Provider

SECOND = timedelta(seconds=1)


@pytest.fixture
async def ec2() -> AsyncIterator[Ec2Cloud]:
    cloud = Ec2Cloud()
    url, runner = await serve(cloud.application())
    async with aiohttp.ClientSession() as session:
        cloud.source = Ec2Source(session, NODE, {ENV_ENDPOINT: url})
        yield cloud
    await runner.cleanup()


@pytest.fixture
async def kubernetes(tmp_path: Path) -> AsyncIterator[KubernetesCloud]:
    cloud = KubernetesCloud()
    url, runner = await serve(cloud.application())
    (tmp_path / "token").write_text("token")
    async with aiohttp.ClientSession() as session:
        cloud.source = KubernetesSource(KubernetesApi(session, url, tmp_path / "token", None), node_object())
        yield cloud
    await runner.cleanup()


@pytest.fixture
async def gce(tmp_path: Path) -> AsyncIterator[LocalCloud]:
    async with local_cloud("gke", tmp_path) as cloud:
        yield cloud


@pytest.fixture
async def azure(tmp_path: Path) -> AsyncIterator[LocalCloud]:
    async with local_cloud("aks", tmp_path) as cloud:
        yield cloud


@pytest.fixture(params=["memory", "ec2", "gce", "azure", "kubernetes"])
def cloud(request: pytest.FixtureRequest) -> Cloud:
    if request.param == "memory":
        return MemoryCloud()
    cloud: Cloud = request.getfixturevalue(request.param)
    return cloud


async def following(cloud: Cloud) -> AsyncIterator[tuple[Notice, ...]]:
    async for notices in cloud.source.watch():
        yield notices


async def test_a_source_says_that_there_is_nothing_then_announces_and_takes_back(cloud: Cloud) -> None:
    answers = following(cloud)
    assert await within(30, answers) == ()
    await cloud.preempt()
    (notice,) = await within(30, answers)
    assert (notice.node, notice.kind, notice.deadline) == (NODE, NoticeKind.PREEMPT, DEADLINE)
    await cloud.cancel()
    assert await within(30, answers) == ()


async def test_a_source_that_hears_has_no_trouble(cloud: Cloud) -> None:
    await within(30, following(cloud))
    assert cloud.source.trouble is None
    assert not cloud.source.starting


async def test_a_source_that_starts_late_announces_what_stands(cloud: Cloud) -> None:
    await cloud.preempt()
    (notice,) = await within(30, following(cloud))
    assert notice.deadline == DEADLINE


async def test_the_same_signal_is_not_reported_again(cloud: Cloud) -> None:
    answers = following(cloud)
    await cloud.preempt()
    told = await within(30, answers)
    await cloud.preempt()
    with pytest.raises(TimeoutError):
        assert await within(2.5, answers) != told


async def test_trouble_is_not_a_cancellation(cloud: Cloud) -> None:
    answers = following(cloud)
    await cloud.preempt()
    await within(30, answers)
    again = asyncio.create_task(within(15, answers))
    await cloud.break_down()
    await until_trouble(cloud.source, True)
    assert not cloud.source.starting, "it has answered before"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(again), 2.5)
    await cloud.repair()
    await cloud.cancel()
    assert await again == ()
    await until_trouble(cloud.source, False)


async def test_ec2_asks_for_a_new_token_when_the_old_one_is_refused(ec2: Ec2Cloud) -> None:
    answers = following(ec2)
    await within(30, answers)
    assert len(ec2.tokens) == 1
    ec2.tokens.append("issued to somebody else")
    await ec2.preempt()
    assert len(await within(30, answers)) == 1


@pytest.mark.parametrize("ahead", [timedelta(hours=2), timedelta(hours=-2)], ids=["ahead", "behind"])
@pytest.mark.parametrize("provider", get_args(LocalProvider))
async def test_a_clouds_other_clock_does_not_shorten_or_lengthen_a_notice(
    provider: LocalProvider, ahead: timedelta, tmp_path: Path
) -> None:
    options = {"now": lambda: datetime.now(UTC)} if provider == "gke" else {}
    async with local_cloud(provider, tmp_path, **options) as cloud:
        cloud.ahead = ahead
        cloud.announce("preempt", cloud.now() + 40 * SECOND)
        (notice,) = await within(30, following(cloud))
        assert 25 < (notice.deadline - datetime.now(UTC)).total_seconds() < 45


async def test_ec2_hibernation_has_no_lead_time(ec2: Ec2Cloud) -> None:
    ec2.bodies[PATH_INSTANCE_ACTION] = json.dumps({"action": "hibernate", "time": "2030-01-01T12:00:00Z"})
    (notice,) = await within(30, following(ec2))
    assert notice.deadline <= datetime.now(UTC)


async def test_ec2_malformed_recommendation_does_not_hide_an_interruption(ec2: Ec2Cloud) -> None:
    await ec2.preempt()
    ec2.bodies[PATH_REBALANCE] = "nonsense"
    (notice,) = await within(30, following(ec2))
    assert notice.kind is NoticeKind.PREEMPT


async def test_ec2_recommendation_comes_beside_the_interruption(ec2: Ec2Cloud) -> None:
    answers = following(ec2)
    ec2.bodies[PATH_REBALANCE] = json.dumps({"noticeTime": "2030-01-01T11:00:00Z"})
    await within(30, answers)
    (recommendation,) = await within(30, answers)
    assert recommendation.kind is NoticeKind.REBALANCE
    await ec2.preempt()
    assert {notice.kind for notice in await within(30, answers)} == {NoticeKind.REBALANCE, NoticeKind.PREEMPT}


async def test_ec2_maintenance_is_announced_once_it_is_near_and_only_while_it_is_active(ec2: Ec2Cloud) -> None:
    def event(code: str, state: str, ahead: timedelta) -> dict[str, str]:
        time = (datetime.now(UTC) + ahead).strftime("%d %b %Y %H:%M:%S GMT")
        return {"Code": code, "State": state, "EventId": f"instance-event-{code}", "NotBefore": time}

    ec2.bodies[PATH_MAINTENANCE] = json.dumps(
        [
            event("instance-stop", "active", timedelta(days=9)),
            event("system-reboot", "active", timedelta(minutes=10)),
            event("instance-reboot", "completed", timedelta(minutes=10)),
        ]
    )
    answers = following(ec2)
    assert await within(30, answers) == ()
    (notice,) = await within(30, answers)
    assert (notice.id, notice.kind) == ("ec2-instance-event-system-reboot", NoticeKind.MAINTENANCE)
    assert 590 < (notice.deadline - datetime.now(UTC)).total_seconds() < 601
    ec2.bodies[PATH_MAINTENANCE] = "[]"
    assert await within(30, answers) == ()


async def test_gce_a_grace_that_the_node_is_labelled_with_later_counts(
    kubernetes: KubernetesCloud, tmp_path: Path
) -> None:
    metadata = LocalCloud("gke", tmp_path / "interruption.json")
    url, runner = await serve(metadata.application())
    async with aiohttp.ClientSession() as session:
        environ = {ENV_NODE_NAME: NODE, ENV_HOST: url.removeprefix("http://")}
        api = KubernetesApi(session, "", tmp_path / "token", None)
        marker = NodeMarker(api, NODE, "mark")
        source = _cloud_source(session, api, kubernetes.source, marker, Provider.GCE, environ)
        assert source is not None
        answers = following(kubernetes)
        assert await within(30, answers) == ()
        added = {"timeAdded": (DEADLINE - 105 * SECOND).isoformat()}
        kubernetes.node = node_object(taints=[{"key": "cloud.google.com/impending-node-termination"} | added])
        kubernetes.node["metadata"]["labels"] = {"spottrain.dev/shutdown-grace-seconds": "105"}
        await kubernetes.change()
        (notice,) = await within(30, answers)
        assert notice.deadline == DEADLINE
        await metadata.preempt()
        (notice,) = await within(30, source.watch())
        assert notice.deadline - notice.observed_at == 105 * SECOND
    await runner.cleanup()


@pytest.mark.parametrize(("provider", "seconds"), [("eks", 40), ("gke", 60), ("aks", 40)])
async def test_maintenance_on_the_local_cluster(provider: LocalProvider, seconds: float, tmp_path: Path) -> None:
    """Maintenance in 40 s is a notice with a deadline in `seconds`.

    A cloud that says when gives those 40 s. Otherwise they are the lead of the source.
    """
    now = datetime.now(UTC)
    options = {"now": lambda: now} if provider == "gke" else {}
    async with local_cloud(provider, tmp_path, **options) as cloud:
        answers = following(cloud)
        assert await within(30, answers) == ()
        cloud.announce("maintenance", now + 40 * SECOND)
        (notice,) = await within(30, answers)
        assert notice.kind is NoticeKind.MAINTENANCE
        assert abs(notice.deadline - now - seconds * SECOND) < 2 * SECOND
        await cloud.cancel()
        assert await within(30, answers) == ()


async def test_ec2_slow_service_is_waited_for(ec2: Ec2Cloud) -> None:
    ec2.trouble.append("slow")
    answers = following(ec2)
    first = asyncio.create_task(within(15, answers))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(first), 2.5)
    ec2.trouble.clear()
    assert await first == ()


@pytest.mark.parametrize("usable", [True, False])
async def test_azure_starts_until_its_service_answers_for_the_first_time(usable: bool) -> None:
    """The first request of a scale set enables the service.

    That may take two minutes.
    """
    asked, enabled = asyncio.Event(), asyncio.Event()

    async def events(_: web.Request) -> web.Response:
        asked.set()
        await enabled.wait()
        return web.Response(text='{"DocumentIncarnation": 1, "Events": []}' if usable else "not yet")

    async def name(_: web.Request) -> web.Response:
        return web.Response(text="vm_0")

    application = web.Application()
    application.router.add_get(PATH_EVENTS, events)
    application.router.add_get(PATH_NAME, name)
    url, runner = await serve(application)
    async with aiohttp.ClientSession() as session:
        source = source_of("aks", session, url)
        async with listening(source), asyncio.timeout(10):
            await asked.wait()
            assert source.starting
            assert "has not answered yet" in (source.trouble or "")
            enabled.set()
            await until_trouble(source, not usable)
            assert not source.starting, "that was the first answer"
    await runner.cleanup()


async def test_kubernetes_deletion_of_the_node_is_final(kubernetes: KubernetesCloud) -> None:
    answers = following(kubernetes)
    await within(30, answers)
    kubernetes.node = None
    await kubernetes.change()
    (notice,) = await within(30, answers)
    assert (notice.source, notice.cancelled) == ("node-deleted", False)


async def test_kubernetes_a_node_that_is_registered_anew_between_two_lists_is_reported(
    kubernetes: KubernetesCloud,
) -> None:
    answers = following(kubernetes)
    assert await within(30, answers) == ()
    kubernetes.node = node_object(uid="n-2")
    await kubernetes.change()
    assert await within(30, answers) == (), "nothing is announced, but the Node has lost the watcher's mark"


def disrupted(reason: str) -> dict[str, Any]:
    """A pod with the condition since 40 s before the deadline, its grace period."""
    since = {"lastTransitionTime": (DEADLINE - 40 * SECOND).isoformat()}
    return {
        "metadata": {"name": "train-1", "uid": "u-1"},
        "spec": {"terminationGracePeriodSeconds": 40},
        "status": {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason} | since]},
    }


async def test_kubernetes_disruption_of_a_pod_names_the_pod(kubernetes: KubernetesCloud) -> None:
    pod = disrupted("EvictionByEvictionAPI")
    kubernetes.pods = [pod]
    (notice,) = await within(30, following(kubernetes))
    assert (notice.id, notice.source, notice.kind) == (
        "pod/u-1",
        "condition:EvictionByEvictionAPI",
        NoticeKind.EVICT,
    )
    assert notice.deadline == DEADLINE
    deleted = {"deletionTimestamp": (DEADLINE - 9 * SECOND).isoformat()}
    kubernetes.pods = [pod | {"metadata": pod["metadata"] | deleted}]
    (notice,) = await within(30, following(kubernetes))
    assert notice.deadline == DEADLINE - 9 * SECOND, "whoever deletes it may leave it less"


async def test_kubernetes_pods_of_one_name_in_two_namespaces_are_kept_apart(kubernetes: KubernetesCloud) -> None:
    evicted = disrupted("EvictionByEvictionAPI")
    other: dict[str, Any] = {"metadata": {"name": "train-1", "uid": "u-2"}, "spec": {}, "status": {}}
    kubernetes.pods = [evicted, other]
    (notice,) = await within(30, following(kubernetes))
    assert notice.id == "pod/u-1"


async def test_kubernetes_an_eviction_that_leaves_less_shortens_the_notice_of_its_condition(
    kubernetes: KubernetesCloud,
) -> None:
    """The API server writes the condition first, and deletes the pod after that."""
    pod = disrupted("EvictionByEvictionAPI")
    kubernetes.pods = [pod]
    answers = following(kubernetes)
    (first,) = await within(30, answers)
    assert first.deadline == DEADLINE
    deleted = {"deletionTimestamp": (DEADLINE - 9 * SECOND).isoformat()}
    kubernetes.pods = [pod | {"metadata": pod["metadata"] | deleted}]
    await kubernetes.change()
    (notice,) = await within(30, answers)
    assert notice == first.model_copy(update={"deadline": DEADLINE - 9 * SECOND})


async def test_kubernetes_a_pod_that_is_too_large_for_a_watch_is_listed(
    kubernetes: KubernetesCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "MAX_LINE_BYTES", 2**16)
    answers = following(kubernetes)
    assert await within(30, answers) == ()
    pod = disrupted("EvictionByEvictionAPI")
    pod["spec"]["containers"] = [{"env": [{"name": "A", "value": "a" * 2**18}]}]
    kubernetes.pods = [pod]
    await kubernetes.change()
    (notice,) = await within(30, answers)
    assert notice.id == "pod/u-1"


async def test_kubernetes_a_watch_without_the_bookmark_of_each_minute_counts_as_dead(tmp_path: Path) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Node", "metadata": {"resourceVersion": "2"}}}
    changed = {"type": "MODIFIED", "object": node_object()}

    async def watch(request: web.Request) -> web.Response:
        assert request.query["allowWatchBookmarks"] == "true"
        return web.Response(text=f"{json.dumps(bookmark)}\n{json.dumps(changed)}\n")

    application = web.Application()
    application.router.add_get("/api/v1/nodes", watch)
    url, runner = await serve(application)
    (tmp_path / "token").write_text("token")
    async with aiohttp.ClientSession() as session:
        api = KubernetesApi(session, url, tmp_path / "token", None)
        assert [event async for event in api.watch("/api/v1/nodes", "1")] == [changed]
    await runner.cleanup()
    assert 60 < (WATCH_TIMEOUT.sock_read or 0) <= 70


@pytest.mark.parametrize(
    ("labels", "seconds"),
    [
        ({}, 40),
        ({"cloud.google.com/gke-spot": "true"}, 15),
        ({"cloud.google.com/gke-spot": "true", "spottrain.dev/shutdown-grace-seconds": "105"}, 40),
        ({"spottrain.dev/shutdown-grace-seconds": "20"}, 20),
    ],
    ids=["elsewhere", "gke", "a pool that asks for more", "a label"],
)
async def test_kubernetes_a_node_that_shuts_down_leaves_pods_its_own_grace(
    kubernetes: KubernetesCloud, labels: dict[str, str], seconds: float
) -> None:
    assert kubernetes.node is not None
    kubernetes.node["metadata"]["labels"] = labels
    kubernetes.pods = [disrupted("TerminationByKubelet")]
    (notice,) = await within(30, following(kubernetes))
    assert notice.deadline == DEADLINE - (40 - seconds) * SECOND
