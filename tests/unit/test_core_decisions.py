"""Truth tables of `plan` for a job that differs from a training job in one thing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import (
    ACTIVE,
    DRAINING,
    ENDED,
    NOW,
    START,
    STOPPING,
    Change,
    Scene,
    at,
    commit,
    notice,
    pod,
    training,
    training_job,
    waiting_job,
)
from spottrain_api.contract.assignments import AgentPhase, AssignmentAction
from spottrain_api.contract.notices import NoticeKind
from spottrain_api.contract.reports import TrainerPhase
from spottrain_api.v1alpha1.status import Condition, GenerationState, Phase
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.model import (
    CreatePod,
    DeletePod,
)
from world.jobs import spec_of


def test_a_job_that_is_being_deleted_stops_and_holds_no_pods() -> None:
    """The finalizers of others may keep it for long."""
    scene = training_job().pod(4, deleting=True).job(deleting=True)
    plan = scene.plan()
    assert {action.name for action in plan.actions if isinstance(action, DeletePod)} == {"job-1", "job-2", "job-3"}
    assert len(plan.actions) == 3
    assert plan.events == ()
    generation = plan.status.generation
    assert generation is not None
    assert generation.state is ENDED
    assert plan.status.message == "The job is being deleted, and trains no more"
    assert (plan.status.failures, plan.status.preemptions) == (0, 0)
    assert plan.requeue_after is not None
    going = scene.decided()
    for sequence in (1, 2, 3):
        going = going.pod(sequence, deleting=True)
    assert (going.plan().status, going.plan().actions) == (going.observed.job.status, ())


@pytest.mark.parametrize(
    ("scene", "status"), [(training_job(), "True"), (waiting_job(), "False")], ids=["trains", "waits"]
)
def test_a_job_is_ready_while_it_trains(scene: Scene, status: str) -> None:
    ready = scene.plan().status.condition("Ready")
    assert ready is not None
    assert ready.status == status


@pytest.mark.parametrize("phase", [Phase.RECOVERING, Phase.SUCCEEDED])
def test_a_job_that_is_being_deleted_and_has_no_pods_needs_no_further_decision(phase: Phase) -> None:
    scene = training_job(runPolicy={"ttlSecondsAfterFinished": 0}).job(deleting=True).decided()
    left = replace(scene, observed=replace(scene.observed, pods=())).status(phase=phase, completion_time=NOW)
    left = left.decided()  # what their nodes cost
    plan = left.later(3600).plan()
    assert (plan.status, plan.actions, plan.requeue_after) == (left.observed.job.status, (), None)


def test_what_a_job_costs_is_recorded_until_the_pods_of_its_deletion_are_gone() -> None:
    capacity = {"onDemand": {"min": 2, "pricePerHour": 36.0}, "spot": {"max": 2, "pricePerHour": 36.0}}
    scene = training_job(capacity=capacity).job(deleting=True).decided()
    before, after = scene.observed.job.status.cost, scene.later(100).plan().status.cost
    assert before is not None
    assert after is not None
    assert after.total == pytest.approx(before.total + 4.0)


def test_pods_that_are_to_be_orphaned_are_not_deleted() -> None:
    plan = training_job().job(deleting=True, orphans_pods=True).plan()
    assert plan.actions == ()
    assert plan.requeue_after is not None


def test_the_pods_of_a_finished_job_go_with_its_deletion() -> None:
    scene = training_job().status(phase=Phase.SUCCEEDED, completion_time=NOW).job(deleting=True)
    plan = scene.plan()
    assert len(plan.actions) == 4
    assert (plan.status, plan.events) == (scene.observed.job.status, ())


def test_a_new_job_gets_its_floor_and_its_surplus() -> None:
    scene = replace(waiting_job(0), now=START)
    decided = scene.plan()
    created = [action for action in decided.actions if isinstance(action, CreatePod)]
    assert [c.name for c in created] == ["job-1", "job-2", "job-3", "job-4"]
    assert [c.capacity_type.value for c in created] == ["on-demand", "on-demand", "spot", "spot"]
    assert decided.status.last_sequence == 4


DEMANDS = [
    pytest.param({}, ["on-demand"] * 2 + ["spot"] * 2, id="floor-and-surplus"),
    pytest.param({"capacity": {"spot": {"max": 0}}}, ["on-demand"] * 4, id="no-spot-is-all-on-demand"),
    pytest.param({"capacity": {}}, ["spot"] * 4, id="no-floor-is-all-spot"),
    pytest.param({"capacity": {"spot": {"max": 1}}}, ["on-demand", "spot"], id="on-demand-fills-up-to-min"),
    pytest.param({"runPolicy": {"suspend": True}}, [], id="suspended"),
]


@pytest.mark.parametrize(("spec", "types"), DEMANDS)
def test_demand(spec: dict[str, Any], types: list[str]) -> None:
    decided = replace(waiting_job(0, **spec), now=START).plan()
    assert [a.capacity_type.value for a in decided.actions if isinstance(a, CreatePod)] == types


STARTS: list[Any] = [
    pytest.param(lambda s: s, 4, id="all-ready"),
    pytest.param(lambda s: s.says(4, warm=False), None, id="waits-for-one-that-gets-warm"),
    pytest.param(lambda s: replace(s, now=at(60)).all_say().says(4, warm=False), 3, id="patience-is-over"),
    pytest.param(lambda s: s.pod(3, ready=False).pod(4, ready=False).pod(2, ready=False), None, id="below-min"),
    pytest.param(lambda s: s.says(4, age=10), 3, id="silent-one-is-left-out"),
    pytest.param(lambda s: s.node(4, notice=notice(4)), 3, id="leaving-by-annotation-is-left-out"),
    pytest.param(lambda s: s.says(4, notices=(notice(4),)), 3, id="leaving-by-its-agent-is-left-out"),
    pytest.param(lambda s: s.node(4, taints=("karpenter.sh/disrupted",)), 3, id="leaving-by-taint-is-left-out"),
    pytest.param(lambda s: s.pod(4, deleting=True), 3, id="deleting-is-left-out"),
    pytest.param(lambda s: s.pod(4, disruption="EvictionByEvictionAPI"), 3, id="evicted-is-left-out"),
    pytest.param(lambda s: s.pod(4, template_hash="old"), 3, id="outdated-is-left-out"),
    pytest.param(lambda s: s.node(4, notice=notice(4, kind=NoticeKind.REBALANCE)), 4, id="rebalance-only-warns"),
    pytest.param(lambda s: s.node(4, notice=notice(4, cancelled=True)), 4, id="cancelled-notice"),
    pytest.param(lambda s: s.node(4, notice=notice(4, lead=-200)), 4, id="notice-for-an-earlier-node"),
    pytest.param(lambda s: s.says(4, notices=(notice(4, lead=-200),)), 3, id="its-agent-holds-an-old-notice-true"),
]


@pytest.mark.parametrize(("change", "num_members"), STARTS)
def test_first_generation(change: Change, num_members: int | None) -> None:
    generation = change(replace(waiting_job(), now=at(5)).all_say()).plan().status.generation
    if num_members is None:
        assert generation is None
        return
    assert generation is not None
    assert len(generation.members) == num_members
    assert generation.rendezvous_endpoint == "10.0.0.1:29001"
    assert generation.rendezvous_id.startswith("job-01234567-g1-")


def test_a_number_that_comes_again_is_another_start() -> None:
    """As after a restore of etcd."""
    first, again = (replace(waiting_job(), now=at(s)).all_say().plan().status.generation for s in (5, 6))
    assert first is not None
    assert again is not None
    assert first.number == again.number
    assert first.rendezvous_id != again.rendezvous_id


@pytest.mark.parametrize(("comes_by", "cause"), [(1.0, "Failure"), (0.0, "NodeLost"), (-1.0, "NodeLost")])
def test_a_member_that_has_lost_its_relay_is_waited_for(comes_by: float, cause: str) -> None:
    scene = training_job().says(3, phase=AgentPhase.FAILED).says(4, age=5)
    generation = scene.loses_relay(4, comes_by=scene.now + timedelta(seconds=comes_by)).plan().status.generation
    assert generation is not None
    assert generation.reason == cause


ENDS: list[Any] = [
    pytest.param(lambda s: s, ACTIVE, None, id="steady"),
    pytest.param(lambda s: s.node(4, notice=notice(4)), DRAINING, "Preempted", id="notice-on-the-node"),
    pytest.param(lambda s: s.says(4, notices=(notice(4),)), DRAINING, "Preempted", id="notice-from-the-agent"),
    pytest.param(lambda s: s.pod(4, deleting=True), DRAINING, "Preempted", id="pod-deleted"),
    pytest.param(lambda s: s.pod(1, disruption="Preemption"), DRAINING, "Preempted", id="rank-0-evicted"),
    pytest.param(
        lambda s: s.says(4, phase=AgentPhase.DRAINED), DRAINING, "Preempted", id="an-agent-drained-by-itself"
    ),
    pytest.param(lambda s: s.without_pod(4), STOPPING, "NodeLost", id="pod-gone"),
    pytest.param(lambda s: s.node(4, ready=False).says(4, age=5), STOPPING, "NodeLost", id="node-not-ready"),
    pytest.param(lambda s: s.node(4, ready=False), ACTIVE, None, id="node-not-ready-but-heard"),
    pytest.param(lambda s: s.says(4, age=60), ACTIVE, None, id="silent-while-others-step"),
    pytest.param(
        lambda s: s.in_steps_of(30.0, age=140.0).says(4, age=60),
        ACTIVE,
        None,
        id="silent-while-others-make-long-steps",
    ),
    pytest.param(
        lambda s: s.in_steps_of(30.0, age=151.0).says(4, age=60),
        STOPPING,
        "NodeLost",
        id="silent-while-others-hang-in-long-steps",
    ),
    pytest.param(
        lambda s: s.in_steps_of(30.0, age=5.0, phase=AgentPhase.SUCCEEDED).says(4, age=60, phase=AgentPhase.RUNNING),
        ENDED,
        "Succeeded",
        id="silent-in-long-steps-while-others-are-done",
    ),
    pytest.param(
        lambda s: s.all_say(step_age_seconds=40.0).says(4, age=40), STOPPING, "NodeLost", id="silent-and-nobody-steps"
    ),
    pytest.param(
        lambda s: s.all_say().says(1, age=40).says(2, age=40).says(3, age=40).says(4, age=40),
        ACTIVE,
        None,
        id="nobody-is-heard",
    ),
    pytest.param(lambda s: s.says(3, phase=AgentPhase.FAILED), STOPPING, "Failure", id="failed"),
    pytest.param(
        lambda s: s.says(3, phase=AgentPhase.FAILED).says(4, age=5), STOPPING, "NodeLost", id="failed-peer-lost"
    ),
    pytest.param(
        lambda s: s.says(3, phase=AgentPhase.FAILED).node(4, notice=notice(4)),
        STOPPING,
        "Preempted",
        id="failed-leaving",
    ),
    pytest.param(lambda s: s.all_say(step_age_seconds=700.0), STOPPING, "Hang", id="hang"),
    pytest.param(
        lambda s: s.all_say(step_age_seconds=700.0).says(2, step_age_seconds=1.0), ACTIVE, None, id="one-steps"
    ),
    pytest.param(
        lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 4}, runPolicy={"suspend": True})),
        DRAINING,
        "Suspended",
        id="suspend",
    ),
    pytest.param(lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 3})), DRAINING, "ScaleDown", id="fewer-nodes"),
    pytest.param(
        lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 4}, entrypoint={"script": "b.py"})),
        DRAINING,
        "Edited",
        id="entrypoint-edited",
    ),
    pytest.param(
        lambda s: s.job(spec=spec_of(nodes={"min": 2, "max": 4}, runPolicy={"activeDeadlineSeconds": 10})),
        DRAINING,
        "DeadlineExceeded",
        id="deadline",
    ),
]


@pytest.mark.parametrize(("change", "state", "reason"), ENDS)
def test_what_ends_a_training_generation(change: Change, state: GenerationState, reason: str | None) -> None:
    scene = change(training_job())
    decided = scene.plan()
    assert decided.status.generation is not None
    assert (decided.status.generation.state, decided.status.generation.reason) == (state, reason)
    assert not [a for a in decided.actions if isinstance(a, DeletePod)]
    again = scene.decided().plan()
    assert again.status.generation == decided.status.generation


def test_a_drain_that_takes_too_long_is_stopped() -> None:
    scene = training_job().node(4, notice=notice(4, lead=10)).decided().later(16)
    generation = scene.plan().status.generation
    assert generation is not None
    assert (generation.state, generation.reason) == (STOPPING, "Preempted")


@pytest.mark.parametrize(("seconds", "state"), [(14, DRAINING), (16, STOPPING)])
def test_a_new_operator_with_another_clock_leaves_a_drain_its_time(seconds: float, state: GenerationState) -> None:
    """By its clock, the deadline has passed before it listens."""
    drains = training_job().node(4, notice=notice(4, lead=10)).decided().later(60)
    taken_over = replace(drains, observed=replace(drains.observed, listening_since=drains.now))
    generation = taken_over.later(seconds).plan().status.generation
    assert generation is not None
    assert generation.state is state


def test_a_drained_generation_is_followed_at_once_by_the_next() -> None:
    scene = training_job().node(4, notice=notice(4)).decided()
    decided = scene.all_say(phase=AgentPhase.DRAINED, commit=commit(1, 51), progress=training(51)).plan()
    generation = decided.status.generation
    assert generation is not None
    assert (generation.number, generation.state, len(generation.members)) == (2, ACTIVE, 3)
    assert generation.resume == commit(1, 51)
    assert [t.reason for t in decided.status.transitions] == ["Preempted"]
    assert decided.status.transitions[0].with_notice
    assert decided.status.preemptions == 1
    assert [a.name for a in decided.actions if isinstance(a, DeletePod)] == ["job-4"]


def test_a_new_operator_waits_for_agents_that_it_has_yet_to_hear() -> None:
    def num_members(scene: Scene) -> int | None:
        generation = scene.plan().status.generation
        assert generation is not None
        return len(generation.members) if generation.number == 2 else None

    scene = training_job().generation(state=ENDED, ended_at=at(95), reason="Grow").all_say(phase=AgentPhase.DRAINED)
    assert num_members(scene.forgets(4)) == 3, "the operator would have heard it"
    restarted = replace(scene, observed=replace(scene.observed, listening_since=at(99)))
    assert num_members(restarted.forgets(4)) is None
    assert num_members(restarted) == 4
    assert num_members(restarted.forgets(4).later(4)) == 3, "it may be lost"


def test_a_new_operator_waits_for_them_before_the_first_generation_too() -> None:
    """Its pods have been up for longer than others would be waited for."""

    def num_members(scene: Scene) -> int | None:
        generation = scene.plan().status.generation
        return None if generation is None else len(generation.members)

    scene = replace(waiting_job(), now=at(100)).all_say()
    assert num_members(scene.forgets(4)) == 3, "the operator would have heard it"
    restarted = replace(scene, observed=replace(scene.observed, listening_since=at(99)))
    assert num_members(restarted.forgets(4)) is None
    assert num_members(restarted) == 4
    assert num_members(restarted.forgets(4).later(4)) == 3, "it may be lost"


def test_a_new_operator_keeps_a_replacement_until_it_has_heard_of_the_notices() -> None:
    def deleted(scene: Scene) -> list[str]:
        return [action.name for action in scene.plan().actions if isinstance(action, DeletePod)]

    scene = training_job().with_pod(pod(5))
    restarted = replace(scene, observed=replace(scene.observed, listening_since=at(99)))
    assert deleted(scene) == ["job-5"]
    assert deleted(restarted) == []
    assert deleted(restarted.later(6)) == ["job-5"]


def test_an_older_commit_is_not_believed() -> None:
    scene = training_job().status(commit=commit(2, 90))
    assert scene.plan().status.commit == commit(2, 90)


def test_a_generation_that_may_find_commits_does_not_say_that_it_starts_from_step_0() -> None:
    """As of a fork, or of an earlier job: the operator doesn't read the store."""
    [event] = [
        e for e in replace(waiting_job(), now=at(5)).all_say().plan().events if e.reason == "GenerationStarted"
    ]
    assert "Generation 1 starts from the newest commit, or step 0 if there is none, with" in event.message


