"""Scenes in which a constant of `timing` decides.

Each function tells what is decided if something has lasted for that many seconds.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from scene import (
    ENDED,
    NOW,
    START,
    STOPPING,
    Scene,
    at,
    failed,
    notice,
    pod,
    starting_job,
    training,
    training_job,
    waiting_job,
)
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.names import TAINT_PREEMPTION
from spottrain_api.contract.notices import NodeWatch, WatchState
from spottrain_api.contract.reports import CheckpointTimings, Failure, FailureReason
from spottrain_api.v1alpha1.status import (
    GenerationState,
    GenerationStatus,
    HoldOff,
    Phase,
    ProgressStatus,
    Transition,
)
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import culprits, members_of
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import CreatePod, DeletePod, Refusal
from spottrain_operator.core.policies.transitions import open_transition
from spottrain_operator.core.timing import DEFAULT_TIMING
from spottrain_operator.objects.pod_events import wants_events

NOT_UP: dict[str, Any] = {"phase": "Pending", "ready": False, "ready_since": None, "container_started": False}
ENDED_EARLY: dict[str, Any] = {**NOT_UP, "phase": "Failed", "exit_code": 1, "exit_reason": "Error"}


def ago(seconds: float) -> Any:
    return NOW - timedelta(seconds=seconds)


def generation_of(scene: Scene) -> GenerationStatus:
    generation = scene.plan().status.generation
    assert generation is not None
    return generation


def reason(scene: Scene) -> str | None:
    return generation_of(scene).reason


def is_failed(scene: Scene) -> bool:
    return scene.plan().status.phase is Phase.FAILED


def creates(scene: Scene) -> bool:
    return any(isinstance(action, CreatePod) for action in scene.plan().actions)


def idle(scene: Scene, sequence: int, **changes: Any) -> Scene:
    return scene.says(sequence, generation=0, phase=AgentPhase.IDLE, progress=None, **changes)


# --- silence and loss ------------------------------------------------------------------------------------


def is_lost_while_others_ended(seconds: float) -> bool:
    return reason(training_job().says(3, phase=AgentPhase.FAILED).says(4, age=seconds)) == "NodeLost"


def is_lost_without_its_relay(seconds: float) -> bool:
    scene = training_job().says(3, phase=AgentPhase.FAILED).says(4, age=seconds)
    lost_at = scene.observed.reports["u4"].received_at
    return (
        reason(scene.loses_relay(4, comes_by=lost_at + timedelta(seconds=DEFAULT_TIMING.without_relay))) == "NodeLost"
    )


def is_lost_while_stuck(seconds: float) -> bool:
    return reason(training_job().all_say(step_age_seconds=40.0).says(4, age=seconds)) == "NodeLost"


def is_stuck(steps: float) -> bool:
    """The others count as stuck, so a member that is silent a moment longer is lost."""
    scene = training_job().in_steps_of(10.0, age=10.0 * steps)
    return reason(scene.says(4, age=DEFAULT_TIMING.silent_while_stuck + 1)) == "NodeLost"


def is_lost_alone(seconds: float) -> bool:
    return reason(training_job().in_steps_of(None, age=40.0).says(4, age=seconds)) == "NodeLost"


def is_lost_with_its_node(seconds: float) -> bool:
    return reason(training_job().node(4, ready=False).says(4, age=seconds)) == "NodeLost"


def is_candidate(seconds: float) -> bool:
    scene = replace(waiting_job(), now=at(5)).all_say().says(4, age=seconds)
    return len(generation_of(scene).members) == 4


def is_missed_after_a_restart(seconds: float) -> bool:
    scene = training_job().forgets(4).node(4, ready=False)
    started_at = ago(seconds + DEFAULT_TIMING.silent_on_lost_node)
    return reason(replace(scene, observed=replace(scene.observed, listening_since=started_at))) == "NodeLost"


def is_stepping(seconds: float) -> bool:
    scene = training_job().in_steps_of(None, age=seconds)
    silence = DEFAULT_TIMING.silent_alone + 10
    return reason(scene.says(4, age=silence, step_age_seconds=silence)) is None


# --- starts of generations -------------------------------------------------------------------------------


def starts_without_the_cold_one(seconds: float) -> bool:
    scene = replace(waiting_job(), now=at(2 + seconds)).all_say().says(4, warm=False)
    return scene.plan().status.generation is not None


def follows_without_the_cold_one(seconds: float) -> bool:
    scene = (
        training_job().generation(state=ENDED, ended_at=ago(seconds)).all_say(phase=AgentPhase.IDLE, progress=None)
    )
    return generation_of(scene.says(4, warm=False)).number == 2


def waits_for_the_scheduler(seconds: float) -> bool:
    scene = replace(waiting_job(), now=at(10)).all_say().forgets(4)
    young = scene.pod(4, **NOT_UP, node=None, scheduled_at=None, created_at=at(10 - seconds))
    return young.plan().status.generation is None


def is_stuck_without_its_assignment(seconds: float) -> bool:
    scene = replace(starting_job(), now=at(3 + seconds)).all_say()
    return reason(idle(scene, 4)) == "Failure"


def has_left_the_generation(seconds: float) -> bool:
    scene = starting_job().generation(state=GenerationState.DRAINING, requested_at=at(3), reason="Grow")
    scene = replace(scene, now=at(3 + seconds)).all_say(phase=AgentPhase.DRAINED)
    return generation_of(idle(scene, 4)).state is not GenerationState.DRAINING


def has_restarted(seconds: float) -> bool:
    scene = replace(training_job(), now=at(10 + seconds)).all_say()
    return reason(scene.says(4, phase=AgentPhase.STARTING)) == "Failure"


def runs_a_script_without_the_library(seconds: float) -> bool:
    scene = replace(starting_job(), now=at(3 + seconds)).all_say(phase=AgentPhase.RUNNING, progress=None)
    return scene.plan().status.phase is Phase.RUNNING


def tells_that_nobody_watches(seconds: float) -> bool:
    missing = NodeWatch(state=WatchState.MISSING, seconds=seconds)
    return training_job().says(4, watch=missing).plan().status.condition("NoticesHeard") is not None


def tells_that_no_step_is_made(seconds: float) -> bool:
    return "no step since" in training_job().all_say(step_age_seconds=seconds).plan().status.message


# --- drains and stops ------------------------------------------------------------------------------------


def drains_as_it_may_have_trained(seconds: float) -> bool:
    scene = starting_job().says(4, age=seconds).node(3, notice=notice(3, lead=-60))
    return generation_of(scene).state is not STOPPING


def is_stopped(scene: Scene) -> bool:
    return generation_of(scene).state is STOPPING


def is_stopped_in_a_planned_drain(seconds: float) -> bool:
    scene = training_job().spec(nodes={"min": 2, "max": 4}, runPolicy={"suspend": True}).decided()
    return is_stopped(scene.later(seconds + DEFAULT_TIMING.drain_overtime))


def is_stopped_after_so_many_saves(num_saves: float) -> bool:
    timings = CheckpointTimings(staging_seconds=20.0, upload_seconds=170.0, commit_seconds=10.0)
    slow = training().model_copy(update={"checkpoint": timings})
    suspended = training_job().spec(nodes={"min": 2, "max": 4}, runPolicy={"suspend": True})
    scene = suspended.says(2, progress=slow).decided()
    return is_stopped(scene.later(num_saves * 200.0 + DEFAULT_TIMING.drain_overtime))


def is_stopped_on_a_marked_node(seconds: float) -> bool:
    scene = training_job().node(4, taints=(TAINT_PREEMPTION,)).decided()
    return is_stopped(scene.later(seconds + DEFAULT_TIMING.drain_overtime))


def is_stopped_after_the_deadline(seconds: float) -> bool:
    return is_stopped(training_job().node(4, notice=notice(4, lead=10)).decided().later(10 + seconds))


def is_given_up_while_it_stops(seconds: float) -> bool:
    generation = generation_of(training_job().without_pod(4).decided().later(seconds))
    return generation.number == 2 or generation.state is ENDED


def is_believed(seconds: float) -> bool:
    return reason(training_job().node(4, notice=notice(4, lead=-seconds))) == "Preempted"


# --- failures --------------------------------------------------------------------------------------------


def is_charged(seconds: float) -> bool:
    scene = failed(training_job(), FailureReason.LOST_PEER).decided().later(seconds)
    return scene.plan().status.failures == 1


def is_culprit(seconds: float) -> bool:
    """A member that was lost, and had spoken so long after the others failed."""
    scene = failed(training_job(), FailureReason.LOST_PEER).says(4, phase=AgentPhase.RUNNING, failure=None).decided()
    scene = (
        replace(scene, now=scene.now + timedelta(seconds=2 * DEFAULT_TIMING.silent_while_others_ended))
        .all_say()
        .says(4, age=2 * DEFAULT_TIMING.silent_while_others_ended - seconds)
    )
    generation = scene.observed.job.status.generation
    assert generation is not None
    found = culprits(generation, members_of(Situation(scene.observed, scene.now), generation))
    return [m.member.pod for m in found] == ["job-4"]


def is_given_up_without_progress(generations: float) -> bool:
    scene = starting_job(runPolicy={"failureBudget": 100}).status(generations_without_progress=int(generations) - 1)
    return is_failed(failed(scene, FailureReason.SCRIPT_ERROR).decided().later(10))


def never_started(seconds: float, waiting_reason: str) -> Scene:
    scene = replace(waiting_job(2), now=at(seconds)).forgets(1).forgets(2)
    for sequence in (1, 2):
        scene = scene.pod(sequence, **NOT_UP, waiting_reason=waiting_reason, waiting_message="no")
    return scene


def is_given_up_before_its_image(seconds: float) -> bool:
    return is_failed(never_started(seconds, "ErrImagePull"))


def is_given_up_before_its_volume(seconds: float) -> bool:
    return is_failed(never_started(seconds, "FailedMount"))


def is_unseen_by_schedulers(seconds: float) -> bool:
    new = pod(1, **NOT_UP, node=None, created_at=ago(seconds))
    return wants_events(new, NOW)


def is_asked_about_its_volumes(seconds: float) -> bool:
    placed = pod(1, **NOT_UP, scheduled_at=ago(seconds))
    return wants_events(placed, NOW)


def refused(*, since: float = 0.0, tried: float = 0.0, **changes: Any) -> Scene:
    """A new job with pods refused first `since` and last `tried` seconds ago."""
    times = {"since": ago(since), "tried_at": ago(tried)}
    refusal = Refusal(metadata_generation=1, message="no", lasting=since > 0, **times, **changes)
    scene = waiting_job(0)
    return replace(scene, now=NOW, observed=replace(scene.observed, refusal=refusal))


def is_given_up_as_refused(seconds: float) -> bool:
    return is_failed(refused(since=seconds))


def is_tried_again(seconds: float) -> bool:
    return creates(refused(tried=seconds))


def is_tried_again_after_many_tries(seconds: float) -> bool:
    return creates(refused(tried=seconds, num_tries=5000))


def ended_early(number: int, seconds: float) -> Scene:
    """A new job with `number` pods that ended early, created `seconds` ago."""
    scene = replace(waiting_job(number, nodes={"min": 1, "max": number}), now=at(700))
    for sequence in range(1, number + 1):
        scene = scene.forgets(sequence).pod(sequence, **ENDED_EARLY, created_at=at(700 - seconds))
    return scene


def is_given_up_after(failures: float) -> bool:
    return is_failed(ended_early(int(failures), 1.0))


def is_replaced(seconds: float) -> bool:
    """After one that ended early, the pause is doubled once."""
    return creates(ended_early(1, 2 * seconds))


def is_remembered(seconds: float) -> bool:
    return is_failed(ended_early(DEFAULT_TIMING.max_start_failures, seconds))


# --- growth, and the rest --------------------------------------------------------------------------------


def smaller(num_members: int) -> Scene:
    """A generation of the first members; pods beside it wait, warm."""
    scene = training_job()
    members = generation_of(scene).members[:num_members]
    scene = scene.generation(members=members)
    for sequence in range(num_members + 1, 5):
        scene = idle(scene, sequence)
    return scene


def restarts_in(seconds: float, scene: Scene) -> Scene:
    """The generation took so long from its start to its first step."""
    first = generation_of(scene).first_step_at
    assert first is not None
    return scene.generation(started_at=first - timedelta(seconds=seconds))


def grows(scene: Scene) -> bool:
    return reason(scene) == "Grow"


def grows_after_the_first_step(seconds: float) -> bool:
    return grows(smaller(3).generation(first_step_at=ago(seconds)))


def grows_though_a_pod_has_no_node(seconds: float) -> bool:
    scene = restarts_in(0, smaller(2)).pod(3, ready_since=ago(seconds)).forgets(4)
    return grows(scene.pod(4, **NOT_UP, node=None, scheduled_at=None))


def grows_though_a_pod_is_coming(seconds: float) -> bool:
    return grows(restarts_in(0, smaller(2)).pod(3, ready_since=ago(seconds)).forgets(4).pod(4, **NOT_UP))


def grows_though_a_restart_takes_long(seconds: float) -> bool:
    scene = restarts_in(3600, smaller(2)).pod(3, ready_since=ago(seconds)).forgets(4)
    scene = scene.all_say(progress=None).status(progress=ProgressStatus(eta_seconds=None))
    return grows(scene.pod(4, **NOT_UP, node=None, scheduled_at=None))


def stays_after_the_hint(seconds: float) -> bool:
    scene = training_job(capacity={"onDemand": {"min": 2}, "spot": {"maxPrewarmed": 1}})
    scene = idle(scene.with_pod(pod(5, created_at=ago(seconds))), 5)
    return not any(isinstance(action, DeletePod) for action in scene.plan().actions)


def is_moved_to_another_pool(seconds: float) -> bool:
    pools = [{"name": name, "capacityType": "spot", "provider": "gke"} for name in ("a", "b")]
    scene = waiting_job(0, nodes={"max": 1}, capacity={"fallback": {"afterSeconds": 0}, "pools": pools})
    of_pool = {"pool": "a", "pool_hash": pool_hash(scene.observed.job.spec, CapacityType.SPOT, "a")}
    scene = scene.with_pod(pod(3, **NOT_UP, **of_pool, node=None, unschedulable_since=ago(seconds)))
    return any(isinstance(action, DeletePod) for action in scene.plan().actions)


def in_pool(scene: Scene, sequence: int, name: str) -> Scene:
    kind = CapacityType.SPOT
    return scene.pod(sequence, pool=name, pool_hash=pool_hash(scene.observed.job.spec, kind, name))


def avoids_the_pool(seconds: float) -> bool:
    pools = [
        {"name": name, "capacityType": "spot", "provider": "gke", "pricePerHour": price}
        for name, price in (("cheap", 1.0), ("dear", 2.0))
    ]
    scene = training_job(nodes={"min": 2, "max": 4}, capacity={"spot": {"max": 2}, "pools": pools})
    scene = in_pool(in_pool(scene, 3, "cheap"), 4, "cheap").node(4, notice=notice(4)).decided()
    scene = scene.without_pod(4).later(seconds)
    return any(isinstance(action, CreatePod) and action.pool == "dear" for action in scene.plan().actions)


def unrest_of(num: int, seconds_ago: float) -> bool:
    """Whether on-demand nodes stand in, as so many interruptions have each taken eight minutes."""
    lost = tuple(
        Transition(
            generation=number, reason="Preempted", at=ago(seconds_ago), last_step=1, seconds_without_step=900.0
        )
        for number in range(num)
    )
    scene = training_job(capacity={"spot": {"max": 2}}).status(transitions=lost, start_time=ago(7200))
    return scene.plan().status.fallback_since is not None


def falls_back_after_interruptions(num: float) -> bool:
    return unrest_of(round(num), 60)


def falls_back_though_they_were_so_long_ago(seconds: float) -> bool:
    return unrest_of(3, seconds)


def too_few_since(seconds: float) -> Scene:
    """One of two nodes that the job needs, since then, and a pod that waits for the other."""
    scene = waiting_job(2).pod(1, scheduled_at=ago(seconds)).without_pod(2)
    return scene.with_pod(pod(2, **NOT_UP, node=None, scheduled_at=None, unschedulable_since=ago(seconds)))


def gives_its_node_back(seconds: float) -> bool:
    return too_few_since(seconds).plan().status.hold_off is not None


def asks_again(seconds: float) -> bool:
    scene = too_few_since(DEFAULT_TIMING.gang_patience).decided()
    return creates(scene.without_pod(1).without_pod(2).later(seconds))


def asks_again_after_many_times(seconds: float) -> bool:
    scene = too_few_since(DEFAULT_TIMING.gang_patience).status(hold_off=HoldOff(until=ago(1), times=60)).decided()
    return creates(scene.without_pod(1).without_pod(2).later(seconds))


def avoids_the_node(seconds: float) -> bool:
    broken = Failure(reason=FailureReason.DEVICE_FAILED, message="its GPU is gone")
    avoided = training_job().says(4, phase=AgentPhase.FAILED, failure=broken).plan().status.avoided_nodes
    scene = training_job().status(avoided_nodes=avoided).without_pod(4).later(seconds)
    return any(isinstance(action, CreatePod) and "n4" in action.avoided for action in scene.plan().actions)


def is_stray(seconds: float) -> bool:
    scene = smaller(3).generation(started_at=ago(seconds)).says(4, phase=AgentPhase.RUNNING)
    return any(isinstance(action, DeletePod) and action.name == "job-4" for action in scene.plan().actions)


def is_deleted_after_the_end(seconds: float) -> bool:
    finished = training_job().status(phase=Phase.FAILED, completion_time=ago(seconds))
    return any(isinstance(action, DeletePod) for action in finished.plan().actions)


def is_recorded(seconds: float) -> bool:
    scene = training_job().status(accounted_at=ago(seconds))
    observed = replace(scene.observed, timing=DEFAULT_TIMING)
    return replace(scene, observed=observed).plan().status.accounted_at == NOW


def keeps_the_oldest_transition(number: float) -> bool:
    scene = training_job()
    old = tuple(Transition(generation=i, reason="Grow", at=START) for i in range(int(number)))
    draft = Draft(status=scene.observed.job.status.model_copy(update={"transitions": old}))
    new = open_transition(Situation(scene.observed, scene.now), draft, Cause.GROW, "").status.transitions
    return len(new) == number + 1
