"""A job that is short of spot nodes.

The tests show what it says until on-demand nodes stand in, and when they don't.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import NOW, Scene, at, pod, training_job, waiting_job
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.status import Condition, Phase
from spottrain_operator.core.model import CreatePod, DeletePod, KeptAway
from spottrain_operator.core.words.scheduling import INCOMPLETE, UNSEEN

FULL = "0/7 nodes are available: 4 node(s) didn't match pod anti-affinity rules."
NO_SPOT = "0/7 nodes are available: 7 node(s) didn't match Pod's node affinity/selector."
GATED = "Scheduling is blocked due to non-empty scheduling gates"
OF_GROUP = "minCount (4) cannot be satisfied: 1 scheduled, 2 remaining"
NO_CLAIM = 'persistentvolumeclaim "data" not found. not found'
TRIED_AGAIN = (
    "On-demand nodes stand in for spot nodes, which are tried again at {} UTC (capacity.fallback.returnAfterSeconds)"
)
FIVE = {"nodes": {"min": 5, "max": 5}}


def short_of_spot(said: str = FULL, **spec: Any) -> Scene:
    """Five spot pods, the last of which has no node since second 60."""
    scene = replace(waiting_job(0, **FIVE, **spec), now=NOW)
    for sequence in range(1, 5):
        scene = scene.with_pod(pod(sequence, capacity_type=CapacityType.SPOT))
    lacking = pod(
        5,
        phase="Pending",
        ready=False,
        ready_since=None,
        node=None,
        ip=None,
        container_started=False,
        waiting_reason="Unschedulable",
        waiting_message=said,
        unschedulable_since=at(60),
    )
    return scene.with_pod(lacking).all_say()


def spot_available(scene: Scene) -> Condition:
    found = scene.plan().status.condition("SpotAvailable")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("capacity", "sentence"),
    [
        (
            {},
            "The job has 4 of 5 spot nodes, and asks for no on-demand nodes yet. On-demand nodes stand in from "
            "00:06:00 UTC (capacity.fallback). To have them at once, set capacity.onDemand.min",
        ),
        (
            {"fallback": {"policy": "None"}},
            "The job has 4 of 5 spot nodes, and asks for no others. No on-demand nodes stand in: "
            "capacity.fallback.policy is None",
        ),
        (
            {"onDemand": {"max": 0}},
            "The job has 4 of 5 spot nodes, and asks for no others. No on-demand nodes stand in: the "
            "job has as many as capacity.onDemand.max allows",
        ),
    ],
    ids=["fallback", "no fallback", "no on-demand"],
)
def test_a_job_that_waits_for_spot_nodes_says_what_comes_next(capacity: dict[str, Any], sentence: str) -> None:
    scene = short_of_spot(NO_SPOT, capacity=capacity)
    status, said = scene.plan().status, spot_available(scene)
    assert (said.status, said.reason, said.message) == ("False", "SpotPending", sentence)
    assert status.phase is Phase.PENDING
    assert "no node has room for 1 spot pod" in status.message
    assert status.message.endswith(sentence[1:])


@pytest.mark.parametrize(
    ("said", "template", "advice"),
    [
        (FULL, {}, "A job runs one pod a node: add nodes, or lower nodes.min to train with fewer"),
        (
            FULL,
            {"nodeSelector": {"node-type": "gpu-large", "disk": "fast"}},
            "A job runs one pod a node: add nodes that have the labels of podTemplate.nodeSelector (disk=fast, "
            "node-type=gpu-large), or lower nodes.min to train with fewer",
        ),
        (
            "0/7 nodes are available: 7 Insufficient nvidia.com/gpu.",
            {},
            "A pod asks for 1 nvidia.com/gpu, as processesPerNode is 1. Lower processesPerNode or resources if no "
            "node is that large. Otherwise the pod waits until a node is free "
            "(kubectl describe node shows how full each is)",
        ),
        (
            NO_SPOT,
            {"nodeSelector": {"disk": "fast"}},
            "No spot node has the labels in the pod's nodeSelector and affinity: wait for such a node, add one, or "
            "correct podTemplate.nodeSelector (disk=fast) or capacity",
        ),
    ],
    ids=["one pod a node", "one pod a node of these labels", "too large", "own labels"],
)
def test_on_demand_nodes_are_not_recommended_if_it_is_not_spot_nodes_that_lack(
    said: str, template: dict[str, Any], advice: str
) -> None:
    message = short_of_spot(said, capacity={}, podTemplate=template).plan().status.message
    assert f". {advice}. The job has 4 of 5 spot nodes" in message
    assert message.endswith("On-demand nodes stand in from 00:06:00 UTC (capacity.fallback), if any fits")


def test_the_fallback_says_when_spot_is_tried_again() -> None:
    scene = short_of_spot(capacity={}).later(270)
    [event] = [event for event in scene.plan().events if event.type == "Warning"]
    told = "The job has 4 of 5 spot nodes after 310 s: on-demand nodes take the place of the others"
    assert (event.reason, event.message) == ("FellBack", told)
    scene = scene.decided()
    said, sentence = spot_available(scene), TRIED_AGAIN.format("00:21:10")
    assert (said.reason, said.message) == ("FellBack", sentence)
    assert scene.plan().status.message.endswith(sentence)


def test_if_no_on_demand_node_stands_in_spot_nodes_are_tried_again_soon() -> None:
    scene = short_of_spot(capacity={}).later(270).decided()
    stand_in = pod(6, capacity_type=CapacityType.ON_DEMAND, phase="Pending", ready=False, ready_since=None, node=None)
    since = scene.now + timedelta(seconds=20)
    scene = scene.with_pod(replace(stand_in, ip=None, container_started=False, unschedulable_since=since)).later(20)
    sooner = "returnAfterSeconds", "afterSeconds, as none has come"
    assert spot_available(scene).message == TRIED_AGAIN.format("00:11:30").replace(*sooner)
    assert "SpotRetried" not in [event.reason for event in scene.later(299).plan().events]
    tried = scene.later(300).plan()
    assert "SpotRetried" in [event.reason for event in tried.events]
    assert not any(isinstance(action, DeletePod) and action.name == "job-6" for action in tried.actions)


def test_a_change_that_is_days_away_has_its_date() -> None:
    days = 2 * 86_400
    waits = short_of_spot(capacity={"fallback": {"afterSeconds": days}})
    assert "On-demand nodes stand in from 2026-01-03 00:01:00 UTC" in spot_available(waits).message
    fell_back = short_of_spot(capacity={"fallback": {"returnAfterSeconds": days}}).later(270).decided()
    assert "which are tried again at 2026-01-03 00:06:10 UTC" in spot_available(fell_back).message


@pytest.mark.parametrize("seconds", [0, 270], ids=["waits", "fell-back"])
def test_a_finished_job_waits_for_no_spot_nodes(seconds: float) -> None:
    scene = short_of_spot(capacity={}).later(seconds).decided()
    assert spot_available(scene).status == "False"
    said = spot_available(scene.status(phase=Phase.FAILED, completion_time=NOW))
    assert (said.status, said.reason, said.message) == ("True", "NoneWaits", "No spot pod waits for a node")


@pytest.mark.parametrize(
    "said",
    [NO_CLAIM, GATED, UNSEEN, 'waiting for resourceclaim "gpus" not found', OF_GROUP],
    ids=["claim of a volume", "gates", "no scheduler", "claim of devices", "the rest of its PodGroup"],
)
def test_a_pod_that_no_spot_node_would_help_is_no_sign_that_they_are_short(said: str) -> None:
    scene = short_of_spot(said, capacity={}).decided().later(3600)
    decided = scene.plan()
    assert "FellBack" not in [event.reason for event in decided.events]
    assert spot_available(scene).status == "True"
    assert "no node has room" not in decided.status.message
    unhealthy = decided.status.condition("PodsHealthy")
    assert unhealthy is not None
    assert unhealthy.message.startswith("pod job-5 has no node: ")


def test_a_pod_without_the_claim_of_a_volume_says_so() -> None:
    decided = short_of_spot(NO_CLAIM, capacity={}).plan()
    assert "1 pod without the claim of a volume" in decided.status.message
    assert decided.status.message.endswith(
        'job-5: Unschedulable: persistentvolumeclaim "data" not found. Create and bind the claim, or correct '
        "podTemplate.volumes"
    )


SPOT_POOL = {"name": "h", "capacityType": "spot", "provider": "custom", "nodeSelector": {"team/pool": "h100"}}


def test_no_on_demand_node_stands_in_if_no_pool_has_one() -> None:
    scene = short_of_spot(capacity={"pools": [SPOT_POOL]})
    assert spot_available(scene).message.endswith("No on-demand nodes stand in: capacity.pools has none")
    later = scene.later(3600).plan()
    assert "FellBack" not in [event.reason for event in later.events]
    assert later.status.phase is Phase.PENDING


def test_pools_of_on_demand_nodes_alone_make_an_on_demand_job() -> None:
    pool = SPOT_POOL | {"capacityType": "on-demand"}
    created = [action for action in waiting_job(0, **FIVE, capacity={"pools": [pool]}).plan().actions]
    assert [action.capacity_type for action in created if isinstance(action, CreatePod)] == [
        CapacityType.ON_DEMAND
    ] * 5


@pytest.mark.parametrize(
    "capacity", [{"onDemand": {"max": 0}}, {"fallback": {"policy": "None"}}, {"pools": [SPOT_POOL]}]
)
def test_an_edit_that_leaves_on_demand_nodes_no_place_ends_the_fallback(capacity: dict[str, Any]) -> None:
    fell_back = short_of_spot(capacity={}).later(270).decided()
    assert fell_back.observed.job.status.fallback_since is not None
    plan = fell_back.spec(capacity=capacity).plan()
    assert "SpotRetried" in [event.reason for event in plan.events]
    assert plan.status.fallback_since is None


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            UNSEEN,
            "Start the scheduler that podTemplate.schedulerName names, or correct the name",
        ),
        (
            f'{UNSEEN}: PodResourceClaim a: resourceclaimtemplates "a" not found',
            "Create what is missing, or correct podTemplate.resourceClaims",
        ),
        (
            GATED,
            "Wait until the controller that set the pod's spec.schedulingGates, such as Kueue, removes them",
        ),
        (
            INCOMPLETE,
            "See why the others are not created, or start the scheduler that podTemplate.schedulerName names",
        ),
        (
            OF_GROUP,
            "The job gets as many nodes as nodes.min at once, or none: see what its other pods wait for",
        ),
    ],
)
def test_what_keeps_pods_from_any_node_is_said_with_what_to_do(said: str, sentence: str) -> None:
    scene = short_of_spot(said, capacity={})
    assert sentence in scene.plan().status.message
    unhealthy = scene.plan().status.condition("PodsHealthy")
    assert unhealthy is not None
    assert sentence in unhealthy.message


# What the scheduler last said of nodes, some of which may be gone since.
AWAY = (
    "0/5 nodes are available: 2 node(s) had untolerated taint(s), 3 node(s) didn't match Pod's node "
    "affinity/selector."
)
CORDONED = "1 spot node is cordoned: kubectl uncordon gives it back"
TAINTED = "2 spot nodes are tainted for others: podTemplate.tolerations lets the job use them"
NO_LABELS = (
    "No spot node has the labels in the pod's nodeSelector and affinity: wait for such a node, add one, or "
    "correct capacity"
)
NONE_UP = "No spot node is up for the pod, which starts when one comes"
NO_FALLBACK = {"fallback": {"policy": "None"}}


def said_of_nodes(scene: Scene, kept: KeptAway | None) -> str:
    """What the job says between the scheduler's sentence and the one on spot nodes."""
    if kept is not None:
        scene = replace(scene, observed=replace(scene.observed, kept_away={"u5": kept}))
    status = scene.plan().status
    unhealthy = status.condition("PodsHealthy")
    assert unhealthy is not None
    said = unhealthy.message.split("affinity/selector. ")[1].split(". The job has")[0]
    assert said in status.message
    return said


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        (None, NO_LABELS),
        (KeptAway(num_down=2), NONE_UP),
        (KeptAway(num_cordoned=1, num_down=1), CORDONED),
        (KeptAway(num_cordoned=1, num_tainted=2), f"{CORDONED}. {TAINTED}"),
        (KeptAway(num_tainted=2, taints=frozenset({"b", "a"})), TAINTED.replace("others:", "others (a, b):")),
    ],
    ids=["no such node", "nodes that go", "cordoned", "tainted", "with the taints"],
)
def test_only_nodes_that_there_are_explain_why_a_pod_has_none(kept: KeptAway | None, sentence: str) -> None:
    assert said_of_nodes(short_of_spot(AWAY, capacity=NO_FALLBACK), kept) == sentence