SAVES_FAIL = Condition(
    type="CheckpointsHealthy",
    status="False",
    reason="CheckpointStorageMissing",
    message="The bucket does not exist.",
    last_transition_time=NOW,
)
EARLY_STOP = training().model_copy(update={"phase": TrainerPhase.DONE})
GROWTH: list[Any] = [
    pytest.param(lambda s: s, "Grow", id="all-are-ready"),
    pytest.param(lambda s: s.generation(first_step_at=at(90)), None, id="too-soon-after-the-first-step"),
    pytest.param(lambda s: s.all_say(progress=training(980)).status(accounted_at=None), None, id="nearly-done"),
    pytest.param(lambda s: s.says(1, progress=EARLY_STOP), None, id="stopped-early"),
    pytest.param(lambda s: s.says(4, warm=False), None, id="not-warm"),
    pytest.param(lambda s: s.node(4, notice=notice(4)), None, id="leaving"),
    pytest.param(lambda s: s.status(conditions=(SAVES_FAIL,)), None, id="saves-fail"),
]


@pytest.mark.parametrize(("change", "reason"), GROWTH)
def test_growth(change: Change, reason: str | None) -> None:
    scene = training_job()
    generation = scene.observed.job.status.generation
    assert generation is not None
    smaller = scene.generation(members=generation.members[:3])
    waiting = smaller.says(4, generation=0, phase=AgentPhase.IDLE, progress=None)
    plan = change(waiting).plan()
    decided = plan.status.generation
    assert decided is not None
    assert decided.reason == reason
    said = [event.message for event in plan.events if event.reason == "Grow"]
    assert said == ([f"Generation {decided.number} drains: job-4 can join"] if reason else [])


