"""Truth tables of `plan` about single pods.

They show what a pod that answers strangely, or ends, does to a generation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scene import ACTIVE, DRAINING, STOPPING, Change, at, starting_job, training, training_job, waiting_job
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.reports import TrainerPhase
from spottrain_api.v1alpha1.status import GenerationState
from spottrain_operator.core.model import CreatePod, DeletePod

ENDED_POD: dict[str, Any] = {"phase": "Failed", "ready": False, "exit_code": 1, "exit_reason": "Error"}

MEMBERS: list[Any] = [
    pytest.param(
        lambda s: s.pod(4, **ENDED_POD).forgets(4),
        "Failure",
        "the container of pod job-4 ended with exit code 1 (Error)",
        id="its-container-ends",
    ),
    pytest.param(
        lambda s: s.pod(4, **ENDED_POD | {"exit_code": 137, "exit_reason": "OOMKilled"}).forgets(4),
        "Failure",
        "pod job-4 ran out of memory (OOMKilled); raise its resources.limits.memory",
        id="its-container-needs-too-much-memory",
    ),
    pytest.param(
        lambda s: s.pod(4, **ENDED_POD | {"exit_code": 137}).forgets(4),
        "NodeLost",
        "n4 went without notice",
        id="its-container-is-killed",
    ),
    pytest.param(
        lambda s: s.says(4, phase=AgentPhase.STARTING, progress=None),
        "Failure",
        "the agent of pod job-4 restarted",
        id="its-agent-starts-again-while-others-step",
    ),
]


@pytest.mark.parametrize(("change", "reason", "message"), MEMBERS)
def test_a_member_that_ends_stops_the_generation(change: Change, reason: str, message: str) -> None:
    scene = change(training_job()).decided()
    generation = scene.observed.job.status.generation
    assert generation is not None
    assert (generation.state, generation.reason) == (STOPPING, reason)
    for sequence in (1, 2, 3):
        scene = scene.says(sequence, phase=AgentPhase.STOPPED)
    [transition] = scene.later(6).plan().status.transitions
    assert transition.message == message


def test_a_transition_names_some_of_many_lost_nodes() -> None:
    """A status keeps many transitions, and etcd's limit is 1.5 MiB."""
    scene = training_job(num_pods=8, nodes={"min": 2, "max": 8})
    for sequence in range(2, 9):
        scene = scene.pod(sequence, **ENDED_POD | {"exit_code": 137}).forgets(sequence)
    [transition] = scene.decided().says(1, phase=AgentPhase.STOPPED).later(6).plan().status.transitions
    assert transition.message == "n2, n3, n4, n5, n6 and 2 more went without notice"


@pytest.mark.parametrize(("seconds", "state"), [(119, ACTIVE), (121, STOPPING)])
def test_an_agent_has_two_minutes_to_take_its_assignment(seconds: float, state: GenerationState) -> None:
    scene = starting_job().says(4, generation=0, phase=AgentPhase.IDLE)
    generation = scene.later(seconds - 1).plan().status.generation
    assert generation is not None
    assert generation.state is state


@pytest.mark.parametrize(("latency", "state"), [(0.0, STOPPING), (95.0, ACTIVE)])
def test_a_report_that_was_long_on_its_way_is_no_restart(latency: float, state: GenerationState) -> None:
    """It was made before the generation's first step, and taken after it."""
    scene = training_job().says(4, latency=latency, phase=AgentPhase.STARTING, progress=None)
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.state is state


def test_an_agent_whose_reports_were_all_slow_has_not_restarted() -> None:
    """Nobody knows how slow: one made before the first step seems to come after it."""
    slow = training_job().says(4, generation=0, phase=AgentPhase.IDLE, progress=None)
    generation = slow.plan().status.generation
    assert generation is not None
    assert generation.state is ACTIVE


def test_why_a_generation_failed_stays_known_when_all_its_members_have_stopped() -> None:
    scene = training_job().says(4, phase=AgentPhase.STARTING, progress=None).decided()
    stopping = scene.observed.job.status.generation
    assert stopping is not None
    assert stopping.message == "the agent of pod job-4 restarted"
    status = scene.all_say(phase=AgentPhase.STOPPED).later(6).plan().status
    assert [each.message for each in status.transitions] == ["the agent of pod job-4 restarted"]


def test_a_member_that_does_not_stop_is_not_waited_for() -> None:
    scene = training_job().without_pod(4).decided()
    assert scene.observed.job.status.generation is not None
    assert scene.observed.job.status.generation.state is STOPPING
    stopped = scene.says(1, phase=AgentPhase.STOPPED).says(2, phase=AgentPhase.STOPPED)
    waits, goes_on = stopped.later(20).plan().status, stopped.later(21).plan().status
    assert waits.generation is not None
    assert (waits.generation.number, waits.generation.state) == (1, STOPPING)
    assert [transition.reason for transition in goes_on.transitions] == ["NodeLost"]


@pytest.mark.parametrize(("phase", "state"), [(TrainerPhase.SAVING, ACTIVE), (TrainerPhase.TRAINING, STOPPING)])
def test_the_last_save_has_as_long_as_a_start(phase: TrainerPhase, state: GenerationState) -> None:
    saving = training().model_copy(update={"phase": phase})
    scene = training_job(runPolicy={"hangTimeoutSeconds": 60, "startTimeoutSeconds": 600})
    generation = scene.all_say(progress=saving, step_age_seconds=300.0).plan().status.generation
    assert generation is not None
    assert generation.state is state


def test_a_node_that_is_being_deleted_is_drained() -> None:
    generation = training_job().node(4, deleting=True).plan().status.generation
    assert generation is not None
    assert (generation.state, generation.reason) == (DRAINING, "Preempted")


@pytest.mark.parametrize(("seconds", "deleted"), [(250, []), (350, ["job-5"])])
def test_a_pod_that_cannot_start_while_others_train_is_replaced(seconds: float, deleted: list[str]) -> None:
    scene = training_job(nodes={"min": 2, "max": 5})
    fifth = replace(
        scene.observed.pods[0],
        name="job-5",
        uid="u5",
        sequence=5,
        node="n5",
        created_at=at(100),
        scheduled_at=at(100),
        ready=False,
        ready_since=None,
        container_started=False,
        phase="Pending",
        waiting_reason="ErrImagePull",
    )
    plan = scene.with_pod(fifth).later(seconds).plan()
    assert [action.name for action in plan.actions if isinstance(action, DeletePod)] == deleted


@pytest.mark.parametrize(("seconds", "created"), [(9, 0), (11, 2)])
def test_pods_that_end_before_they_train_are_replaced_after_a_pause(seconds: float, created: int) -> None:
    scene = replace(waiting_job(), now=at(5))
    for sequence in (3, 4):
        scene = scene.pod(sequence, **ENDED_POD).forgets(sequence)
    plan = replace(scene, now=at(seconds)).plan()
    assert len([action for action in plan.actions if isinstance(action, CreatePod)]) == created
