"""What the watcher writes on its Node.

It is its own mark first, then the notices with it.
"""

from __future__ import annotations

import asyncio
import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from spottrain_api.contract.names import ANNOTATION_NOTICE, ANNOTATION_WATCHER
from spottrain_api.contract.notices import Notice, watcher_mark
from spottrain_watcher.kubernetes_api import KubernetesApi
from spottrain_watcher.node_marker import NodeMarker

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GONE = Notice(id="1", node="n", source="node-deleted", deadline=NOW, observed_at=NOW)


async def test_the_mark_is_written_at_the_start_and_leaves_an_earlier_notice(tmp_path: Path) -> None:
    """The API server refuses the first try. The sources have not reported yet."""
    tries: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    annotations = {ANNOTATION_NOTICE: "an earlier watcher's"}

    async def patch(request: web.Request) -> web.Response:
        body = await request.json()
        tries.put_nowait(body)
        if tries.qsize() == 1:
            return web.Response(status=500)
        annotations.update(body["metadata"]["annotations"])
        return web.json_response({})

    application = web.Application()
    application.router.add_patch("/api/v1/nodes/n", patch)
    (tmp_path / "token").write_text("t")
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        api = KubernetesApi(session, str(server.make_url("")).rstrip("/"), tmp_path / "token", None)
        running = asyncio.create_task(NodeMarker(api, "n", watcher_mark("proof")).run())
        async with asyncio.timeout(10):
            while ANNOTATION_WATCHER not in annotations:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
    assert tries.qsize() == 2
    assert annotations == {
        ANNOTATION_NOTICE: "an earlier watcher's",
        ANNOTATION_WATCHER: watcher_mark("proof"),
    }


@pytest.mark.parametrize("hears_all", [True, False])
async def test_a_node_that_is_registered_anew_is_marked_anew(tmp_path: Path, hears_all: bool) -> None:
    """`kubectl delete node`, and then a kubelet that restarts: its containers run on.

    A watcher that hears no cloud yet shows no notices, but it runs there, too.
    """
    new: dict[str, Any] = {"metadata": {"name": "n", "resourceVersion": "1"}, "spec": {}}
    node: dict[str, Any] | None = copy.deepcopy(new)
    marked, missed = asyncio.Event(), asyncio.Event()

    async def get(_: web.Request) -> web.Response:
        if node is None:
            missed.set()
            return web.Response(status=404)
        return web.json_response(node)

    async def patch(request: web.Request) -> web.Response:
        if node is None:
            missed.set()
            return web.Response(status=404)
        annotations = (await request.json())["metadata"]["annotations"]
        node["metadata"].setdefault("annotations", {}).update(annotations)
        marked.set()
        return web.json_response({})

    application = web.Application()
    application.router.add_get("/api/v1/nodes/n", get)
    application.router.add_patch("/api/v1/nodes/n", patch)
    (tmp_path / "token").write_text("t")
    async with TestServer(application) as server, aiohttp.ClientSession() as session, asyncio.timeout(20):
        api = KubernetesApi(session, str(server.make_url("")).rstrip("/"), tmp_path / "token", None)
        marker = NodeMarker(api, "n", watcher_mark("proof"))
        running = asyncio.create_task(marker.run())
        await marked.wait()
        node = None
        marker.show(GONE) if hears_all else marker.renew()
        await missed.wait()
        node = copy.deepcopy(new)
        marked.clear()
        marker.show(None) if hears_all else marker.renew()
        await marked.wait()
        running.cancel()
    assert node["metadata"]["annotations"] == {ANNOTATION_WATCHER: watcher_mark("proof")}
