"""What `plan` makes of scripts that end well, and of a job that is finished."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import NOW, Change, starting_job, training_job
from spottrain_api.contract.assignments import AgentPhase, AssignmentAction
from spottrain_api.contract.reports import Progress, TrainerPhase
from spottrain_api.v1alpha1.status import Phase, ProgressStatus
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.model import DeleteJob, DeletePod

SUCCESSES: list[Any] = [
    pytest.param(lambda s: s, True, id="all"),
    pytest.param(lambda s: s.says(4, phase=AgentPhase.RUNNING), False, id="one-still-runs"),
    pytest.param(lambda s: s.forgets(4).without_pod(4), True, id="one-was-lost-at-the-end"),
    pytest.param(lambda s: s.forgets(1).without_pod(1), False, id="rank-0-was-lost-at-the-end"),
    pytest.param(lambda s: s.says(4, phase=AgentPhase.FAILED), False, id="one-failed"),
]


@pytest.mark.parametrize(("change", "succeeded"), SUCCESSES)
def test_success(change: Change, succeeded: bool) -> None:
    status = change(training_job().all_say(phase=AgentPhase.SUCCEEDED)).plan().status
    assert (status.phase is Phase.SUCCEEDED) is succeeded


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"step": 200}, "Trained to step 200"),
        (
            {"step": 150},
            "Trained to step 150 of 200: the script ended by itself before the last step, as with early stopping",
        ),
        ({"step": 200, "loss": None, "message": "The loss was nan"}, "Trained to step 200. The loss was nan"),
        ({"step": 200, "loss": 9e35, "message": "The loss was inf"}, "Trained to step 200. The loss was inf"),
        ({"step": 200, "loss": 0.5, "message": "It was skipped", "skipped_steps": 1}, "Trained to step 200"),
    ],
)
def test_a_success_says_if_it_came_early_or_not_as_planned(told: dict[str, Any], said: str) -> None:
    view = training_job().observed.reports["u1"].report.progress
    assert view is not None
    progress = view.model_copy(update={"total_steps": 200} | told)
    status = training_job().all_say(phase=AgentPhase.SUCCEEDED, progress=progress).plan().status
    assert (status.phase, status.message) == (Phase.SUCCEEDED, said)


NEVER_OPENED = (
    "script ended with exit code 0 without a step: it never opened its session. Look at what comes before "
    'spottrain.session in the script: the line if __name__ == "__main__", sys.exit, a return'
)
TRAINED = ProgressStatus(step=120, total_steps=300)


@pytest.mark.parametrize(
    ("phase", "before", "said"),
    [
        (TrainerPhase.STARTING, ProgressStatus(), f"The {NEVER_OPENED}"),
        (TrainerPhase.STARTING, TRAINED, f"Trained to step 120 of 300. Then the {NEVER_OPENED}"),
        (
            TrainerPhase.DONE,
            ProgressStatus(),
            "The script ended with exit code 0 without a step: it left its session before the loop of steps",
        ),
    ],
)
def test_a_success_without_a_step_says_why(phase: TrainerPhase, before: ProgressStatus, said: str) -> None:
    progress = Progress(generation=1, phase=phase, updated_at=NOW)
    scene = starting_job().status(progress=before).all_say(phase=AgentPhase.SUCCEEDED, progress=progress)
    decided = scene.plan()
    assert (decided.status.phase, decided.status.message) == (Phase.SUCCEEDED, said)
    assert [(e.type, e.reason, e.message) for e in decided.events] == [
        ("Warning", "NotAsPlanned", said),
        ("Normal", "Succeeded", "Exit code 0 counts as a success"),
    ]


@pytest.mark.parametrize(
    ("progress", "before", "said"),
    [
        (None, ProgressStatus(), "Trained to step 0"),
        (TrainerPhase.STARTING, ProgressStatus(step=300, total_steps=300), "Trained to step 300"),
    ],
    ids=["plain-script", "complete"],
)
def test_a_script_with_no_steps_to_make_succeeds_as_planned(
    progress: TrainerPhase | None, before: ProgressStatus, said: str
) -> None:
    told = Progress(generation=1, phase=progress, updated_at=NOW) if progress else None
    decided = starting_job().status(progress=before).all_say(phase=AgentPhase.SUCCEEDED, progress=told).plan()
    assert (decided.status.message, [e.reason for e in decided.events]) == (said, ["Succeeded"])


def test_a_finished_job_assigns_its_agents_to_leave_and_expires() -> None:
    scene = training_job(runPolicy={"ttlSecondsAfterFinished": 60}).all_say(phase=AgentPhase.SUCCEEDED).decided()
    assert assignment_for(scene.observed.job, "u1").action is AssignmentAction.EXIT
    gone = replace(scene, observed=replace(scene.observed, pods=()))
    assert gone.plan().requeue_after == pytest.approx(60)
    assert [type(a) for a in replace(gone, now=gone.now + timedelta(seconds=61)).plan().actions] == [DeleteJob]


LEFT_AT_THE_END: list[Any] = [
    pytest.param(lambda s: s, [], id="members-are-about-to-leave"),
    pytest.param(lambda s: s.pod(1, phase="Failed").pod(2, phase="Succeeded"), [], id="members-have-left"),
    pytest.param(lambda s: s.generation(members=s.observed.job.status.generation.members[:3]), [4], id="no-member"),
    pytest.param(
        lambda s: s.generation(members=s.observed.job.status.generation.members[:3]).pod(4, phase="Failed"),
        [],
        id="failed-before-it-was-a-member",
    ),
    pytest.param(lambda s: s.pod(1, phase="Failed").node(1, ready=False).says(1, age=5), [1], id="its-node-is-gone"),
    pytest.param(lambda s: s.spec(runPolicy={"cleanPodPolicy": "All"}), [1, 2, 3, 4], id="all"),
]


@pytest.mark.parametrize(("change", "deleted"), LEFT_AT_THE_END)
def test_pods_of_a_finished_job_are_kept_for_their_logs(change: Change, deleted: list[int]) -> None:
    scene = change(training_job()).status(phase=Phase.FAILED, completion_time=NOW)
    actions = [action for action in scene.plan().actions if isinstance(action, DeletePod)]
    assert [action.name for action in actions] == [f"job-{number}" for number in deleted]


def test_a_finished_job_whose_pods_have_ended_is_looked_at_no_more() -> None:
    scene = training_job().status(phase=Phase.SUCCEEDED, completion_time=NOW)
    assert scene.plan().requeue_after is not None
    for number in range(1, 5):
        scene = scene.pod(number, phase="Succeeded")
    assert scene.plan().requeue_after is None
    assert scene.pod(4, lingers=True).plan().requeue_after is not None


def test_a_container_that_outlives_the_trainer_does_not_hold_the_nodes_of_a_finished_job() -> None:
    scene = training_job().status(phase=Phase.FAILED, completion_time=NOW)
    scene = scene.pod(1, phase="Succeeded", lingers=True).pod(2, phase="Failed", lingers=True).pod(3, phase="Failed")
    assert [type(action) for action in scene.plan().actions] == [], "sidecars end after the trainer"
    actions = [action for action in scene.without_pod(4).later(16).plan().actions if isinstance(action, DeletePod)]
    assert [(action.name, action.grace_seconds) for action in actions] == [("job-1", None), ("job-2", None)]
