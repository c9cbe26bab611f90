"""What every SignalSource promises, against the in-memory one, EC2's metadata service and the API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
from aiohttp import web

from memory_signals import MemorySource
from spottrain_api.contract import Notice, NoticeKind
from spottrain_watcher.ec2 import (
    ENV_ENDPOINT,
    HEADER_TOKEN,
    HEADER_TTL,
    PATH_INSTANCE_ACTION,
    PATH_REBALANCE,
    PATH_TOKEN,
    Ec2Source,
)
from spottrain_watcher.kubernetes_api import KubernetesApi
from spottrain_watcher.kubernetes_signals import KubernetesSource
from spottrain_watcher.signal_source import SignalSource

NODE = "node-1"
DEADLINE = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)


class Cloud(Protocol):
    """The other side of a source, as the tests need it."""

    @property
    def source(self) -> SignalSource: ...

    async def preempt(self) -> None: ...
    async def cancel(self) -> None: ...
    async def break_down(self) -> None: ...
    async def repair(self) -> None: ...


@dataclass
class MemoryCloud:
    source: MemorySource = field(default_factory=MemorySource)

    async def preempt(self) -> None:
        seen = DEADLINE - timedelta(seconds=120)
        await self.source.announce(Notice(id="1", node=NODE, source="memory", deadline=DEADLINE, observed_at=seen))

    async def cancel(self) -> None:
        await self.source.announce()

    async def break_down(self) -> None:
        self.source.trouble = "The memory gives no usable answer: the test says so."

    async def repair(self) -> None:
        self.source.trouble = None


@dataclass
class Ec2Cloud:
    """A metadata service with the manners of the real one: tokens, 404 for nothing, and bad moments."""

    source: Ec2Source = field(init=False)
    bodies: dict[str, str] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_put(PATH_TOKEN, self._put_token)
        for path in (PATH_INSTANCE_ACTION, PATH_REBALANCE):
            application.router.add_get(path, self._get)
        return application

    async def _put_token(self, request: web.Request) -> web.Response:
        assert int(request.headers[HEADER_TTL]) > 0
        self.tokens.append(f"token-{len(self.tokens)}")
        return web.Response(text=self.tokens[-1])

    async def _get(self, request: web.Request) -> web.Response:
        if self.trouble:
            kind = self.trouble[0]
            if kind == "slow":
                await asyncio.sleep(5)
            if kind == "malformed":
                return web.Response(text="<html>not here</html>")
            return web.Response(status=500)
        if not self.tokens or request.headers.get(HEADER_TOKEN) != self.tokens[-1]:
            return web.Response(status=401)
        body = self.bodies.get(request.path)
        return web.Response(status=404) if body is None else web.Response(text=body, headers=self.headers)

    async def preempt(self) -> None:
        self.bodies[PATH_INSTANCE_ACTION] = json.dumps({"action": "terminate", "time": "2030-01-01T12:00:00Z"})

    async def cancel(self) -> None:
        self.bodies.clear()

    async def break_down(self) -> None:
        self.trouble.append("malformed")

    async def repair(self) -> None:
        self.trouble.clear()


@dataclass
class KubernetesCloud:
    """Lists and watches of one node and its pods, as the API server does them."""

    source: KubernetesSource = field(init=False)
    node: dict[str, Any] | None = field(default_factory=lambda: node_object())
    pods: list[dict[str, Any]] = field(default_factory=list)
    is_broken: bool = False
    version: int = 1
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/api/v1/nodes", self._nodes)
        application.router.add_get("/api/v1/pods", self._pods)
        return application

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == f"metadata.name={NODE}"
        return await self._answer(request, lambda: [self.node] if self.node else [])

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == f"spec.nodeName={NODE}"
        return await self._answer(request, lambda: self.pods)

    async def _answer(self, request: web.Request, items: Any) -> web.StreamResponse:
        if self.is_broken:
            return web.Response(status=503)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items()})
        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        async with self.changed:
            await self.changed.wait_for(lambda: self.version != seen)
        if self.is_broken:
            await response.write(b"{not json\n")
            return response
        for item in items():
            await response.write(json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n")
        # The watch then ends, as it does every few minutes; the source lists again.
        return response

    async def change(self) -> None:
        async with self.changed:
            self.version += 1
            self.changed.notify_all()

    async def preempt(self) -> None:
        taint = {
            "key": "aws-node-termination-handler/spot-itn",
            "effect": "NoSchedule",
            "timeAdded": (DEADLINE - timedelta(seconds=120)).isoformat(),
        }
        self.node = node_object(taints=[taint])
        await self.change()

    async def cancel(self) -> None:
        self.node = node_object()
        await self.change()

    async def break_down(self) -> None:
        self.is_broken = True
        await self.change()

    async def repair(self) -> None:
        self.is_broken = False
        await self.change()


def node_object(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": NODE, "resourceVersion": "1"}, "spec": spec}


async def serve(application: web.Application) -> tuple[str, web.AppRunner]:
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


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
        cloud.source = KubernetesSource(KubernetesApi(session, url, tmp_path / "token", None), NODE)
        yield cloud
    await runner.cleanup()


@pytest.fixture(params=["memory", "ec2", "kubernetes"])
def cloud(request: pytest.FixtureRequest) -> Cloud:
    if request.param == "memory":
        return MemoryCloud()
    cloud: Cloud = request.getfixturevalue(request.param)
    return cloud


async def following(cloud: Cloud) -> AsyncIterator[tuple[Notice, ...]]:
    async for notices in cloud.source.watch():
        yield notices


async def within(seconds: float, answers: AsyncIterator[tuple[Notice, ...]]) -> tuple[Notice, ...]:
    async with asyncio.timeout(seconds):
        return await anext(answers)


async def test_a_source_says_that_there_is_nothing_then_announces_and_takes_back(cloud: Cloud) -> None:
    answers = following(cloud)
    assert await within(5, answers) == ()
    await cloud.preempt()
    (notice,) = await within(5, answers)
    assert (notice.node, notice.kind, notice.deadline) == (NODE, NoticeKind.PREEMPT, DEADLINE)
    await cloud.cancel()
    assert await within(5, answers) == ()


async def test_a_source_that_starts_late_announces_what_stands(cloud: Cloud) -> None:
    await cloud.preempt()
    (notice,) = await within(5, following(cloud))
    assert notice.deadline == DEADLINE


async def test_the_same_signal_again_is_not_told_again(cloud: Cloud) -> None:
    answers = following(cloud)
    await cloud.preempt()
    told = await within(5, answers)
    await cloud.preempt()
    with pytest.raises(TimeoutError):
        assert await within(2.5, answers) != told


async def test_trouble_is_not_a_cancellation(cloud: Cloud) -> None:
    answers = following(cloud)
    await cloud.preempt()
    await within(5, answers)
    again = asyncio.create_task(within(15, answers))
    await cloud.break_down()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(again), 2.5)
    await cloud.repair()
    await cloud.cancel()
    assert await again == ()


async def test_a_source_that_hears_nothing_says_so_until_it_hears_again(cloud: Cloud) -> None:
    answers = following(cloud)
    assert await within(5, answers) == ()
    following_on = asyncio.create_task(within(60, answers))
    await becomes(lambda: cloud.source.trouble is None)
    await cloud.break_down()
    await becomes(lambda: cloud.source.trouble is not None)
    assert cloud.source.trouble is not None
    assert cloud.source.trouble.endswith(".")
    await cloud.repair()
    await becomes(lambda: cloud.source.trouble is None)
    following_on.cancel()


async def becomes(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_ec2_asks_for_a_new_token_when_the_old_one_is_refused(ec2: Ec2Cloud) -> None:
    answers = following(ec2)
    await within(5, answers)
    assert len(ec2.tokens) == 1
    ec2.tokens.append("issued to somebody else")
    await ec2.preempt()
    assert len(await within(5, answers)) == 1


@pytest.mark.parametrize("wrong", [timedelta(hours=2), timedelta(hours=-2)], ids=["ahead", "behind"])
async def test_ec2_a_nodes_wrong_clock_does_not_shorten_or_lengthen_a_notice(ec2: Ec2Cloud, wrong: timedelta) -> None:
    theirs = datetime.now(UTC) - wrong
    ec2.headers["Date"] = format_datetime(theirs, usegmt=True)
    time = (theirs + timedelta(seconds=120)).isoformat(timespec="seconds")
    ec2.bodies[PATH_INSTANCE_ACTION] = json.dumps({"action": "terminate", "time": time})
    (notice,) = await within(5, following(ec2))
    assert 110 < (notice.deadline - datetime.now(UTC)).total_seconds() < 125


async def test_ec2_hibernation_has_no_lead_time(ec2: Ec2Cloud) -> None:
    ec2.bodies[PATH_INSTANCE_ACTION] = json.dumps({"action": "hibernate", "time": "2030-01-01T12:00:00Z"})
    (notice,) = await within(5, following(ec2))
    assert notice.deadline <= datetime.now(UTC)


async def test_ec2_malformed_recommendation_does_not_hide_an_interruption(ec2: Ec2Cloud) -> None:
    await ec2.preempt()
    ec2.bodies[PATH_REBALANCE] = "nonsense"
    (notice,) = await within(5, following(ec2))
    assert notice.kind is NoticeKind.PREEMPT


async def test_ec2_recommendation_comes_beside_the_interruption(ec2: Ec2Cloud) -> None:
    answers = following(ec2)
    ec2.bodies[PATH_REBALANCE] = json.dumps({"noticeTime": "2030-01-01T11:00:00Z"})
    await within(5, answers)
    (recommendation,) = await within(5, answers)
    assert recommendation.kind is NoticeKind.REBALANCE
    await ec2.preempt()
    assert {notice.kind for notice in await within(5, answers)} == {NoticeKind.REBALANCE, NoticeKind.PREEMPT}


async def test_ec2_slow_service_is_waited_for(ec2: Ec2Cloud) -> None:
    ec2.trouble.append("slow")
    answers = following(ec2)
    first = asyncio.create_task(within(15, answers))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(first), 2.5)
    ec2.trouble.clear()
    assert await first == ()


async def test_kubernetes_deletion_of_the_node_is_final(kubernetes: KubernetesCloud) -> None:
    answers = following(kubernetes)
    await within(5, answers)
    kubernetes.node = None
    await kubernetes.change()
    (notice,) = await within(5, answers)
    assert (notice.source, notice.cancellable) == ("node-deleted", False)


async def test_kubernetes_disruption_of_a_pod_names_the_pod(kubernetes: KubernetesCloud) -> None:
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "lastTransitionTime": (DEADLINE - timedelta(seconds=40)).isoformat(),
    }
    pod: dict[str, Any] = {
        "metadata": {"name": "train-1", "uid": "u-1"},
        "spec": {"terminationGracePeriodSeconds": 40},
        "status": {"conditions": [condition]},
    }
    kubernetes.pods = [pod]
    (notice,) = await within(5, following(kubernetes))
    assert (notice.id, notice.source, notice.kind) == (
        "pod/u-1",
        "condition:EvictionByEvictionAPI",
        NoticeKind.EVICT,
    )
    assert notice.deadline == DEADLINE
    deleted = {"deletionTimestamp": (DEADLINE - 9 * SECOND).isoformat()}
    kubernetes.pods = [pod | {"metadata": pod["metadata"] | deleted}]
    (notice,) = await within(5, following(kubernetes))
    assert notice.deadline == DEADLINE - 9 * SECOND, "whoever deletes it may leave it less"


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
    said_at = DEADLINE - 40 * SECOND
    condition = {
        **{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"},
        "lastTransitionTime": said_at.isoformat(),
    }
    assert kubernetes.node is not None
    kubernetes.node["metadata"]["labels"] = labels
    kubernetes.pods = [
        {
            "metadata": {"name": "train-1", "uid": "u-1"},
            "spec": {"terminationGracePeriodSeconds": 40},
            "status": {"conditions": [condition]},
        }
    ]
    (notice,) = await within(5, following(kubernetes))
    assert notice.deadline == said_at + seconds * SECOND