@pytest.mark.parametrize(("max_nodes", "num_waiting"), [(4, 1), (3, 0)])
def test_a_pod_that_is_deleted_waits_for_no_place(max_nodes: int, num_waiting: int) -> None:
    scene = training_job()
    generation = scene.observed.job.status.generation
    assert generation is not None
    smaller = scene.generation(members=generation.members[:3]).spec(nodes={"min": 2, "max": max_nodes})
    plan = smaller.says(4, generation=0, phase=AgentPhase.IDLE, progress=None).plan()
    assert sum(isinstance(action, DeletePod) for action in plan.actions) == 1 - num_waiting
    assert plan.status.members.waiting == num_waiting


ASSIGNMENTS: list[Any] = [
    pytest.param(lambda s: s, "u1", AssignmentAction.RUN, id="member"),
    pytest.param(lambda s: s, "stranger", AssignmentAction.WAIT, id="not-a-member"),
    pytest.param(lambda s: s.generation(state=DRAINING), "u1", AssignmentAction.DRAIN, id="draining"),
    pytest.param(lambda s: s.generation(state=STOPPING), "u1", AssignmentAction.STOP, id="stopping"),
    pytest.param(lambda s: s.generation(state=ENDED), "u1", AssignmentAction.STOP, id="ended"),
    pytest.param(lambda s: s.status(phase=Phase.FAILED), "u1", AssignmentAction.EXIT, id="failed"),
    pytest.param(lambda s: s.job(deleting=True), "u1", AssignmentAction.EXIT, id="being-deleted"),
    pytest.param(lambda s: s.job(deleting=True), "stranger", AssignmentAction.EXIT, id="deleted-before-it-joined"),
]


@pytest.mark.parametrize(("change", "uid", "action"), ASSIGNMENTS)
def test_assignments(change: Change, uid: str, action: AssignmentAction) -> None:
    assert assignment_for(change(training_job()).observed.job, uid).action is action
