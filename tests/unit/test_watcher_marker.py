"""What the watcher writes on its Node: its own mark first, then the notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from spottrain_api.contract import ANNOTATION_NOTICE, ANNOTATION_WATCHER, watcher_mark
from spottrain_watcher.kubernetes_api import KubernetesApi
from spottrain_watcher.node_marker import NodeMarker


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
