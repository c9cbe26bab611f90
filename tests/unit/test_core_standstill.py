"""A job whose pods run but make no step.

Its message says so long before the limit that ends the generation.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import Scene, at, notice, starting_job, training, training_job
from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.notices import NoticeKind
from spottrain_api.contract.reports import Progress, TrainerPhase
from spottrain_api.v1alpha1.status import GenerationState
from spottrain_operator.core.timing import DEFAULT_TIMING


def stands_still(seconds: float, **progress: Any) -> Scene:
    """Its newest step is that old."""
    return training_job().all_say(step_age_seconds=seconds, progress=training().model_copy(update=progress))


def message(scene: Scene) -> str:
    status = scene.plan().status
    progressing = status.condition("Progressing")
    assert progressing is not None
    assert progressing.message == status.message
    return status.message


def test_the_message_says_since_when_and_how_to_read_the_logs_of_all_pods() -> None:
    scene = stands_still(DEFAULT_TIMING.no_step + 1).says(3, progress=training(49))
    assert message(scene) == (
        "Training in generation 1 with 4 nodes; no step since 00:01:39 UTC (step 50). "
        "Without a step for 600 s the generation is stopped (runPolicy.hangTimeoutSeconds; lower it to stop it "
        "sooner). Then the logs of all pods show where each rank stood: "
        "kubectl logs -n default -l spottrain.dev/job=job --prefix --tail=300. py-spy dump "
        "--subprocesses shows it at once"
    )
    assert message(scene.decided().later(100)) == message(scene), "a status that is the same need not be written"
    assert "no step since" not in message(scene.all_say(step_age_seconds=0.1, progress=training(51)))


@pytest.mark.parametrize("step_seconds", [1.0, 60.0])
def test_steps_that_take_long_are_waited_for(step_seconds: float) -> None:
    limit = max(DEFAULT_TIMING.no_step, 5 * step_seconds)
    assert "no step since" not in message(stands_still(limit, step_seconds=step_seconds))
    assert "no step since" in message(stands_still(limit + 0.1, step_seconds=step_seconds))


def test_a_standstill_is_said_before_a_short_limit_ends_it() -> None:
    scene = training_job(runPolicy={"hangTimeoutSeconds": 40})
    assert "no step since" not in message(scene.all_say(step_age_seconds=20.0))
    assert "Without a step for 40 s" in message(scene.all_say(step_age_seconds=20.1))


def test_a_start_is_waited_for_while_its_limit_is_not_understood() -> None:
    opens = starting_job().all_say(phase=AgentPhase.RUNNING, progress=opening())
    opens = opens.job(not_understood=("spec.runPolicy.startTimeoutSeconds",))
    assert message(opens.later(3600)) == (
        "Starting generation 1 with 4 nodes; no step since its start at 00:00:03 UTC. The generation continues, as "
        "this operator doesn't understand runPolicy.startTimeoutSeconds. py-spy dump --subprocesses shows where "
        "ranks stand"
    )
    left = opens.says(2, phase=AgentPhase.SUCCEEDED, progress=opening(TrainerPhase.DONE))
    assert f"{LEFT}, while others have not. The generation continues" in message(left.later(3600))


def test_one_rank_that_makes_steps_is_enough() -> None:
    assert "no step since" not in message(stands_still(DEFAULT_TIMING.no_step + 1).says(2, step_age_seconds=1.0))


@pytest.mark.parametrize("later", [False, True])
def test_a_member_that_is_frozen_does_not_hide_the_standstill(later: bool) -> None:
    """Its connection stays open, so that it is not silent.

    Only a word of its own that is newer counts.
    """
    scene = stands_still(DEFAULT_TIMING.no_step + 1)
    frozen = scene.says(2, age=0.0 if later else DEFAULT_TIMING.no_step + 3, step_age_seconds=1.0)
    heard = replace(frozen.observed.reports["u2"], heard_at=frozen.now)
    frozen = replace(frozen, observed=replace(frozen.observed, reports={**frozen.observed.reports, "u2": heard}))
    assert ("no step since" in message(frozen)) != later


def test_the_limit_of_a_save_at_the_end_is_named() -> None:
    told = message(stands_still(DEFAULT_TIMING.no_step + 1, phase=TrainerPhase.SAVING))
    assert "Without a step for 900 s the generation is stopped (runPolicy.startTimeoutSeconds;" in told


def test_a_start_that_takes_long_is_reported() -> None:
    scene = starting_job().all_say(
        phase=AgentPhase.RUNNING,
        progress=training().model_copy(update={"phase": TrainerPhase.STARTING, "first_step_at": None, "step": 0}),
    )
    assert (
        message(replace(scene, now=at(3 + DEFAULT_TIMING.no_step)).later(0)) == "Starting generation 1 with 4 nodes"
    )
    told = message(scene.later(3 + DEFAULT_TIMING.no_step))
    assert told.startswith("Starting generation 1 with 4 nodes; no step since its start at 00:00:03 UTC. Without")
    assert "(runPolicy.startTimeoutSeconds;" in told


def opening(phase: TrainerPhase = TrainerPhase.STARTING, total_steps: int | None = None) -> Progress:
    """Before the first step of a script that opens a session."""
    return Progress(generation=1, phase=phase, total_steps=total_steps, updated_at=at(3))


LEFT = "pod job-2 (node rank 1) ended with exit code 0 before the first step"


@pytest.mark.parametrize("end", [opening(), opening(TrainerPhase.DONE), opening(TrainerPhase.DONE, 1000)])
def test_a_member_that_ends_before_the_first_step_is_named_and_the_limit_counts(end: Progress) -> None:
    waits = starting_job().all_say(phase=AgentPhase.RUNNING, progress=opening())
    scene = waits.says(2, phase=AgentPhase.SUCCEEDED, progress=end)
    assert message(scene) == (
        f"Starting generation 1 with 4 nodes; {LEFT}, while others have not. Without a step for 900 s the "
        "generation is stopped (runPolicy.startTimeoutSeconds). Each rank has to make every step: see in the script "
        "what ends that one, such as a break, a return or sys.exit"
    )
    [event] = [e for e in scene.later(900).plan().events if e.reason == "Hang"]
    assert event.message == (
        "Generation 1 is stopped: no rank made a first step within runPolicy.startTimeoutSeconds (900): "
        f"{LEFT}. Each rank has to make every step: see in the script what ends that one, such as a "
        "break, a return or sys.exit"
    )


@pytest.mark.parametrize("end", [None, training(1000).model_copy(update={"first_step_at": None})])
def test_a_plain_script_and_one_that_is_complete_may_end_one_by_one(end: Progress | None) -> None:
    """Rank 0 may have work left, such as an export."""
    scene = starting_job().all_say(phase=AgentPhase.RUNNING, progress=end).says(2, phase=AgentPhase.SUCCEEDED)
    assert message(scene.later(1000)) == "Starting generation 1 with 4 nodes"


def test_after_the_first_step_a_member_may_end_before_the_others() -> None:
    scene = stands_still(DEFAULT_TIMING.no_step + 1).says(2, phase=AgentPhase.SUCCEEDED)
    assert message(scene.later(1000)) == "Training in generation 1 with 4 nodes"


@pytest.mark.parametrize("phase", [TrainerPhase.SAVING, TrainerPhase.DONE], ids=lambda p: p.value)
def test_a_member_that_leaves_the_loop_alone_is_named_and_is_not_waited_for_as_a_save(phase: TrainerPhase) -> None:
    """A rank that breaks out of the loop saves, which needs all ranks."""
    left = training(12).model_copy(update={"phase": phase})
    scene = stands_still(DEFAULT_TIMING.stepping + 1, step=12).says(
        2, step_age_seconds=DEFAULT_TIMING.stepping + 1, progress=left
    )
    clause = "pod job-2 (node rank 1) left its loop or session at step 12 of 1000"
    ranks = (
        "Each rank has to make every step: see in the script what ends that one, such as a break, a return or "
        "sys.exit"
    )
    assert message(scene) == (
        f"Training in generation 1 with 4 nodes; {clause}, while others have not. Without a step for 600 s the "
        f"generation is stopped (runPolicy.hangTimeoutSeconds). {ranks}"
    )
    hangs = scene.all_say(step_age_seconds=601).says(2, progress=left)
    ended = hangs.decided().all_say(phase=AgentPhase.STOPPED).says(2, progress=left).later(6).plan().status
    assert clause in ended.transitions[0].message, "also when all have been stopped"
    [event] = [e for e in hangs.plan().events if e.reason == "Hang"]
    assert event.message == (
        f"Generation 1 is stopped: no rank made a step within runPolicy.hangTimeoutSeconds (600): {clause}. {ranks}"
    )

    all_left = stands_still(DEFAULT_TIMING.stepping + 1, step=12, phase=phase)
    assert "left its loop" not in message(all_left), "as with early stopping"
    at_the_end = stands_still(601, step=1000).says(2, progress=left.model_copy(update={"step": 1000}))
    assert not [e for e in at_the_end.plan().events if e.reason == "Hang"], "rank 0 may export before it saves"


@pytest.mark.parametrize("scene", [training_job(), starting_job()], ids=["steps", "no-steps-left"])
def test_what_a_script_does_after_its_session_takes_as_long_as_it_takes(scene: Scene) -> None:
    """It evaluates, or uploads the model.

    A generation that resumes at the last step makes none.
    """
    known = scene.observed.job.status.generation
    assert known is not None
    done = training(1000).model_copy(update={"phase": TrainerPhase.DONE, "first_step_at": known.first_step_at})
    scene = scene.all_say(phase=AgentPhase.RUNNING, step_age_seconds=4000.0, progress=done).later(4000)
    assert message(scene).endswith(": all ranks have left their session, and the script goes on")
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.state is GenerationState.ACTIVE


def test_ranks_that_have_left_their_session_wait_for_no_silent_member() -> None:
    done = training(1000).model_copy(update={"phase": TrainerPhase.DONE})
    scene = training_job().all_say(step_age_seconds=100.0, progress=done)
    silent = scene.says(2, age=DEFAULT_TIMING.silent_while_stuck + 1, step_age_seconds=100.0, progress=done)
    generation = silent.plan().status.generation
    assert generation is not None
    assert generation.state is GenerationState.ACTIVE


def test_a_member_that_leaves_its_session_before_the_first_step_is_named() -> None:
    scene = starting_job().all_say(phase=AgentPhase.RUNNING, progress=opening())
    left = scene.says(2, phase=AgentPhase.RUNNING, progress=opening(TrainerPhase.SAVING))
    assert "; pod job-2 (node rank 1) left its loop or session before the first step, while others" in message(left)


def test_a_member_that_leaves_as_the_hang_is_stopped_has_not_caused_it() -> None:
    """Its peers lose a rank that is stopped first, and leave by an exception."""
    stopping = starting_job().all_say(phase=AgentPhase.RUNNING, progress=opening()).later(900).decided()
    left = opening(TrainerPhase.DONE).model_copy(update={"updated_at": stopping.now + timedelta(seconds=1)})
    ended = stopping.all_say(phase=AgentPhase.STOPPED).says(2, progress=left).later(6).plan().status
    assert ended.transitions[0].reason == "Hang"
    assert "no rank made a first step within" in ended.transitions[0].message
    assert "left its loop" not in ended.transitions[0].message


@pytest.mark.parametrize(
    ("phase", "seconds", "state"),
    [
        (TrainerPhase.TRAINING, 60, GenerationState.DRAINING),
        (TrainerPhase.TRAINING, 61, GenerationState.STOPPING),
        (TrainerPhase.SAVING, 850, GenerationState.DRAINING),
    ],
)
def test_a_drain_with_a_far_deadline_has_the_limit_of_a_hang(
    phase: TrainerPhase, seconds: float, state: GenerationState
) -> None:
    """A save ends by the deadline by itself, and a node that goes is no failure."""
    scene = training_job(runPolicy={"hangTimeoutSeconds": 60})
    drains = scene.node(3, notice=notice(3, lead=900, kind=NoticeKind.MAINTENANCE)).decided().later(seconds)
    told = training().model_copy(update={"phase": phase})
    plan = drains.all_say(progress=told, step_age_seconds=float(seconds), stalled=True).plan()
    assert plan.status.generation is not None
    assert (plan.status.generation.state, plan.status.generation.reason) == (state, "Preempted")
    assert ("Hang" in [e.reason for e in plan.events]) == (state is GenerationState.STOPPING)


def test_the_message_of_a_drain_says_that_no_step_is_made() -> None:
    drains = training_job().node(3, notice=notice(3, lead=900)).decided()
    told = message(drains.all_say(step_age_seconds=DEFAULT_TIMING.no_step + 1))
    assert told.startswith(
        "Draining generation 1 with 4 nodes (Preempted), by 00:16:40 UTC; no step since 00:01:39 UTC"
    )
