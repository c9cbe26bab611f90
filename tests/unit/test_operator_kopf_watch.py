"""What kopf shows of jobs, as events for the cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from memory_cluster import MemoryCluster
from operator_world import KEY, job
from spottrain_operator.cluster import kopf_watch
from spottrain_operator.cluster.client import ExpiredError
from spottrain_operator.cluster.kopf_watch import JobEvents, KopfWatch
from spottrain_operator.cluster.watched_cluster import WatchedCluster


def raw(type: str | None, version: int, uid: str = "u1") -> dict[str, Any]:
    return {"type": type, "object": {"metadata": {"name": "gpt", "uid": uid, "resourceVersion": str(version)}}}


def test_jobs_that_are_there_and_what_becomes_of_them_are_shown() -> None:
    events = JobEvents()
    found = [events.take(each) for each in (raw(None, 3), raw("MODIFIED", 5), raw("DELETED", 6))]
    assert [(each.version, each.deleted) for each in found] == [(3, False), (5, False), (6, True)]


def test_a_job_that_is_listed_again_expires_the_watch() -> None:
    """After an interruption, kopf lists again, without what was deleted meanwhile."""
    events = JobEvents()
    events.take(raw(None, 3))
    events.take(raw("ADDED", 4, uid="u2"))
    with pytest.raises(ExpiredError):
        events.take(raw(None, 4, uid="u2"))


def test_a_job_that_was_deleted_may_be_listed_under_its_name() -> None:
    events = JobEvents()
    events.take(raw("ADDED", 3))
    events.take(raw("DELETED", 4))
    assert not events.take(raw(None, 7, uid="u2")).deleted


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
    watched, synced = WatchedCluster(cluster, KopfWatch(cluster), lambda *_: None), asyncio.Event()
    following = asyncio.create_task(watched.follow(synced))
    try:
        await asyncio.wait_for(synced.wait(), 20)
        async with asyncio.timeout(20):
            while num_runs < 2:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        assert list(await watched.list_jobs()) == []
    finally:
        following.cancel()
        await asyncio.wait({following})
