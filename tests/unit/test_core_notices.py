"""Truth tables of `plan` for notices: whose they are, and which deadline counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import (
    DRAINING,
    NOW,
    START,
    STOPPING,
    Change,
    Scene,
    notice,
    pod,
    starting_job,
    training_job,
    waiting_job,
)
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.nodes import GKE_SPOT, LABEL_SHUTDOWN_GRACE
from spottrain_api.contract.notices import NoticeKind
from spottrain_operator.core.model import CreatePod, DeletePod
from spottrain_operator.core.timing import DEFAULT_TIMING


def test_a_notice_before_the_ranks_are_up_stops_at_once() -> None:
    decided = starting_job().node(4, notice=notice(4, lead=-60)).plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is STOPPING


def test_a_notice_to_a_script_that_reports_nothing_drains_it() -> None:
    scene = starting_job().all_say(generation=1, phase=AgentPhase.RUNNING, step_age_seconds=1.0)
    decided = scene.node(4, notice=notice(4, lead=60)).plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is DRAINING


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({}, "node n4 goes at"),
        ({"kind": NoticeKind.EVICT, "source": "condition:EvictionByEvictionAPI"}, "the pod on node n4 goes at"),
        (
            {"kind": NoticeKind.EVICT, "source": "condition:PreemptionByScheduler"},
            "the pod on node n4 makes way for one of higher priority, and goes at",
        ),
    ],
)
def test_events_distinguish_a_node_that_goes_from_a_pod(changes: dict[str, Any], goes: str) -> None:
    decided = training_job().says(4, notices=(notice(4, **changes),)).plan()
    assert any(goes in event.message for event in decided.events)


@pytest.mark.parametrize(
    ("disruption", "why"),
    [
        ("PreemptionByScheduler", "makes way for one of higher priority (PreemptionByScheduler)"),
        ("EvictionByEvictionAPI", "is being evicted (EvictionByEvictionAPI)"),
    ],
)
def test_a_pod_that_makes_way_is_distinguished_from_one_that_is_evicted(disruption: str, why: str) -> None:
    decided = training_job().with_pod(pod(4, disruption=disruption)).plan()
    assert any(f"pod job-4 {why}" in event.message for event in decided.events)


def test_a_second_notice_brings_the_deadline_nearer() -> None:
    scene = training_job().node(4, notice=notice(4, lead=60)).decided().node(3, notice=notice(3, lead=15))
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.deadline == NOW + timedelta(seconds=15)


@pytest.mark.parametrize(
    ("disruption", "labels", "seconds"),
    [
        ("EvictionByEvictionAPI", {}, 120),
        ("EvictionByEvictionAPI", {GKE_SPOT: "true"}, 120),
        ("TerminationByKubelet", {}, 120),
        ("TerminationByKubelet", {GKE_SPOT: "true"}, 15),
        ("TerminationByKubelet", {LABEL_SHUTDOWN_GRACE: "600"}, 120),
    ],
)
def test_an_evicted_pod_has_its_grace_or_what_the_nodes_shutdown_leaves(
    disruption: str, labels: dict[str, str], seconds: float
) -> None:
    """The API server writes the condition first, and deletes the pod after that.

    A pass in between must not take the time from the drain.
    """
    since = NOW - timedelta(seconds=1)
    evicted = training_job().node(4, labels=labels).pod(4, disruption=disruption, disrupted_at=since).decided()
    killed_at = since + timedelta(seconds=seconds)
    deleted = evicted.pod(4, deleting=True, deletion_deadline=since + timedelta(seconds=120)).decided()
    for scene in (evicted, deleted):
        generation = scene.observed.job.status.generation
        assert generation is not None
        assert (generation.state, generation.deadline) == (DRAINING, killed_at)


@pytest.mark.parametrize(
    "goes",
    [{"disruption": "EvictionByEvictionAPI"}, {"deleting": True, "deletion_deadline": NOW + timedelta(hours=1)}],
    ids=["eviction", "deletion"],
)
def test_a_pod_with_more_time_than_its_node_has_that_of_its_node(goes: dict[str, Any]) -> None:
    scene = training_job().node(4, taints=("aws-node-termination-handler/spot-itn",))
    generation = scene.pod(4, grace_seconds=3600, **goes).plan().status.generation
    assert generation is not None
    assert generation.deadline == NOW + timedelta(seconds=120)


OLD_NOTICE = notice(2, lead=100, observed_at=START - timedelta(seconds=5))
TAINT = "karpenter.sh/disrupted"


@pytest.mark.parametrize(
    ("shows", "why"),
    [
        ({"taints": (TAINT,)}, f"node n2 is tainted {TAINT}"),
        ({"deleting": True}, "node n2 is being deleted"),
        ({"notice": OLD_NOTICE}, "node n2 goes at 00:03:20 UTC (preempt notice from ec2)"),
    ],
    ids=["taint", "deletion", "notice"],
)
def test_a_pod_that_lands_on_a_node_that_goes_holds_its_place_and_is_named(shows: dict[str, Any], why: str) -> None:
    """Its replacement could land there again, each second anew."""
    plan = waiting_job(2, nodes={"min": 2, "max": 2}).node(2, **shows).plan()
    assert not [action for action in plan.actions if isinstance(action, CreatePod | DeletePod)]
    sentence = f"pod job-2 can't train, and is replaced at 00:05:00 UTC: {why}"
    assert plan.status.message == f"Waiting for nodes: 1 of at least 2 ready; {sentence}"
    healthy = plan.status.condition("PodsHealthy")
    assert healthy is not None
    assert (healthy.status, healthy.reason, healthy.message) == ("False", "NodeGoes", sentence)


DOWN = {"ready": False, "unready_since": START - timedelta(seconds=5)}


def on_a_node_that_is_down(scene: Scene) -> Scene:
    return scene.pod(2, ready=False, container_started=False).node(2, **DOWN).forgets(2)


def test_a_pod_that_lands_on_a_node_that_is_down_holds_its_place_and_is_named() -> None:
    """Its template tolerates everything: a replacement could land there again."""
    plan = on_a_node_that_is_down(waiting_job(2, nodes={"min": 2, "max": 2})).plan()
    assert not [action for action in plan.actions if isinstance(action, CreatePod | DeletePod)]
    healthy = plan.status.condition("PodsHealthy")
    assert healthy is not None
    assert healthy.reason == "NodeGoes"
    assert healthy.message == "pod job-2 can't train, and is replaced at 00:05:00 UTC: node n2 is not ready"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.node(2, unready_since=START + timedelta(seconds=5)),
        lambda s: s.says(2, age=5),
        lambda s: replace(s, now=START + timedelta(seconds=DEFAULT_TIMING.stuck_start + 1)),
    ],
    ids=["it came before", "its agent was heard", "it has waited"],
)
def test_a_pod_on_a_lost_node_is_replaced(change: Change) -> None:
    scene = change(on_a_node_that_is_down(waiting_job(2, nodes={"min": 2, "max": 2})))
    changes = [action for action in scene.plan().actions if isinstance(action, CreatePod | DeletePod)]
    assert [action.name for action in changes] == ["job-2", "job-3"]


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [(DEFAULT_TIMING.stuck_start, []), (DEFAULT_TIMING.stuck_start + 1, ["job-2", "job-3"])],
    ids=["before", "after"],
)
@pytest.mark.parametrize("shows", [{"taints": (TAINT,)}, {"notice": OLD_NOTICE}], ids=["taint", "notice"])
def test_a_node_that_stays_past_its_deadline_is_left(shows: dict[str, Any], seconds: float, tried: list[str]) -> None:
    """The old pod is there until it has ended.

    So the new one goes to another node if one is free.
    """
    waits = waiting_job(2, nodes={"min": 2, "max": 2}).node(2, **shows)
    agents = (OLD_NOTICE,) if "notice" in shows else ()
    scene = replace(waits, now=START + timedelta(seconds=seconds)).all_say().says(2, notices=agents)
    changes = [action for action in scene.plan().actions if isinstance(action, CreatePod | DeletePod)]
    assert [action.name for action in changes] == tried


@pytest.mark.parametrize("shows", [{"taints": (TAINT,)}, {"deleting": True}], ids=["taint", "deletion"])
def test_a_member_leaves_a_node_that_goes_and_is_replaced_at_once(shows: dict[str, Any]) -> None:
    scene = training_job().node(4, **shows)
    assert [action.name for action in scene.plan().actions if isinstance(action, CreatePod)] == ["job-5"]
    plan = scene.decided().all_say(phase=AgentPhase.DRAINED).plan()
    assert plan.status.generation is not None
    assert [m.pod for m in plan.status.generation.members] == ["job-1", "job-2", "job-3"]
    assert [action.name for action in plan.actions if isinstance(action, DeletePod)] == ["job-4"]
