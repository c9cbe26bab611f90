"""Fixtures of the contract tests of the cluster client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster_setups import EACH_CLUSTER, Setup, in_memory, on_a_control_plane, put_job
from spottrain_operator.kube.kopf_watch import watch_jobs
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.watched_cluster import WatchedCluster


@pytest.fixture(params=EACH_CLUSTER)
async def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    """Each implementation of the cluster client, with a cluster."""
    where, _, watched = request.param.partition(", ")
    async with on_a_control_plane(request, monkeypatch) if where == "real" else in_memory() as made:
        if not watched:
            yield made
            return
        by_kopf = watch_jobs if where == "real" else None
        made.cluster = cluster = WatchedCluster(made.direct, lambda _resource, _change: None, watch_jobs=by_kopf)
        synced = asyncio.Event()
        following = asyncio.create_task(cluster.follow(synced))
        await synced.wait()
        yield made
        if where == "real":
            # kopf stops at once only after it has begun to watch, which it has if it shows a job.
            await put_job(made, "last")
        following.cancel()
        await asyncio.wait({following})


@pytest.fixture
async def job(setup: Setup) -> Manifest:
    """A job in the cluster of `setup`."""
    return await put_job(setup, "gpt")
