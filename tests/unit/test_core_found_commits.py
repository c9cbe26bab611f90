"""A job whose checkpoint.uri held commits before it says so, and what that means."""

from __future__ import annotations

from scene import NOW, Scene, commit, starting_job, training
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.reports import Progress
from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.model import Event

URI = "s3://bucket/run"


def resumed(start_step: int, step: int, total_steps: int = 300) -> Progress:
    return training(step).model_copy(update={"start_step": start_step, "total_steps": total_steps})


def first_reports(progress: Progress, phase: AgentPhase = AgentPhase.RUNNING) -> Scene:
    """The ranks of the first generation say where they are."""
    scene = starting_job(checkpoint={"uri": URI}).later((NOW - starting_job().now).total_seconds())
    return scene.all_say(generation=1, phase=phase, step_age_seconds=0.0, progress=progress, commit=commit(7, 300))


def told(scene: Scene) -> list[Event]:
    return [event for event in scene.plan().events if event.reason == "EarlierJob"]


def test_a_job_that_continues_from_commits_that_it_did_not_write_names_the_step() -> None:
    scene = first_reports(resumed(100, 101))
    [event] = told(scene)
    assert event.type == "Normal"
    assert event.message == (
        f"This job continues from step 100, whose commit was at {URI} before it. For a fresh run, create a new "
        "job with a different checkpoint.uri"
    )
    assert not told(scene.decided()), "it is told once"


def test_a_fresh_run_says_nothing_of_earlier_commits() -> None:
    assert not told(first_reports(resumed(0, 1)))


def test_a_job_without_a_step_to_make_says_so() -> None:
    status = first_reports(resumed(300, 300), AgentPhase.SUCCEEDED).plan().status
    assert status.phase is Phase.SUCCEEDED
    assert status.message == (
        f"Nothing to train: {URI} was already at step 300 of 300. For a fresh run, create a new job with a different "
        "checkpoint.uri. To train on, raise the script's steps"
    )


def test_a_job_that_trained_on_says_to_which_step() -> None:
    status = first_reports(resumed(100, 300), AgentPhase.SUCCEEDED).plan().status
    assert (status.phase, status.message) == (Phase.SUCCEEDED, "Trained to step 300")
