"""Of two jobs with one checkpoint.uri the one that comes first trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scene import (
    START,
    Change,
    Scene,
    at,
    training_job,
    waiting_job,
)
from spottrain_api.v1alpha1.status import GenerationState, Phase, TrainingJobStatus
from spottrain_operator.core.model import (
    CreatePod,
    DeletePod,
    Rival,
)

RIVAL = Rival(namespace="team", name="older")


def with_rival(scene: Scene) -> Scene:
    return replace(scene, observed=replace(scene.observed, rival=RIVAL))


def blocked(status: TrainingJobStatus) -> str | None:
    return next((c.status for c in status.conditions if c.type == "Blocked"), None)


RIVALRY = {
    "new": (replace(waiting_job(0), now=START), "True", Phase.PENDING),
    "its pods are up": (replace(waiting_job(), now=at(3)), "True", Phase.PENDING),
    "it runs": (training_job(), None, Phase.RUNNING),
    "between generations": (training_job().generation(state=GenerationState.ENDED), "True", Phase.RECOVERING),
    "suspended": (replace(waiting_job(0, runPolicy={"suspend": True}), now=START), None, Phase.SUSPENDED),
}


@pytest.mark.parametrize(("scene", "truth", "phase"), RIVALRY.values(), ids=RIVALRY)
def test_a_job_waits_for_the_one_that_comes_first_at_its_checkpoints(
    scene: Scene, truth: str | None, phase: Phase
) -> None:
    before = scene.observed.job.status.generation
    held = with_rival(scene)
    decided = held.plan()
    status = decided.status
    assert (blocked(status), status.phase) == (truth, phase)
    assert not [action for action in decided.actions if isinstance(action, CreatePod)]
    assert (status.generation and status.generation.number) == (before and before.number)
    if truth is None:
        assert decided.actions == scene.plan().actions
        return
    assert {action.uid for action in decided.actions if isinstance(action, DeletePod)} == set(held.observed.reports)
    assert [(event.type, event.reason) for event in decided.events][-1:] == [("Warning", "CheckpointURIInUse")]
    assert "team/older, which comes first. For a run of its own, create this job again" in status.message
    assert status.message.endswith("this job then continues from its newest commit")
    again = held.decided().plan()
    assert (again.status, again.events) == (status, ())
    free = scene.job(status=status).later(6).plan()
    assert blocked(free.status) == "False"
    assert free.actions or free.status.generation != before
    assert "checkpoint.uri" not in free.status.message


NODES = {"min": 2, "max": 4}
NOT_BLOCKED: dict[str, tuple[Change, str, str]] = {
    "the other is over": (
        lambda s: replace(s, observed=replace(s.observed, rival=None)),
        "Free",
        "No other job comes first at checkpoint.uri",
    ),
    "it is suspended": (
        lambda s: s.spec(nodes=NODES, runPolicy={"suspend": True}),
        "Suspended",
        "A suspended job waits for no other",
    ),
    "it runs, and comes second since": (
        lambda s: s.generation(state=GenerationState.ACTIVE),
        "Running",
        "A generation that runs is left alone",
    ),
    "its deadline passes": (
        lambda s: s.spec(nodes=NODES, runPolicy={"activeDeadlineSeconds": 1}),
        "Finished",
        "The job is over",
    ),
    "it was over already": (lambda s: s.status(phase=Phase.FAILED), "Finished", "The job is over"),
}


@pytest.mark.parametrize(("change", "reason", "message"), NOT_BLOCKED.values(), ids=NOT_BLOCKED)
def test_why_a_job_that_was_blocked_is_not(change: Change, reason: str, message: str) -> None:
    held = with_rival(training_job().generation(state=GenerationState.ENDED)).decided()
    assert blocked(held.observed.job.status) == "True"
    status = change(held).plan().status
    told = next(c for c in status.conditions if c.type == "Blocked")
    assert (told.status, told.reason, told.message) == ("False", reason, message)
    assert (status.phase is Phase.FAILED) == (reason == "Finished")
