"""A job that waits for nodes, or for a quota of its namespace, says which jobs there hold nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from operator_world import KEY, CrashingCluster, World, job
from scene import NOW, START, Scene, pod, training, training_job, waiting_job
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus
from spottrain_operator.core.model import Holder, Refusal
from spottrain_operator.kube.errors import ForbiddenError
from spottrain_operator.kube.resources import PODS
from spottrain_operator.objects.node_holders import NodeHolders
from world.faults import Fault

NOWHERE: dict[str, Any] = {
    "phase": "Pending",
    "node": None,
    "ready": False,
    "unschedulable_since": START,
    "waiting_reason": "Unschedulable",
}
OTHERS = tuple(Holder(name=name, num_nodes=number) for name, number in [("a", 5), ("b", 2), ("c", 1), ("d", 1)])


def generation_of(scene: Scene) -> GenerationStatus:
    generation = scene.observed.job.status.generation
    assert generation is not None
    return generation


def beside(scene: Scene, *holders: Holder) -> Scene:
    return replace(scene, observed=replace(scene.observed, holders=holders))


def refused(*, by_quota: bool) -> Scene:
    refusal = Refusal(
        metadata_generation=1, message="no", since=START, lasting=False, by_quota=by_quota, tried_at=START
    )
    scene = waiting_job(num_pods=0)
    return replace(scene, observed=replace(scene.observed, refusal=refusal))


def without_room() -> Scene:
    return waiting_job(num_pods=0).with_pod(pod(1, **NOWHERE))


@pytest.mark.parametrize(
    ("scene", "says_so"),
    [(refused(by_quota=True), True), (without_room(), True), (refused(by_quota=False), False)],
    ids=["a quota", "no room", "another refusal"],
)
def test_a_job_that_waits_for_what_others_have_names_them(scene: Scene, says_so: bool) -> None:
    said = "; in this namespace, nodes are held by a (5), b (2)"
    assert (said in beside(scene, *OTHERS[:2]).plan().status.message) is says_so
    assert "are held by" not in scene.plan().status.message


def test_of_many_it_names_those_with_most_nodes() -> None:
    message = beside(without_room(), *OTHERS).plan().status.message
    assert "nodes are held by a (5), b (2), c (1), 1 other" in message


MAKES_WAY: dict[str, Any] = {"deleting": True, "disruption": "PreemptionByScheduler", "disrupted_at": NOW}


def test_a_job_of_lower_priority_shrinks_to_its_minimum_then_waits_and_says_for_whom() -> None:
    """The scheduler takes one node after the other for pods of higher priority."""
    first = training_job(nodes={"min": 3, "max": 4}).pod(4, **MAKES_WAY).decided()
    assert generation_of(first).state is GenerationState.DRAINING
    assert generation_of(first).reason == "Preempted"
    assert first.observed.job.status.steps_redone == 0
    shrunk = first.all_say(phase=AgentPhase.DRAINED, progress=training(50)).decided().without_pod(4)
    shrunk = shrunk.all_say(phase=AgentPhase.IDLE, progress=None).decided()
    assert [member.pod for member in generation_of(shrunk).members] == ["job-1", "job-2", "job-3"]
    second_run = training(51).model_copy(update={"generation": 2})
    running: dict[str, Any] = {"generation": 2, "phase": AgentPhase.RUNNING, "progress": second_run}
    second = shrunk.all_say(**running).decided().pod(3, **MAKES_WAY).decided()
    ended = second.all_say(phase=AgentPhase.DRAINED).decided().without_pod(3).with_pod(pod(9, **NOWHERE)).decided()
    waiting = beside(ended, *OTHERS[:1]).all_say(phase=AgentPhase.IDLE, progress=None).plan()
    assert waiting.status.running is None
    assert waiting.status.message.startswith("Waiting for nodes: 2 of at least 3 ready")
    assert "in this namespace, nodes are held by a (5)" in waiting.status.message


def test_pods_that_have_no_node_or_have_ended_hold_none() -> None:
    holders, mine, other = (
        NodeHolders(),
        waiting_job().observed.job,
        replace(waiting_job().observed.job, name="other"),
    )
    holders.note(other, [pod(1), pod(2, node=None), pod(3, phase="Succeeded"), pod(4, phase="Pending")])
    assert holders.others(mine) == (Holder(name="other", num_nodes=2),)
    assert holders.others(other) == ()
    assert holders.others(replace(mine, namespace="elsewhere")) == ()
    holders.note(other, [])
    assert holders.others(mine) == ()


async def test_the_operator_names_the_job_that_has_used_the_quota_until_it_is_gone() -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster, last_step=10_000)
    await world.until_running()
    second = KEY._replace(name="second")
    meta = {"namespace": second.namespace, "name": second.name}
    cluster.put_job(job(checkpoint={"uri": "s3://bucket/second"}) | {"metadata": meta})
    said = "exceeded quota: team, requested: cpu=1, used: cpu=3, limited: cpu=3"
    cluster.before.append(Fault(verbs=("create",), resource=PODS, error=ForbiddenError(said)))
    for _ in range(2):
        await world.reconciler.reconcile(second)
    assert "in this namespace, nodes are held by gpt (3)" in cluster.jobs[second]["status"]["message"]
    del cluster.jobs[KEY]
    await world.reconciler.reconcile(KEY)
    await world.reconciler.reconcile(second)
    assert "are held by" not in cluster.jobs[second]["status"]["message"]
