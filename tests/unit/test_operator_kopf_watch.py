"""What kopf shows of jobs, as events for the cache."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from operator_world import KEY, job
from spottrain_api.contract.names import GROUP, PLURAL, VERSION
from spottrain_operator.kube import kopf_watch
from spottrain_operator.kube.errors import ExpiredError
from spottrain_operator.kube.kopf_watch import LISTED, JobEvents, watch_jobs
from spottrain_operator.kube.resources import JOBS
from spottrain_operator.objects.watched_cluster import WatchedCluster
from world.cluster import MemoryCluster


def raw(type: str | None, version: int, uid: str = "u1") -> dict[str, Any]:
    return {"type": type, "object": {"metadata": {"name": "gpt", "uid": uid, "resourceVersion": str(version)}}}


def test_jobs_that_are_there_and_what_becomes_of_them_are_shown() -> None:
    events = JobEvents()
    assert events.convert(LISTED) is None
    found = [events.convert(each) for each in (raw(None, 3), raw("MODIFIED", 5), raw("DELETED", 6))]
    assert [(each.version, each.deleted) for each in found if each] == [(3, False), (5, False), (6, True)]


def test_a_second_list_expires_the_watch() -> None:
    """After an interruption, kopf lists again, without what was deleted meanwhile."""
    events = JobEvents()
    events.convert(LISTED)
    events.convert(raw("ADDED", 4))
    with pytest.raises(ExpiredError):
        events.convert(LISTED)


def discovered(path: str) -> dict[str, Any]:
    """What kopf asks the API server for before it lists the jobs."""
    groups = [("apiextensions.k8s.io", "v1", "customresourcedefinitions"), (GROUP, VERSION, PLURAL)]
    kinds = {"/api/v1": "namespaces"} | {f"/apis/{name}/{version}": kind for name, version, kind in groups}
    return {
        "versions": ["v1"],
        "groups": [
            {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}
            for name, version, _ in groups
        ],
        "resources": [
            {"name": kind, "kind": kind, "singularName": "", "namespaced": True, "verbs": ["list", "watch", "patch"]}
            for at, kind in kinds.items()
            if at == path
        ],
    }


@pytest.mark.parametrize("left", [[], ["new"]], ids=["none is left", "a new one is left"])
async def test_jobs_that_are_deleted_before_kopf_lists_again_are_missed(
    monkeypatch: pytest.MonkeyPatch, left: list[str]
) -> None:
    """As if the API server no longer knows the version that kopf has seen."""
    cluster = MemoryCluster()
    cluster.put_job(job())
    watched_jobs, is_back = asyncio.Event(), asyncio.Event()

    async def list_or_watch(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            listing = await cluster.list(JOBS)
            meta = {"resourceVersion": str(listing.version)}
            return web.json_response({"metadata": meta, "items": list(listing.items)})
        watched_jobs.set()
        response = web.StreamResponse()
        await response.prepare(request)
        await is_back.wait()
        is_back.clear()
        gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
        await response.write(json.dumps(gone).encode() + b"\n")
        return response

    async def discover(request: web.Request) -> web.Response:
        return web.json_response(discovered(request.path))

    application = web.Application()
    application.router.add_get(f"/apis/{GROUP}/{VERSION}/{PLURAL}", list_or_watch)
    application.router.add_get("/{path:.*}", discover)
    async with TestServer(application) as server:
        info = kopf.ConnectionInfo(server=str(server.make_url("")))
        monkeypatch.setattr(kopf_watch, "connection_info", lambda: info)
        watched, synced = WatchedCluster(cluster, lambda *_: None, watch_jobs=watch_jobs), asyncio.Event()
        following = asyncio.create_task(watched.follow(synced))
        try:
            async with asyncio.timeout(20):
                await synced.wait()
                await watched_jobs.wait()
                del cluster.jobs[KEY]
                for name in left:
                    cluster.put_job({**job(), "metadata": {"namespace": "team", "name": name}})
                watched_jobs.clear()
                is_back.set()
                while [each["metadata"]["name"] for each in (await watched.list(JOBS)).items] != left:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await watched_jobs.wait()  # kopf ends sooner then
        finally:
            following.cancel()
            await asyncio.wait({following})


@pytest.mark.parametrize("end", [OSError("connection refused"), None], ids=["fails", "ends"])
async def test_a_job_that_is_deleted_before_kopf_runs_again_is_missed(
    monkeypatch: pytest.MonkeyPatch, end: Exception | None
) -> None:
    """A new kopf lists the jobs without it, and nobody writes to a job that is over."""
    cluster = MemoryCluster()
    cluster.put_job(job())
    num_runs = 0

    def run_kopf(put: Callable[[Any], None], stop: threading.Event) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            del cluster.jobs[KEY]
            put(end)
        stop.wait()

    monkeypatch.setattr(kopf_watch, "_run_kopf", run_kopf)
    watched, synced = WatchedCluster(cluster, lambda *_: None, watch_jobs=watch_jobs), asyncio.Event()
    following = asyncio.create_task(watched.follow(synced))
    try:
        await asyncio.wait_for(synced.wait(), 20)
        async with asyncio.timeout(20):
            while num_runs < 2:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        assert list((await watched.list(JOBS)).items) == []
    finally:
        following.cancel()
        await asyncio.wait({following})
