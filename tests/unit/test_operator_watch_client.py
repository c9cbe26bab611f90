"""The operator's lists and watches of an API server that refuses for now."""

from __future__ import annotations

import asyncio

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from memory_cluster import MemoryCluster
from spottrain_operator.cluster.client import ClusterError, Kind
from spottrain_operator.cluster.watch_client import KubernetesWatch
from spottrain_operator.cluster.watched_cluster import WatchedCluster

EMPTY = {"metadata": {"resourceVersion": "7"}, "items": []}


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

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server:
        info = kopf.ConnectionInfo(server=str(server.make_url("")))
        async with KubernetesWatch(lambda: info) as watches:
            with pytest.raises(ClusterError, match="429: too many requests") as refusal:
                await watches.list_kind(Kind.NODES)
            assert refusal.value.retry_after == 1.0
            asked_at.clear()
            synced = asyncio.Event()
            following = asyncio.create_task(WatchedCluster(MemoryCluster(), watches, lambda *_: None).follow(synced))
            await asyncio.wait_for(synced.wait(), 20)
            following.cancel()
    assert len(asked_at) == 3
    assert all(second - first >= 1.0 for first, second, *_ in asked_at.values())
