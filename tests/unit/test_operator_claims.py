"""Of the jobs at one checkpoint folder, one trains.

The tests show which one it is, and how the others learn that it is over.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spottrain_operator.control_api.agents import AssignmentBoard, ReportBox
from spottrain_operator.core.facts.folders import folder_of
from spottrain_operator.core.model import Rival
from spottrain_operator.core.plan import plan
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, Manifest
from spottrain_operator.metrics import Metrics
from spottrain_operator.objects.claims import FolderClaims, RivalFinder
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.history import HistoryKeeper
from spottrain_operator.objects.observe import job_view
from spottrain_operator.reconcile import Reconciler
from spottrain_operator.tracing import ChangeTracer
from world.cluster import MemoryCluster

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
URI = "s3://bucket/run"
GENERATION = {
    "number": 1,
    "state": "Ended",
    "rendezvousID": "r",
    "rendezvousEndpoint": "e:1",
    "worldSize": 1,
    "startedAt": BEGIN.isoformat(),
    "members": [],
    "templateHash": "t",
}


def job(name: str, age: float = 0.0, uri: str = URI, status: dict[str, Any] | None = None, **more: Any) -> Manifest:
    """A job that is `age` seconds old; `more` are its namespace, uid and endpointURL."""
    created_at = BEGIN - timedelta(seconds=age)
    endpoint = {"endpointURL": more["endpoint"]} if "endpoint" in more else {}
    return {
        "metadata": {
            "namespace": more.get("namespace", "team"),
            "name": name,
            "uid": more.get("uid", name),
            "creationTimestamp": created_at.isoformat(),
        },
        "spec": {
            "image": "local/train",
            "entrypoint": {"script": "train.py"},
            "nodes": {"max": 2},
            "batch": {"global": 8},
            "checkpoint": {"uri": uri, **endpoint},
        },
        "status": status or {},
    }


MINE = job("mine")
CASES = {
    "alone": ([], None),
    "older, at the same folder": ([job("old", 9)], "old"),
    "younger": ([job("new", -9)], None),
    "as old, with a smaller uid": ([job("twin", uid="a")], "twin"),
    "as old, with a larger uid": ([job("twin", uid="z")], None),
    "in another namespace": ([job("old", 9, namespace="other")], None),
    "with a slash at the end": ([job("old", 9, f"{URI}/")], "old"),
    "at another folder": ([job("old", 9, "s3://bucket/other")], None),
    "succeeded": ([job("old", 9, status={"phase": "Succeeded"})], None),
    "failed": ([job("old", 9, status={"phase": "Failed"})], None),
    "suspended": ([job("old", 9, status={"phase": "Suspended"})], "old"),
    "the oldest of several": ([job("old", 9), job("older", 99), job("middle", 50)], "older"),
    "younger, but it has begun": ([job("new", -9, status={"generation": GENERATION})], "new"),
    "older, and both have begun": ([job("old", 9, status={"generation": GENERATION})], "old"),
}


def find(cluster: MemoryCluster, manifest: Manifest) -> Rival | None:
    return asyncio.run(RivalFinder(cluster).rival_of(job_view(manifest)))


@pytest.mark.parametrize(("others", "first"), CASES.values(), ids=CASES)
def test_who_comes_first(others: list[Manifest], first: str | None) -> None:
    cluster = MemoryCluster()
    for each in (*others, MINE):
        meta = each["metadata"]
        cluster.jobs[JobKey(namespace=meta["namespace"], name=meta["name"])] = each
    rival = find(cluster, MINE)
    assert (rival.name if rival is not None else None) == first


def test_a_job_that_runs_is_not_put_behind_one_that_is_older() -> None:
    claims = FolderClaims()
    claims.note(job_view(job("old", 9)))
    begun = job_view(job("mine", status={"generation": GENERATION}))
    claims.note(begun)
    assert claims.first(folder_of(begun)) == JobKey(namespace="team", name="mine")


def test_a_job_that_is_being_deleted_leaves_its_folder() -> None:
    """It trains no more, and the finalizers of others may keep it for long."""
    claims = FolderClaims()
    leaving = job("old", 9)
    for meta in ({}, {"deletionTimestamp": BEGIN.isoformat()}):
        claims.note(job_view(leaving | {"metadata": leaving["metadata"] | meta}))
    assert claims.first(folder_of(job_view(leaving))) is None


def test_a_rival_that_is_over_is_noticed_even_if_nobody_said_so() -> None:
    cluster = MemoryCluster()
    older = cluster.put_job(job("old", 9))
    mine = job_view(cluster.put_job(MINE))
    finder = RivalFinder(cluster)

    async def rival() -> str | None:
        found = await finder.rival_of(mine)
        return found.name if found is not None else None

    async def lives() -> list[str | None]:
        seen = [await rival()]
        await cluster.replace(JOBS, older | {"status": {"phase": "Failed"}}, subresource="status")
        seen.append(await rival())
        # Its name is used again: that one is younger.
        await cluster.delete(JOBS, "old", namespace="team", uid="old")
        cluster.put_job(job("old", -9, uid="again"))
        seen.append(await rival())
        return seen

    assert asyncio.run(lives()) == ["old", None, None]


def test_a_job_that_is_sent_to_another_endpoint_claims_its_folder_there() -> None:
    here, there = job_view(job("old", 9)), job_view(job("old", 9, endpoint="http://minio:9000"))
    claims = FolderClaims()
    claims.note(here)
    claims.note(there)
    assert claims.first(folder_of(here)) is None
    assert claims.first(folder_of(there)) == JobKey(namespace="team", name="old")


def test_what_is_forgotten_leaves_nothing() -> None:
    claims, view = FolderClaims(), job_view(MINE)
    for name in ("a", "b"):
        claims.note(replace(view, name=name, uid=name))
    claims.note(replace(view, name="a", uid="c"))
    assert claims.first(folder_of(view)) == JobKey(namespace="team", name="b")
    for name in ("a", "b", "never-seen"):
        claims.forget(JobKey(namespace="team", name=name))
    assert vars(claims) == vars(FolderClaims())


def test_the_younger_of_two_jobs_gets_its_pods_when_the_older_is_deleted() -> None:
    cluster = MemoryCluster()
    old, mine = (JobKey(namespace="team", name=name) for name in ("old", "mine"))
    cluster.put_job(job("old", 9))
    cluster.put_job(MINE)
    reconciler = Reconciler(
        plan=plan,
        cluster=cluster,
        tainted_nodes=list,
        board=AssignmentBoard(),
        reports=ReportBox(lambda _job, urgent: None, now=lambda: BEGIN),
        metrics=Metrics(num_agents=lambda: 0),
        tracer=ChangeTracer(None),
        history=HistoryKeeper(cluster),
        control=lambda: ControlAddress(url="https://control:8443"),
        now=lambda: BEGIN,
        listening_since=lambda: BEGIN,
    )

    def owners() -> set[str]:
        return {name.rpartition("-")[0] for _, name in cluster.pods}

    async def lives() -> None:
        assert (await reconciler.reconcile(mine)).requeue_after == 5
        await reconciler.reconcile(old)
        assert owners() == {"old"}
        status = cluster.jobs[mine]["status"]
        assert "(s3://bucket/run) is the folder of the unfinished job team/old" in status["message"]
        await cluster.delete(JOBS, "old", namespace="team", uid="old")
        await reconciler.reconcile(old)
        await reconciler.reconcile(mine)
        assert owners() == {"mine"}

    asyncio.run(lives())
