"""The contract of lists, watches and answers to deletions.

The caches rely on it.

It holds for the cluster in memory and for a real API server.
"""

from __future__ import annotations

import asyncio

import pytest

from cluster_setups import MemorySetup, Setup, pod_of, pods_of
from spottrain_api.contract.names import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_operator.kube.cluster import Listing, WatchEvent, is_gone
from spottrain_operator.kube.errors import ExpiredError
from spottrain_operator.kube.resources import JOBS, PODS, Manifest, Resource
from spottrain_operator.objects.watched_cluster import OURS


async def events_of(setup: Setup, resource: Resource, version: int, names: set[str]) -> list[tuple[str, bool]]:
    """Watch until the last of these objects is gone.

    Returns the names in the order of the watch, and whether each object is gone.
    """
    found: list[tuple[str, bool]] = []
    async with asyncio.timeout(20):
        async for event in setup.direct.watch(resource, version):
            if event.object is not None and event.object["metadata"]["name"] in names:
                found.append((event.object["metadata"]["name"], event.deleted))
                if event.deleted:
                    return found
    raise AssertionError(f"the watch has ended after {found}")


async def test_a_watch_shows_what_has_happened_since_a_list(setup: Setup, job: Manifest) -> None:
    before = await setup.direct.list(PODS)
    await setup.cluster.create(PODS, pod_of(setup, job, 1))
    pod = (await pods_of(setup, job))["gpt-1"]
    await setup.cluster.delete(PODS, "gpt-1", namespace=setup.namespace, uid=pod["metadata"]["uid"], grace_seconds=0)
    found = await events_of(setup, PODS, before.version, {"gpt-1"})
    assert found[0] == ("gpt-1", False)
    assert found[-1] == ("gpt-1", True)


async def test_a_list_names_the_pods_of_one_job_in_one_namespace(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create(PODS, pod_of(setup, job, 1))

    async def listed(job: str) -> Listing:
        return await setup.direct.list(
            PODS,
            namespace=setup.namespace,
            labels={LABEL_JOB: job},
            keep=lambda pod: {"metadata": pod["metadata"]},
        )

    [pod] = (await listed("gpt")).items
    assert list(pod) == ["metadata"], "only what is kept of it"
    assert list((await listed("other")).items) == []
    assert (await listed("gpt")).version >= int(pod["metadata"]["resourceVersion"])


@pytest.mark.parametrize(
    "labels",
    [{"app": "web"}, {LABEL_MANAGED_BY: MANAGED_BY}, {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: ""}],
    ids=["of another app", "of no job", "of a job without a name"],
)
async def test_pods_that_are_not_the_operators_are_not_watched(
    setup: Setup, job: Manifest, labels: dict[str, str]
) -> None:
    stranger = pod_of(setup, job, 1)
    stranger["metadata"]["labels"] = labels
    await setup.cluster.create(PODS, stranger)
    listing = await setup.direct.list(PODS, namespace=setup.namespace, labels=OURS)
    assert list(listing.items) == []


async def test_a_watch_from_a_version_that_is_too_old_has_expired(setup: Setup, job: Manifest) -> None:
    if isinstance(setup, MemorySetup):
        setup.direct.forget_history()

    async def watch() -> WatchEvent:
        return await anext(aiter(setup.direct.watch(JOBS, 1)))

    with pytest.raises(ExpiredError):
        await watch()


@pytest.mark.parametrize("placed", [False, True], ids=["no node", "on a node"])
async def test_the_answer_to_a_deletion_says_whether_the_pod_is_gone(
    setup: Setup, job: Manifest, placed: bool
) -> None:
    """The caches rely on it."""
    pod = pod_of(setup, job, 1)
    pod["spec"] |= {"nodeName": setup.nodes[0]} if placed else {"schedulerName": "none"}
    made = await setup.cluster.create(PODS, pod)
    uid = made["metadata"]["uid"]
    deleted = await setup.cluster.delete(
        PODS, "gpt-1", namespace=setup.namespace, uid=uid, grace_seconds=0 if placed else None
    )
    assert deleted is not None
    assert is_gone(deleted)
    assert await pods_of(setup, job) == {}
    assert await setup.cluster.delete(PODS, "gpt-1", namespace=setup.namespace, uid=uid) is None


async def test_a_pod_that_gets_its_grace_period_is_still_there(setup: Setup, job: Manifest) -> None:
    pod = pod_of(setup, job, 1)
    pod["spec"]["nodeName"] = setup.nodes[0]
    made = await setup.cluster.create(PODS, pod)
    deleted = await setup.cluster.delete(PODS, "gpt-1", namespace=setup.namespace, uid=made["metadata"]["uid"])
    assert deleted is not None
    assert not is_gone(deleted)
    assert "deletionTimestamp" in deleted["metadata"]
    assert int(deleted["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
