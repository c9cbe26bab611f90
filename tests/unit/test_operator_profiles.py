"""Jobs and their profiles, from the first pass to the end, on a cluster in memory."""

from __future__ import annotations

from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World
from operator_world import job as new_job
from spottrain_operator.kube.errors import RefusedError
from spottrain_operator.kube.resources import PROFILES
from world.faults import Fault

TAINT = {"key": "team", "operator": "Exists"}


def profile(cluster: CrashingCluster, name: str = "gpu", **spec: Any) -> None:
    cluster.profiles[name] = {"metadata": {"name": name, "generation": 2, "resourceVersion": "1"}, "spec": spec}


def world_of(cluster: CrashingCluster, **changes: Any) -> World:
    spec = new_job(**changes)
    if spec["spec"]["image"] is None:
        del spec["spec"]["image"]
    cluster.put_job(spec)
    return World(cluster)


def edit(cluster: CrashingCluster, **changes: Any) -> None:
    job = cluster.jobs[KEY]
    cluster.put_job({"metadata": {"namespace": KEY.namespace, "name": KEY.name}, "spec": job["spec"] | changes})


async def turns(world: World, number: int = 10) -> None:
    for _ in range(number):
        await world.turn()


async def test_pods_are_as_the_profile_says() -> None:
    cluster = CrashingCluster()
    profile(cluster, image="registry/train:1", tolerations=[TAINT], limits={"serviceAccounts": ["trainer"]})
    world = world_of(cluster, profile="gpu", image=None)
    await world.until_running()
    assert (world.status["profile"]["name"], world.status["profile"]["generation"]) == ("gpu", 2)
    for pod in cluster.pods.values():
        assert pod["spec"]["containers"][0]["image"] == "registry/train:1"
        assert TAINT in pod["spec"]["tolerations"]
        assert pod["spec"]["serviceAccountName"] == "trainer"


@pytest.mark.parametrize("change", ["deleted", "narrowed"])
async def test_a_profile_that_changes_ends_no_run(change: str) -> None:
    """Nor does a new operator, which has seen the old one never."""
    cluster = CrashingCluster()
    profile(cluster, image="registry/train:1")
    world = world_of(cluster, profile="gpu", image=None)
    await world.until_running()
    cluster.profiles.clear()
    if change == "narrowed":
        profile(cluster, image="other:2", limits={"nodes": 1, "serviceAccounts": ["other"]})
    world.start_operator()
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"
    assert world.generation["number"] == 1
    assert world.condition("ProfileAccepted")["status"] == "True"


async def test_a_job_waits_for_a_profile_that_is_missing() -> None:
    cluster = CrashingCluster()
    world = world_of(cluster, profile="gpu")
    await turns(world)
    assert cluster.pods == {}
    assert world.status["phase"] == "Pending"
    assert world.status["message"].startswith("There is no TrainingProfile gpu.")
    profile(cluster)
    await world.until_running()


async def test_a_job_that_is_edited_beyond_the_limits_keeps_to_them() -> None:
    cluster = CrashingCluster()
    profile(cluster, limits={"nodes": 3, "serviceAccounts": ["trainer"]})
    world = world_of(cluster, profile="gpu")
    await world.until_running()
    edit(cluster, nodes={"min": 2, "max": 8}, podTemplate={"serviceAccountName": "admin"})
    await turns(world, 3)
    condition = world.condition("ProfileAccepted")
    assert (condition["status"], condition["reason"]) == ("False", "ProfileLimits")
    assert (world.generation["number"], len(cluster.pods)) == (1, 3)
    assert {pod["spec"]["serviceAccountName"] for pod in cluster.pods.values()} == {"trainer"}
    edit(cluster, nodes={"min": 2, "max": 3}, podTemplate={})
    await turns(world, 3)
    assert world.condition("ProfileAccepted")["status"] == "True"


async def test_jobs_without_a_profile_take_the_default_one() -> None:
    cluster = CrashingCluster()
    profile(cluster, "default", tolerations=[TAINT])
    world = world_of(cluster)
    await world.until_running()
    assert world.status["profile"]["name"] == "default"
    assert all(TAINT in pod["spec"]["tolerations"] for pod in cluster.pods.values())


async def test_a_job_that_runs_without_a_profile_takes_none_later() -> None:
    cluster = CrashingCluster()
    world = world_of(cluster)
    await world.until_running()
    profile(cluster, "default", limits={"nodes": 1})
    world.start_operator()
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"
    assert "profile" not in world.status
    assert world.condition("ProfileAccepted") == {}


async def test_an_operator_with_the_roles_of_an_older_chart_runs_jobs_without_profiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = CrashingCluster()
    cluster.before.append(Fault(error=RefusedError("forbidden"), verbs=("get",), resource=PROFILES))
    await world_of(cluster).until_running()
    assert "the TrainingProfile default can't be read, and counts as missing: forbidden" in caplog.text
