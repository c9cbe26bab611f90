"""What a real API server is asked, within which limits, and what its answers mean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spottrain_api.contract.names import LABEL_JOB
from spottrain_operator.kube import kubernetes_cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.kubernetes_cluster import KubernetesCluster
from spottrain_operator.kube.limits import DEFAULT_LIMITS, ClientLimits
from spottrain_operator.kube.resources import EVENTS, JOBS, LEASES, NODES, PODS, SECRETS, TOKEN_REVIEWS, Manifest
from spottrain_operator.objects.watched_cluster import OURS, WatchedCluster

EMPTY = {"metadata": {"resourceVersion": "7"}, "items": []}


@asynccontextmanager
async def watching(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], limits: ClientLimits = DEFAULT_LIMITS
) -> AsyncIterator[KubernetesCluster]:
    """The client of an API server with these answers."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server:
        info = kopf.ConnectionInfo(server=str(server.make_url("")))
        async with KubernetesCluster(limits, connect=lambda: info) as watches:
            yield watches


async def test_lists_are_repeated_after_the_time_that_the_api_server_asks_for() -> None:
    asked_at: dict[str, list[float]] = {}

    async def answer(request: web.Request) -> web.Response:
        times = asked_at.setdefault(request.path, [])
        times.append(asyncio.get_running_loop().time())
        if "watch" in request.query:
            await asyncio.sleep(60)
        if len(times) == 1:
            return web.json_response({"message": "too many requests"}, status=429, headers={"Retry-After": "1"})
        return web.json_response(EMPTY)

    async with watching(answer) as watches:
        with pytest.raises(ClusterError, match="429: too many requests") as refusal:
            await watches.list(NODES)
        assert refusal.value.retry_after == 1.0
        asked_at.clear()
        synced = asyncio.Event()
        following = asyncio.create_task(WatchedCluster(watches, lambda *_: None).follow(synced))
        await asyncio.wait_for(synced.wait(), 20)
        following.cancel()
    assert len(asked_at) == 3
    assert all(second - first >= 1.0 for first, second, *_ in asked_at.values())


async def test_the_lease_the_secret_and_the_caches_wait_for_no_limit_and_reviews_for_their_own() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(EMPTY)

    async with watching(answer, ClientLimits(qps=1e-9, burst=1)) as cluster:
        await cluster.get(JOBS, "gpt", namespace="team")
        limited = [
            asyncio.create_task(request)
            for request in (cluster.get(PODS, "gpt-1", namespace="team"), cluster.list(EVENTS, namespace="team"))
        ]
        for resource in (LEASES, SECRETS):
            await cluster.get(resource, "one", namespace="system")
        for resource in (JOBS, NODES, PODS):
            await cluster.list(resource)
        await cluster.create(TOKEN_REVIEWS, {})
        limited.append(asyncio.create_task(cluster.get_raw("/openid/v1/jwks")))
        done, waiting = await asyncio.wait(limited, timeout=0.05)
        assert not done
        for each in waiting:
            each.cancel()


def pod(job: str, version: int, value: str = "") -> Manifest:
    meta = {"namespace": "team", "name": f"{job}-1", "uid": job, "resourceVersion": str(version)}
    container = {"env": [{"name": "A", "value": value}]}
    return {"metadata": meta | {"labels": {LABEL_JOB: job}}, "spec": {"containers": [container]}, "status": {}}


def line(pod: Manifest) -> bytes:
    """As Go writes it."""
    return json.dumps({"type": "ADDED", "object": pod}).replace("<", "\\u003c").encode() + b"\n"


async def test_pods_are_selected_by_the_operators_label_and_by_a_job() -> None:
    asked: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query.get("labelSelector"))
        return web.json_response(EMPTY)

    async with watching(answer) as watches:
        await watches.list(NODES)
        await watches.list(PODS, labels=OURS)
        await watches.list(PODS, namespace="team", labels={**OURS, LABEL_JOB: "gpt"})
    of_jobs = "app.kubernetes.io/managed-by=spottrain,spottrain.dev/job,spottrain.dev/job!="
    assert asked == [None, of_jobs, "app.kubernetes.io/managed-by=spottrain,spottrain.dev/job=gpt"]


@asynccontextmanager
async def watched(pods: list[Manifest]) -> AsyncIterator[WatchedCluster]:
    """Caches of an API server whose watches show the pods.

    Its first list has none of them, and each further list one more.
    """
    num_lists = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal num_lists
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            for each in pods if request.path.endswith("pods") else []:
                if int(each["metadata"]["resourceVersion"]) > int(request.query["resourceVersion"]):
                    await response.write(line(each))
            await asyncio.sleep(60)
            return response
        if not request.path.endswith("pods"):
            return web.json_response(EMPTY)
        num_lists += 1
        listed = pods[: num_lists - 1]
        version = max((each["metadata"]["resourceVersion"] for each in listed), default="7")
        return web.json_response({"metadata": {"resourceVersion": version}, "items": listed})

    async with watching(answer) as watches:
        cluster = WatchedCluster(watches, lambda *_: None)
        following = asyncio.create_task(cluster.follow(asyncio.Event()))
        try:
            yield cluster
        finally:
            following.cancel()
            await asyncio.wait({following})


async def until_known(cluster: WatchedCluster, *jobs: str) -> None:
    """Wait until the cache has pods of these jobs."""
    async with asyncio.timeout(20):
        while cluster.jobs_that_left_something() != {JobKey(namespace="team", name=job) for job in jobs}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_largest_pod_that_etcd_holds_is_watched_and_takes_little_memory() -> None:
    largest = pod("large", 8, "<" * (3 * 2**19))
    assert len(line(largest)) > 9 * 2**20
    async with watched([largest]) as cluster:
        await until_known(cluster, "large")
        [kept] = (await cluster.list(PODS, namespace="team", labels={LABEL_JOB: "large"})).items
    assert len(json.dumps(kept)) < 1000


async def test_a_pod_that_is_too_large_for_a_watch_is_listed_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes_cluster, "MAX_LINE_BYTES", 2**16)
    async with watched([pod("large", 8, "<" * 2**16), pod("gpt", 9)]) as cluster:
        await until_known(cluster, "large", "gpt")
