"""Truth tables of `plan` for failures.

They say whose fault each one was, what counts, and when a job is given up.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from scene import (
    NOW,
    at,
    commit,
    failed,
    notice,
    starting_job,
    training,
    training_job,
    waiting_job,
)
from spottrain_api.contract.assignments import AgentPhase, AssignmentAction
from spottrain_api.contract.reports import CheckpointTimings, Failure, FailureReason, Progress, TrainerPhase
from spottrain_api.v1alpha1.status import Phase
from spottrain_operator.core.assignments import assignment_for
from spottrain_operator.core.model import DeletePod


def test_a_failure_waits_for_a_culprit_before_it_counts() -> None:
    scene = failed(training_job(), FailureReason.LOST_PEER).decided()
    assert scene.plan().status.failures == 0
    assert scene.later(3).plan().status.failures == 0
    later = scene.later(6).plan().status
    assert later.failures == 1
    assert later.transitions[0].message == (
        "pod job-1: it broke. No pod says why that one ended: see the logs of the others"
    )


def test_a_failure_without_peers_counts_at_once() -> None:
    alone = replace(waiting_job(1, nodes={"min": 1, "max": 1}), now=at(3)).all_say(phase=AgentPhase.IDLE).decided()
    failed = alone.later(5).all_say(generation=1, phase=AgentPhase.FAILED)
    assert failed.plan().status.failures == 1


def test_a_lost_node_explains_the_failures_of_its_peers() -> None:
    scene = (
        failed(training_job(), FailureReason.SCRIPT_ERROR).decided().says(4, phase=AgentPhase.RUNNING, failure=None)
    )
    status = replace(scene, now=scene.now + timedelta(seconds=5)).plan().status
    assert (status.failures, status.preemptions, status.preemptions_without_notice) == (0, 1, 1)


def test_peers_that_fail_before_their_node_is_missed_are_reported_as_one_lost_node() -> None:
    first = failed(training_job(), FailureReason.LOST_PEER).says(4, age=2, phase=AgentPhase.RUNNING, failure=None)
    scene = first.decided()
    gone = replace(scene.node(4, ready=False), now=scene.now + timedelta(seconds=1)).plan()
    told = [(event.reason, event.message) for event in (*first.plan().events, *gone.events)]
    warnings = [(reason, message) for reason, message in told if reason in ("Failure", "NodeLost")]
    assert warnings == [("NodeLost", "Generation 1 is stopped: node n4 with pod job-4 is gone or not ready")]
    assert (gone.status.failures, gone.status.preemptions_without_notice) == (0, 1)


def test_a_failure_is_reported_once_when_it_is_known_to_be_one() -> None:
    scene = failed(training_job(), FailureReason.SCRIPT_ERROR, "ValueError: x")
    assert "Failure" not in [event.reason for event in scene.plan().events]
    told = scene.decided().later(6).plan().events
    failures = [event.message for event in told if event.reason == "Failure"]
    assert failures == ["Generation 1 has ended: pod job-1: ValueError: x"]


@pytest.mark.parametrize(("error", "said"), [("ValueError: x", "ValueError: x"), ("x" * 500, "x" * 288 + "…")])
def test_the_message_of_a_job_that_is_retried_has_the_cause(error: str, said: str) -> None:
    scene = failed(training_job(), FailureReason.SCRIPT_ERROR, error)
    stopping = scene.plan().status.message
    assert stopping == f"Stopping generation 1 with 4 nodes (Failure): pod job-1: {said}"
    again = scene.decided().later(6).plan().status
    assert again.message == f"Starting generation 2 with 4 nodes. Generation 1 failed: pod job-1: {said}"


def test_a_failure_names_the_pod_and_rank_that_failed_first() -> None:
    error = Failure(
        reason=FailureReason.SCRIPT_ERROR, message="ValueError: x (train.py, line 3)", rank=5, traceback="  in main"
    )
    scene = failed(training_job(), FailureReason.LOST_PEER).says(3, phase=AgentPhase.FAILED, failure=error)
    decided = scene.decided().later(6).plan()
    message = "pod job-3, rank 5: ValueError: x (train.py, line 3)"
    assert decided.status.transitions[0].message == message
    told = [event.message for event in decided.events if event.reason == "Failure"]
    assert told == [f"Generation 1 has ended: {message}\n  in main"]


@pytest.mark.parametrize("sequence", [1, 4], ids=["first", "last"])
def test_a_killed_rank_explains_the_failures_of_its_peers(sequence: int) -> None:
    killed = Failure(reason=FailureReason.KILLED, message="The rank was killed by SIGKILL.", rank=sequence - 1)
    scene = failed(training_job(), FailureReason.LOST_PEER).says(sequence, phase=AgentPhase.FAILED, failure=killed)
    status = scene.decided().later(6).plan().status
    assert (
        status.transitions[0].message == f"pod job-{sequence}, rank {sequence - 1}: The rank was killed by SIGKILL."
    )

    bug = Failure(reason=FailureReason.SCRIPT_ERROR, message="ValueError: x", rank=1)
    first = scene.says(2, phase=AgentPhase.FAILED, failure=bug).decided().later(6).plan().status
    assert first.transitions[0].message == "pod job-2, rank 1: ValueError: x"


@pytest.mark.parametrize("reason", [FailureReason.LOST_PEER, FailureReason.RENDEZVOUS_FAILED], ids=lambda r: r.value)
def test_peers_of_a_member_that_left_early_say_who_did(reason: FailureReason) -> None:
    lost = Failure(reason=reason, message="Connection closed by peer", rank=0, traceback="  in main")
    scene = training_job().all_say(phase=AgentPhase.FAILED, failure=lost)
    left = scene.says(2, phase=AgentPhase.SUCCEEDED, failure=None)
    said = (
        "pod job-2 (node rank 1) ended with exit code 0 at step 50 of 1000; its peers lost it. Each rank has to make "
        "every step: see in the script what ends that one, such as a break, a return or sys.exit"
    )
    assert left.plan().status.message == f"Stopping generation 1 with 4 nodes (Failure): {said}"
    told = [event.message for event in left.decided().later(6).plan().events if event.reason == "Failure"]
    assert told == [f"Generation 1 has ended: {said}"]

    complete = left.says(2, progress=training(1000)).decided().later(6).plan().status
    assert complete.transitions[0].message.startswith("pod job-1, rank 0: Connection closed by peer")
    bug = Failure(reason=FailureReason.SCRIPT_ERROR, message="ValueError: x", rank=5)
    other = left.says(3, failure=bug).decided().later(6).plan().status
    assert other.transitions[0].message == "pod job-3, rank 5: ValueError: x"


@pytest.mark.parametrize(
    "reason", [FailureReason.INVALID_CONFIGURATION, FailureReason.CHECKPOINT_ACCESS_DENIED], ids=lambda r: r.value
)
def test_what_would_fail_again_is_not_tried_again(reason: FailureReason) -> None:
    scene = failed(training_job(), reason, "change this").decided()
    assert scene.observed.job.status.phase is Phase.FAILED
    assert scene.observed.job.status.message.startswith("change this. To run it again, ")
    assert assignment_for(scene.observed.job, "u1").action is AssignmentAction.EXIT
    assert len([a for a in scene.later(16).plan().actions if isinstance(a, DeletePod)]) == 4


def test_a_job_that_has_trained_waits_until_a_missing_program_is_corrected() -> None:
    scene = failed(training_job(), FailureReason.ENTRYPOINT_NOT_FOUND, "file nowhere.py does not exist.").decided()
    over = scene.later(6)
    [told] = [event.message for event in over.plan().events if event.reason == "Failure"]
    assert told == "Generation 1 has ended: pod job-1: file nowhere.py does not exist."
    waits = over.decided().later(60)
    status = waits.plan().status
    assert status.phase is Phase.RECOVERING
    assert status.message == "file nowhere.py does not exist. The job waits until it is edited, and keeps its nodes"
    assert (status.failures, status.generations_without_progress) == (0, 0)
    assert status.generation is not None
    assert status.generation.number == 1
    assert not waits.plan().actions
    corrected = waits.spec(nodes={"min": 2, "max": 4}, entrypoint={"script": "train.py", "args": ["again"]})
    assert corrected.plan().status.message == "Starting generation 2 with 4 nodes"
    fresh = waits.all_say(phase=AgentPhase.IDLE, generation=0, failure=None)
    assert fresh.plan().status.message == "Starting generation 2 with 4 nodes", "the pods were replaced"


def test_a_new_job_whose_program_is_missing_fails() -> None:
    scene = failed(starting_job(), FailureReason.ENTRYPOINT_NOT_FOUND, "file nowhere.py does not exist.")
    assert scene.plan().status.phase is Phase.FAILED


def test_saves_that_fail_are_a_condition_and_training_goes_on() -> None:
    message = "The bucket of s3://b/run is gone: make it again."
    failure = Failure(reason=FailureReason.CHECKPOINT_STORAGE_MISSING, message=message)
    # Only the member that was told of it says so, and it isn't the one that is furthest.
    failing = training_job().says(2, progress=training(49).model_copy(update={"checkpoint_failure": failure}))

    decided = failing.plan()
    condition = next(c for c in decided.status.conditions if c.type == "CheckpointsHealthy")
    assert (condition.status, condition.reason, condition.message) == ("False", failure.reason.value, message)
    assert decided.status.phase is Phase.RUNNING
    assert [(e.type, e.reason) for e in decided.events] == [("Warning", failure.reason.value)]
    trains = "Training in generation 1 with 4 nodes"
    assert decided.status.message == f"{trains}. Checkpoints fail (CheckpointStorageMissing): {message}"
    note = {"checkpoint_failure": failure, "message": f"Step 40 is damaged. {message}"}
    noted = training_job().says(2, progress=training(60).model_copy(update=note)).plan().status
    assert noted.message == f"{trains}. Step 40 is damaged. {message}", "it is told once"

    # Rank 0 says later that it has given up the save; the reason stays.
    told = Failure(reason=FailureReason.CHECKPOINT_SAVE_FAILED, message="given up, as rank 2 failed")
    again = failing.decided().later(5).says(1, progress=training(50).model_copy(update={"checkpoint_failure": told}))
    assert again.plan().events == ()
    healed = again.says(2, progress=training(60)).says(1, progress=saved(training(60))).plan().status
    assert next(c for c in healed.conditions if c.type == "CheckpointsHealthy").status == "True"
    assert healed.message == trains


def saved(progress: Progress) -> Progress:
    timings = CheckpointTimings(staging_seconds=0.1, upload_seconds=0.1, commit_seconds=0.1)
    return progress.model_copy(update={"checkpoint": timings})


@pytest.mark.parametrize(
    ("said", "status"),
    [
        pytest.param(training(50), "False", id="nothing was saved yet"),
        pytest.param(training(50).model_copy(update={"phase": TrainerPhase.DONE}), "False", id="it never began"),
        pytest.param(saved(training(50)), "True", id="a save ended well"),
    ],
)
def test_a_store_that_failed_is_no_better_for_a_new_generation(said: Progress, status: str) -> None:
    failure = Failure(reason=FailureReason.CHECKPOINT_STORAGE_FULL, message="Free space.")
    failing = training_job().says(1, progress=training().model_copy(update={"checkpoint_failure": failure})).decided()
    condition = failing.all_say(progress=said).plan().status.condition("CheckpointsHealthy")
    assert condition is not None
    assert condition.status == status


def test_a_store_that_a_start_waits_for_is_a_condition() -> None:
    failure = Failure(reason=FailureReason.CHECKPOINT_STORAGE_UNAVAILABLE, message="It does not answer.")
    waiting = Progress(generation=1, updated_at=NOW, checkpoint_failure=failure)
    status = starting_job().all_say(progress=waiting).plan().status
    condition = status.condition("CheckpointsHealthy")
    assert status.message.endswith(". Checkpoints fail (CheckpointStorageUnavailable): It does not answer.")
    assert condition is not None
    assert (condition.status, condition.message) == ("False", failure.message)


def test_a_job_that_goes_on_with_the_checkpoints_of_a_deleted_one_is_numbered_above_it() -> None:
    fenced = Failure(reason=FailureReason.LOST_PEER, message="generation 7 has taken over this job", fence=7)
    scene = starting_job(runPolicy={"failureBudget": 0}).all_say(phase=AgentPhase.FAILED, failure=fenced)
    decision = scene.decided().later(6).plan()
    status = decision.status
    assert status.failures == 0
    assert status.generation is not None
    assert status.generation.number == 8
    told = {event.reason: event for event in decision.events}
    assert told["EarlierJob"].type == "Normal"
    assert told["EarlierJob"].message.endswith("or starts at step 0 if it committed nothing")
    assert "Failure" not in told
    assert [(t.reason, t.message) for t in status.transitions] == [("EarlierJob", told["EarlierJob"].message)]
    stopping = scene.plan().status
    assert stopping.message.startswith(
        "Stopping generation 1 with 4 nodes (EarlierJob): An earlier job has used the folder"
    )


def test_a_script_without_the_library_is_not_taken_for_one_that_hangs() -> None:
    silent = {"generation": 1, "phase": AgentPhase.RUNNING, "progress": None, "step_age_seconds": 2000.0}
    scene = replace(starting_job(), now=at(2000)).all_say(**silent)
    status = scene.plan().status
    assert status.phase is Phase.RUNNING
    assert status.message == (
        "Training in generation 1 with 4 nodes; its script doesn't report steps: it has opened no session, so no "
        "hang limit applies. If it should have, see where it stands: kubectl logs -n default job-1"
    )
    hung = scene.all_say(
        progress=training().model_copy(update={"phase": TrainerPhase.STARTING, "first_step_at": None})
    )
    generation = hung.plan().status.generation
    assert generation is not None
    assert generation.reason == "Hang"


@pytest.mark.parametrize("says", [True, False], ids=["is-going-to-open-a-session", "may-not-use-the-library"])
def test_a_script_that_opens_no_session_hangs_only_if_it_was_going_to(says: bool) -> None:
    progress = Progress(generation=1, updated_at=at(5)) if says else None
    scene = replace(starting_job(runPolicy={"startTimeoutSeconds": 10, "failureBudget": 0}), now=at(20))
    status = scene.all_say(phase=AgentPhase.RUNNING, progress=progress).plan().status
    assert status.generation is not None
    assert status.generation.reason == ("Hang" if says else None)
    assert status.phase is (Phase.RECOVERING if says else Phase.STARTING)
    if says:
        ended = replace(scene.status(**dict(status)), now=at(22)).all_say(phase=AgentPhase.STOPPED, progress=progress)
        failed_status = ended.later(10).plan().status
        assert failed_status.phase is Phase.FAILED
        assert "no rank made a first step within runPolicy.startTimeoutSeconds (10)" in failed_status.message


def test_the_failure_budget_is_spent() -> None:
    scene = failed(training_job().status(failures=3), FailureReason.SCRIPT_ERROR, "ValueError").decided().later(6)
    status = scene.plan().status
    assert status.phase is Phase.FAILED
    assert "ValueError" in status.message
    assert "failureBudget" in status.message


def test_a_failure_budget_that_is_not_understood_is_never_spent() -> None:
    scene = training_job().status(failures=3).job(not_understood=("spec.runPolicy.failureBudget",))
    status = failed(scene, FailureReason.SCRIPT_ERROR).decided().later(6).plan().status
    assert (status.phase, status.failures) == (Phase.STARTING, 4)


@pytest.mark.parametrize(
    ("status", "reason", "last"),
    [
        ({"failures": 3}, "FailureBudgetExceeded", "This was failure 4, and runPolicy.failureBudget is 3"),
        (
            {"generations_without_progress": 2},
            "NoProgress",
            "3 generations in a row failed like this, without making a step",
        ),
    ],
)
def test_the_events_of_a_job_that_is_given_up_say_its_last_failure_once(
    status: dict[str, int], reason: str, last: str
) -> None:
    scene = failed(starting_job().status(**status), FailureReason.SCRIPT_ERROR, "ValueError: x").decided().later(6)
    decided = scene.plan()
    assert [(event.reason, event.message) for event in decided.events][-2:] == [
        ("Failure", "Generation 1 has ended: pod job-1: ValueError: x"),
        (reason, last),
    ]
    assert decided.status.message.startswith("pod job-1: ValueError: x; "), "the status says all of it"


def test_three_generations_without_a_step_end_the_job() -> None:
    scene = failed(starting_job().status(generations_without_progress=2), FailureReason.SCRIPT_ERROR).decided()
    status = scene.later(6).plan().status
    assert status.phase is Phase.FAILED
    assert {c.type: c.reason for c in status.conditions}["Failed"] == "NoProgress"


def test_a_generation_that_made_steps_ends_the_row_of_those_without() -> None:
    scene = failed(training_job().status(generations_without_progress=2), FailureReason.SCRIPT_ERROR).decided()
    assert scene.later(6).plan().status.generations_without_progress == 0
    scene = training_job().status(generations_without_progress=2).node(4, notice=notice(4)).decided()
    drained = scene.all_say(phase=AgentPhase.DRAINED, commit=commit(1, 51), progress=training(51))
    assert drained.plan().status.generations_without_progress == 0


def test_whether_a_script_without_the_library_made_progress_is_left_open() -> None:
    """It ran for a minute: only the failure budget ends it."""
    silent = failed(starting_job().status(generations_without_progress=2), FailureReason.SCRIPT_ERROR)
    scene = replace(silent.all_say(progress=None), now=at(90)).decided()
    status = scene.later(6).plan().status
    assert status.phase is not Phase.FAILED
    assert (status.failures, status.generations_without_progress) == (1, 2)


def test_a_hang_says_which_limit_it_broke() -> None:
    scene = training_job(runPolicy={"failureBudget": 0}).all_say(step_age_seconds=700.0).decided()
    status = scene.all_say(phase=AgentPhase.STOPPED).later(10).plan().status
    assert status.phase is Phase.FAILED
    assert "no rank made a step within runPolicy.hangTimeoutSeconds (600)" in status.message
    assert "training.steps" not in status.message
    opened = Progress(generation=1, updated_at=at(3))
    starts = starting_job().all_say(phase=AgentPhase.RUNNING, progress=opened, step_age_seconds=901).later(901)
    [event] = [event for event in starts.plan().events if event.reason == "Hang"]
    assert "Steps of a loop without training.steps don't count" in event.message


def test_a_failed_job_says_that_an_edit_does_not_start_it_again() -> None:
    wrong = Failure(reason=FailureReason.ENTRYPOINT_NOT_FOUND, message="no file nowhere.py. Correct the path.")
    scene = starting_job().all_say(phase=AgentPhase.FAILED, failure=wrong).decided()
    again = "To run it again, delete the job and apply it again, or apply it under another name"
    assert scene.observed.job.status.message == f"no file nowhere.py. Correct the path. {again}"
    assert not scene.plan().events
    edited = replace(scene, observed=replace(scene.observed, job=replace(scene.observed.job, metadata_generation=2)))
    [told] = edited.plan().events
    assert (told.type, told.reason) == ("Warning", "EditIgnored")
    assert told.message == f"The job has failed, and an edit does not start it again. {again}"
    assert not edited.decided().plan().events, "it is told once"


def test_a_succeeded_job_says_how_to_train_on_after_an_edit() -> None:
    scene = training_job().all_say(phase=AgentPhase.SUCCEEDED, progress=training(1000)).decided()
    assert scene.observed.job.status.phase is Phase.SUCCEEDED
    [told] = scene.job(metadata_generation=2).plan().events
    assert told.message == (
        "The job has succeeded, and an edit does not start it again. To train on, raise the script's steps, and "
        "apply the job under another name; its commits replace the old ones. For a fresh run, create a new "
        "job with a different checkpoint.uri"
    )


def test_old_commits_that_can_not_be_deleted_are_a_condition() -> None:
    sentence = "3.0 MB of old or unfinished checkpoints stay in the store, as they can't be deleted: denied."
    assert training_job().all_say(progress=saved(training(50))).plan().status.condition("CleanUpHealthy") is None
    failing = training_job().says(1, progress=training(50).model_copy(update={"clean_up_failure": sentence}))
    decided = failing.plan()
    condition = decided.status.condition("CleanUpHealthy")
    assert condition is not None
    assert (condition.status, condition.reason, condition.message) == ("False", "CleanUpFailed", sentence)
    assert [(e.type, e.reason) for e in decided.events] == [("Warning", "CleanUpFailed")]
    assert failing.decided().later(5).plan().events == (), "one event for one trouble"
    healed = failing.decided().says(1, progress=saved(training(60))).plan().status.condition("CleanUpHealthy")
    assert healed is not None
    assert healed.status == "True"


def test_a_rank_that_was_killed_explains_those_that_were_aborted() -> None:
    aborted = Failure(reason=FailureReason.KILLED, message="The rank was killed by SIGABRT.", exit_code=-6, rank=0)
    killed = Failure(reason=FailureReason.KILLED, message="The rank was killed by SIGKILL.", exit_code=-9, rank=2)
    scene = training_job().all_say(phase=AgentPhase.FAILED, failure=aborted)
    scene = scene.says(3, phase=AgentPhase.FAILED, failure=killed).decided().later(6)
    assert any("job-3, rank 2: The rank was killed by SIGKILL" in event.message for event in scene.plan().events)
