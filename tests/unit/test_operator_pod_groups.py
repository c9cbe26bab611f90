"""A PodGroup for each job, by which its pods get the nodes of nodes.min at once, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_operator.core.model import PodView
from spottrain_operator.kube.errors import ForbiddenError, NotFoundError
from spottrain_operator.kube.resources import POD_GROUPS, Manifest
from spottrain_operator.objects.observe import job_view, pod_view
from spottrain_operator.objects.pod_groups import GroupState, group_name, group_to_join
from spottrain_operator.objects.trimmed import trimmed_pod
from world.faults import Fault


async def lived(cluster: CrashingCluster, turns: int = 1) -> World:
    cluster.put_job(job())
    world = World(cluster, groups_pods=True, last_step=10_000)
    await turned(world, turns)
    return world


async def turned(world: World, turns: int) -> None:
    for _ in range(turns):
        await world.turn()


def failing(error: Exception) -> tuple[CrashingCluster, Fault]:
    """A cluster whose PodGroups can't be written."""
    cluster = CrashingCluster()
    fault = Fault(error=error, resource=POD_GROUPS)
    cluster.before.append(fault)
    return cluster, fault


def groups_of_pods(cluster: CrashingCluster) -> set[str | None]:
    found = (pod["spec"].get("schedulingGroup") for pod in cluster.pods.values())
    return {each["podGroupName"] if each else None for each in found}


def min_counts(cluster: CrashingCluster) -> list[int]:
    return [each["spec"]["schedulingPolicy"]["gang"]["minCount"] for each in cluster.pod_groups.values()]


def said(cluster: CrashingCluster) -> list[str]:
    return [each["message"] for each in cluster.events if each["reason"] == "PodsNotGrouped"]


async def test_all_pods_of_a_job_are_in_its_group_and_the_nodes_of_nodes_min_come_together() -> None:
    cluster = CrashingCluster()
    await lived(cluster)
    [group] = cluster.pod_groups.values()
    assert len(cluster.pods) == 3
    assert groups_of_pods(cluster) == {group["metadata"]["name"]}
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
    assert group["metadata"]["ownerReferences"][0]["uid"] == cluster.jobs[KEY]["metadata"]["uid"]


async def test_it_is_there_before_the_pods() -> None:
    cluster = CrashingCluster(crash_at=2)  # the first counted writes are the status and a pod
    await lived(cluster)
    assert len(cluster.pod_groups) == 1
    assert len(cluster.pods) < 3


async def test_an_edit_of_nodes_min_changes_it_also_if_the_operator_was_away() -> None:
    cluster = CrashingCluster()
    world = await lived(cluster)
    cluster.put_job(job(nodes={"min": 3, "max": 3}))
    await world.turn()
    assert min_counts(cluster) == [3]
    cluster.put_job(job(nodes={"min": 1, "max": 3}))
    world.start_operator()
    await world.turn()
    assert min_counts(cluster) == [1]


async def test_it_is_written_before_pods_and_not_with_each_pass() -> None:
    cluster = CrashingCluster()
    met = Fault(verbs=("create", "patch"), resource=POD_GROUPS)
    cluster.before.append(met)
    world = await lived(cluster)
    assert met.num == 1
    await turned(world, 5)
    assert met.num == 1
    cluster.pod_groups.clear()
    cluster.pods.popitem()
    await turned(world, 5)
    assert len(cluster.pod_groups) == 1


async def test_a_cluster_without_pod_groups_schedules_singly_and_the_job_says_what_it_lacks() -> None:
    cluster, _ = failing(NotFoundError("the server could not find the requested resource"))
    await lived(cluster, turns=5)
    assert (len(cluster.pods), groups_of_pods(cluster)) == (3, {None})
    [note] = said(cluster)
    assert "serves no PodGroups of scheduling.k8s.io/v1beta1" in note
    assert "from 1.37 on, with the feature gate GenericWorkload" in note
    assert "jobs.podGroups" in note


async def test_a_refusal_is_quoted_and_the_job_runs() -> None:
    cluster, _ = failing(ForbiddenError('cannot create resource "podgroups"'))
    await lived(cluster, turns=5)
    assert (len(cluster.pods), groups_of_pods(cluster)) == (3, {None})
    [note] = said(cluster)
    assert 'cannot create resource "podgroups"' in note


async def test_a_job_that_started_without_a_group_has_one_once_all_its_pods_are_new() -> None:
    """The scheduler would wait for ever for nodes.min pods of a group in which only one of them is."""
    cluster, fault = failing(NotFoundError("the server could not find the requested resource"))
    world = await lived(cluster)
    fault.error = None
    world.start_operator()
    cluster.pods.popitem()
    await turned(world, 5)
    assert (len(cluster.pods), groups_of_pods(cluster)) == (3, {None})
    cluster.put_job(job(runPolicy={"suspend": True}))
    await turned(world, 60)
    assert not cluster.pods
    cluster.put_job(job())
    await turned(world, 5)
    assert len(cluster.pods) == 3
    assert groups_of_pods(cluster) == set(name for _, name in cluster.pod_groups)


async def test_by_default_there_is_none() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    await World(cluster).turn()
    assert groups_of_pods(cluster) == {None}
    assert not cluster.pod_groups


def seen(**changes: Any) -> Any:
    found = job(**changes)
    found["metadata"] |= {"uid": "u-1", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return job_view(found)


def test_a_group_has_one_priority_and_one_scheduler() -> None:
    """The scheduler refuses others, and the priority of a group never changes."""
    plain = group_name(seen())
    assert group_name(seen(nodes={"min": 3, "max": 3})) == plain
    assert group_name(seen(podTemplate={"priorityClassName": "high"})) != plain
    assert group_name(seen(podTemplate={"schedulerName": "mine"})) != plain


OWN = group_name(seen())


@pytest.mark.parametrize(
    ("groups", "expected"),
    [((), OWN), ((OWN, OWN), OWN), (("",), ""), ((OWN, ""), ""), (("other",), ""), ((OWN, "other"), "")],
)
def test_a_pod_joins_a_group_only_if_all_the_others_are_in_it(groups: tuple[str, ...], expected: str) -> None:
    pods = [replace(POD, group=each) for each in groups]
    assert group_to_join(seen(), GroupState(name=OWN), pods) == expected
    gone = [replace(POD, group="other", deleting=True), replace(POD, phase="Failed")]
    assert group_to_join(seen(), GroupState(name=OWN), [*pods, *gone]) == expected


def test_pods_that_are_in_a_group_keep_others_in_it_also_if_it_cant_be_written_now() -> None:
    assert group_to_join(seen(), GroupState(), [replace(POD, group=OWN)]) == OWN
    assert group_to_join(seen(), GroupState(), []) == ""


def view(spec: Manifest) -> PodView:
    meta = {
        "namespace": KEY.namespace,
        "name": "gpt-0",
        "uid": "p-1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"spottrain.dev/capacity-type": "spot", "spottrain.dev/sequence": "0"},
    }
    return pod_view(trimmed_pod({"metadata": meta, "spec": spec, "status": {"phase": "Pending"}}))


POD = view({})


def test_a_cached_pod_still_names_its_group() -> None:
    assert view({"schedulingGroup": {"podGroupName": "g"}}).group == "g"
    assert view({}).group == ""