def test_a_job_whose_spot_nodes_have_gone_says_so_beside_what_stands_in() -> None:
    """What the scheduler says is older: it looks again when a node comes."""
    assert said_of_nodes(short_of_spot(AWAY, capacity={}), KeptAway(num_down=2)) == NONE_UP
    trained = training_job(capacity={})
    lacking = next(each for each in short_of_spot(AWAY, capacity={}).observed.pods if each.sequence == 5)
    for sequence in range(1, 5):
        trained = trained.without_pod(sequence)
    assert NONE_UP in trained.with_pod(lacking).plan().status.message


def test_an_on_demand_node_that_comes_up_is_awaited() -> None:
    scene = short_of_spot(AWAY, capacity={"spot": {"max": 0}}).pod(5, capacity_type=CapacityType.ON_DEMAND)
    scene = replace(scene, observed=replace(scene.observed, kept_away={"u5": KeptAway(num_down=1)}))
    assert f"affinity/selector. {NONE_UP.replace('spot', 'on-demand')}" in scene.plan().status.message


def test_a_job_that_has_trained_on_spot_nodes_is_not_asked_to_add_their_labels() -> None:
    trained = training_job(capacity=NO_FALLBACK)
    lacking = next(each for each in short_of_spot(AWAY, capacity=NO_FALLBACK).observed.pods if each.sequence == 5)
    for sequence in range(1, 5):
        trained = trained.without_pod(sequence)
    scene = trained.with_pod(lacking)
    assert NONE_UP in scene.plan().status.message
    assert NO_LABELS not in scene.plan().status.message
    assert NO_LABELS in scene.generation(template_hash="before an edit").plan().status.message
    generation = scene.observed.job.status.generation
    assert generation is not None
    members = generation.members[:2]
    assert {member.capacity_type for member in members} == {CapacityType.ON_DEMAND}
    assert NO_LABELS in scene.generation(members=members).plan().status.message


def test_nodes_that_are_kept_away_come_after_what_to_do() -> None:
    said = "0/7 nodes are available: 1 Insufficient cpu, 6 node(s) didn't match Pod's node affinity/selector."
    scene = short_of_spot(said, capacity={})
    scene = replace(scene, observed=replace(scene.observed, kept_away={"u5": KeptAway(num_tainted=2)}))
    assert f"shows how full each is). {TAINTED}. The job has" in scene.plan().status.message


def test_nodes_that_are_kept_away_do_not_help_a_pod_without_its_claim() -> None:
    scene = short_of_spot(NO_CLAIM, capacity={})
    scene = replace(scene, observed=replace(scene.observed, kept_away={"u5": KeptAway(num_tainted=2)}))
    assert "tainted" not in scene.plan().status.message


def test_a_job_with_an_on_demand_floor_is_asked_to_raise_it() -> None:
    scene = short_of_spot(NO_SPOT, capacity={"onDemand": {"min": 1}}).pod(1, capacity_type=CapacityType.ON_DEMAND)
    assert spot_available(scene).message.endswith("To have them at once, raise capacity.onDemand.min")
