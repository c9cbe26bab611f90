"""A NetworkPolicy for each job, before its pods."""

from __future__ import annotations

import pytest

from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.names import LABEL_JOB_UID
from spottrain_operator.kube.errors import ForbiddenError
from spottrain_operator.kube.resources import NETWORK_POLICIES, Manifest
from world.faults import Fault


def forbidding(said: str) -> tuple[CrashingCluster, Fault]:
    """A cluster that refuses policies, and the refusal."""
    cluster = CrashingCluster()
    refusing = Fault(error=ForbiddenError(said), resource=NETWORK_POLICIES)
    cluster.before.append(refusing)
    return cluster, refusing


async def lived(cluster: CrashingCluster) -> World:
    cluster.put_job(job())
    world = World(cluster, isolates_jobs=True)
    await world.turn()
    return world


def selected(policy: Manifest, labels: dict[str, str]) -> bool:
    return bool(policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items())


async def test_only_a_jobs_own_pods_reach_its_pods() -> None:
    cluster = CrashingCluster()
    await lived(cluster)
    [policy] = cluster.network_policies.values()
    uid = cluster.jobs[KEY]["metadata"]["uid"]
    assert cluster.pods
    assert all(selected(policy, pod["metadata"]["labels"]) for pod in cluster.pods.values())
    [rule] = policy["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": {LABEL_JOB_UID: uid}}}]}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["metadata"]["ownerReferences"][0]["uid"] == uid


async def test_it_is_there_before_the_pods() -> None:
    cluster = CrashingCluster(crash_at=3)  # the first writes are the status and the policy
    await lived(cluster)
    assert len(cluster.network_policies) == 1
    assert len(cluster.pods) < 3


async def test_a_policy_is_created_once_and_never_again_by_the_same_operator() -> None:
    cluster = CrashingCluster()
    world = await lived(cluster)
    [(name, first)] = cluster.network_policies.items()
    cluster.network_policies.clear()
    await world.turn()
    assert not cluster.network_policies
    world.start_operator()
    await world.turn()
    again = cluster.network_policies[name]
    assert again["spec"] == first["spec"]
    world.start_operator()
    await world.turn()
    assert cluster.network_policies == {name: again}


async def test_without_the_right_the_job_runs_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    cluster, _ = forbidding('cannot create resource "networkpolicies"')
    world = await lived(cluster)
    assert len(cluster.pods) == 3
    await world.turn()
    assert caplog.text.count("other pods can reach its pods") == 1
    assert "the chart's value jobs.networkPolicies" in caplog.text


async def test_a_policy_that_is_refused_is_tried_ever_more_seldom_until_it_is_created() -> None:
    cluster, refusing = forbidding('failed calling webhook "x": context deadline exceeded')
    cluster.put_job(job())
    world = World(cluster, isolates_jobs=True, last_step=1000)
    for _ in range(64):
        await world.turn()
    assert 4 <= refusing.num <= 8
    refusing.error = None
    for _ in range(64):
        await world.turn()
    assert len(cluster.network_policies) == 1
    cluster.network_policies.clear()
    await world.turn()
    assert not cluster.network_policies


async def test_by_default_there_is_none() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    await World(cluster).turn()
    assert cluster.pods
    assert not cluster.network_policies


async def test_a_job_that_is_over_gets_none() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster)
    await world.until_finished()
    world.isolates_jobs = True
    world.start_operator()
    await world.turn()
    assert not cluster.network_policies
