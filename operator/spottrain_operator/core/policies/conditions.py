"""The job's phase, message, member counts and conditions, in plain words."""

from __future__ import annotations

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_api.contract.reports import FailureReason, Progress, TrainerPhase
from spottrain_api.v1alpha1.status import Counts, GenerationState, GenerationStatus, Phase, TrainingJobStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.causes import FAILURES, PREEMPTIONS
from spottrain_operator.core.facts.members import members_of, says_nothing
from spottrain_operator.core.facts.pauses import pause_of
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.progress import reported_at_all
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.facts.standstill import standstill_sentence
from spottrain_operator.core.policies.capacity import advice, refusal_of, retries_sentence, spot_sentence
from spottrain_operator.core.policies.failure_policy import (
    EARLIER_JOB,
    failure_message,
    gives_up_at,
    meets_an_earlier_job,
    missing_program,
    start_failures,
)
from spottrain_operator.core.policies.gangs import hold_off_sentence
from spottrain_operator.core.policies.growth import coming
from spottrain_operator.core.policies.notices_heard import handle_watchers
from spottrain_operator.core.policies.pod_health import handle_pods, loss_of_place
from spottrain_operator.core.policies.profiles import waits_for_profile
from spottrain_operator.core.policies.understanding import waits_to_be_understood
from spottrain_operator.core.words.pods import (
    ended_early_sentence,
    refused_reports_sentence,
    what_they_do,
    why_it_waits,
)
from spottrain_operator.core.words.scheduling import lacks_claim, lacks_more_than_nodes, scheduler_says
from spottrain_runtime.wording import clause, counted, listed, one_line, time_of_day

_PHASES = {
    GenerationState.DRAINING: Phase.DRAINING,
    GenerationState.STOPPING: Phase.RECOVERING,
    GenerationState.ENDED: Phase.RECOVERING,
}
# Jobs that hold nodes, by name.
_MOST_HOLDERS = 3
# Characters of a failure in the job's message. Its event has all of it.
_FIRST_WORDS = 300


def describe(situation: Situation, draft: Draft) -> Draft:
    """Set phase, message and member counts, and the conditions that follow from them."""
    draft = _store(draft, situation)
    phase = _phase(situation, draft.status)
    message = _message(situation, draft, phase)
    if refused := _refused_reports(situation):
        message = f"{clause(message)}. {refused}" if message else refused
    if (phase, message) != (draft.status.phase, draft.status.message):
        draft = draft.update(phase=phase, message=message)
    return _conditions(situation, count_members(situation, draft))


def _refused_reports(situation: Situation) -> str:
    refused = [facts for facts in situation.pods.values() if facts.refused and not facts.finished]
    return refused_reports_sentence([facts.pod for facts in refused], refused[0].refused) if refused else ""


def describe_finished(situation: Situation, draft: Draft) -> Draft:
    """Set counts and conditions of a job that is over; its last message stays."""
    draft = _store(draft, situation)
    return _conditions(situation, count_members(situation, draft))


def count_members(situation: Situation, draft: Draft) -> Draft:
    """Count the running generation's members by type, and the other pods that are up and stay."""
    running = draft.running
    members = running.members if running is not None else ()
    others = situation.pods.keys() - {m.pod_uid for m in members} - draft.leaving
    num_spot = sum(m.capacity_type is CapacityType.SPOT for m in members)
    waiting = 0 if draft.finished else sum(situation.pods[uid].candidate for uid in others)
    world_size = running.world_size if running is not None else 0
    counts = Counts(world_size=world_size, on_demand=len(members) - num_spot, spot=num_spot, waiting=waiting)
    return draft if counts == draft.status.members else draft.update(members=counts)


def _phase(situation: Situation, status: TrainingJobStatus) -> Phase:
    generation = status.generation
    ended = status.running is None
    if ended and pause_of(situation) is not None:
        return Phase.SUSPENDED
    if generation is None or (ended and status.phase in (Phase.SUSPENDED, Phase.PENDING)):
        return Phase.PENDING
    if generation.state is GenerationState.ACTIVE:
        starting = generation.first_step_at is None and not says_nothing(situation, generation)
        return Phase.STARTING if starting else Phase.RUNNING
    return _PHASES[generation.state]


def _message(situation: Situation, draft: Draft, phase: Phase) -> str:
    generation = draft.status.generation
    if situation.observed.job.deleting:
        return "The job is being deleted, and trains no more"
    if blocked := _blocked(situation, draft):
        return blocked
    if phase in (Phase.PENDING, Phase.RECOVERING) and draft.running is None:
        program = missing_program(situation, draft)
        if program and generation is not None and generation.template_hash == situation.run_hash:
            return f"{program} The job waits until it is edited, and keeps its nodes"
        if held_off := hold_off_sentence(situation, draft):
            return held_off
        missing, until = _what_is_missing(situation, draft), gives_up_at(situation, draft)
        if until is None:
            return missing
        return f"{clause(missing)}. The job fails at {time_of_day(until, situation.now)} if no pod starts before"
    if (pause := pause_of(situation)) is not None and phase is Phase.SUSPENDED:
        return f"Suspended: {pause.way_out}"
    if generation is None:
        return ""
    return _of_generation(situation, draft, generation, phase)


def _blocked(situation: Situation, draft: Draft) -> str:
    """Why nothing of the job may start; empty if nothing keeps it from that."""
    idle = draft.running is None
    stops = [(ConditionType.PROFILE_ACCEPTED, "False")] if idle and waits_for_profile(situation) else []
    stops.append((ConditionType.BLOCKED, "True"))
    if idle and waits_to_be_understood(situation, draft):
        stops.append((ConditionType.SPEC_NOT_UNDERSTOOD, "True"))
    found = ((draft.status.condition(kind), status) for kind, status in stops)
    return next((each.message for each, status in found if each is not None and each.status == status), "")


def _of_generation(situation: Situation, draft: Draft, generation: GenerationStatus, phase: Phase) -> str:
    name = f"generation {generation.number} with {counted(len(generation.members), 'node')}"
    if phase is Phase.RECOVERING:
        reason, why = _of_stop(situation, draft, generation)
        return f"Stopping {name} ({reason}){f': {why}' if why else ''}"
    sentence = standstill_sentence(situation, generation)
    stands_still = f"; {sentence}" if sentence else ""
    if phase is Phase.DRAINING:
        until = f", by {time_of_day(generation.deadline, situation.now)}" if generation.deadline is not None else ""
        return f"Draining {name} ({generation.reason}){until}{stands_still}"
    if phase is Phase.STARTING:
        return f"Starting {name}{stands_still}{_after_failure(draft.status)}{_failing_saves(draft.status)}"
    unseen = f"; {_without_session(situation, generation)}" if generation.first_step_at is None else ""
    note = draft.status.progress.message  # what did not go as planned
    saves = _failing_saves(draft.status, said=note or "")
    return f"Training in {name}{unseen}{stands_still}{f'. {note}' if note else ''}{saves}"


def _of_stop(situation: Situation, draft: Draft, generation: GenerationStatus) -> tuple[str, str]:
    """Why the generation stops, and the first words of why its ranks failed."""
    if generation.reason != Cause.FAILURE:
        return generation.reason or "", ""
    if meets_an_earlier_job(situation, draft, generation):
        return Cause.EARLIER_JOB.value, EARLIER_JOB
    failed = failure_message(generation, members_of(situation, generation))
    return generation.reason, one_line(failed, most=_FIRST_WORDS)


def _after_failure(status: TrainingJobStatus) -> str:
    """Why the generation before failed, if its failure counted.

    It is said until this one is known to do better.
    """
    last = status.transitions[-1] if status.transitions else None
    if last is None or last.reason not in FAILURES or not status.failures:
        return ""
    return f". Generation {last.generation} failed: {one_line(last.message, most=_FIRST_WORDS)}"


def _failing_saves(status: TrainingJobStatus, *, said: str = "") -> str:
    """The first words of why checkpoints fail; empty if they don't, or if `said` has that already."""
    healthy = status.condition(ConditionType.CHECKPOINTS_HEALTHY)
    if healthy is None or healthy.status != "False" or healthy.message in said:
        return ""
    return f". Checkpoints fail ({healthy.reason}): {one_line(healthy.message, most=_FIRST_WORDS)}"


def _without_session(situation: Situation, generation: GenerationStatus) -> str:
    return (
        "its script doesn't report steps: it has opened no session, so no hang limit applies. If it should have, see "
        f"where it stands: kubectl logs -n {situation.observed.job.namespace} {generation.members[0].pod}"
    )


def _what_is_missing(situation: Situation, draft: Draft) -> str:
    kept, needed = places(situation, draft.status).kept, situation.spec.nodes.min
    up = len(situation.candidates(kept))
    failed = [f.pod for f in start_failures(situation, draft)]
    ended = ended_early_sentence(situation.observed.job.namespace, failed) if failed else ""
    placed = [f for f in coming(situation, set(kept)) if f.pod.node is not None]
    refusal = refusal_of(situation, draft)
    if placed and up + len(placed) >= needed and refusal is None:
        # The nodes are there: advice about nodes would mislead.
        reports = [(facts.pod, facts.report) for facts in placed]
        doing = what_they_do(situation.observed.job.namespace, reports, situation.now)
        text = f"Waiting for pods: {up} of at least {needed} ready; {doing}"
        return f"{text}. {ended}" if ended else text
    text = f"Waiting for nodes: {up} of at least {needed} ready"
    goes = draft.leaving
    pods = [facts.pod for uid, facts in situation.pods.items() if uid not in goes and not facts.finished]
    unplaced = [pod for pod in pods if pod.unschedulable_since is not None]
    roomless = [pod.capacity_type for pod in unplaced if not lacks_more_than_nodes(pod)]
    if roomless:
        each = (counted(roomless.count(kind), f"{kind.value} pod") for kind in CapacityType if kind in roomless)
        text += f"; no node has room for {' and '.join(each)}"
    if claimless := [pod for pod in unplaced if lacks_claim(pod)]:
        text += f"; {counted(len(claimless), 'pod')} without the claim of a volume"
    if refusal is not None:
        text += f"; {refusal.message}"
    if roomless or (refusal is not None and refusal.by_quota):
        text += _held_by_others(situation)
    if in_vain := loss_of_place(situation, draft):
        text += f"; {in_vain}"
    waiting = next((pod for pod in pods if pod.waiting_message), None)
    todo = ""
    if waiting is not None:
        if waiting.unschedulable_since is None:
            text += f"; {waiting.name}: {why_it_waits(situation.observed.job.namespace, waiting)}"
        else:
            text += f"; {waiting.name}: {waiting.waiting_reason}: {scheduler_says(waiting)}"
            todo = advice(situation, waiting)
    spot = spot_sentence(situation, draft)
    retries = retries_sentence(situation.timing) if refusal is not None else ""
    return ". ".join(part for part in (text, todo, ended, retries, spot) if part)


def _held_by_others(situation: Situation) -> str:
    """For whom the job waits, as a clause: the jobs of its namespace that hold nodes."""
    holders = situation.observed.holders
    named = [f"{each.name} ({each.num_nodes})" for each in holders[:_MOST_HOLDERS]]
    if len(holders) > _MOST_HOLDERS:
        named.append(counted(len(holders) - _MOST_HOLDERS, "other"))
    return f"; in this namespace, nodes are held by {listed(named)}" if named else ""


def _conditions(situation: Situation, draft: Draft) -> Draft:
    status, now = draft.status, situation.now
    phase, message = status.phase, status.message
    generation = draft.running
    training = generation is not None and generation.state is GenerationState.ACTIVE
    draft = draft.condition(ConditionType.READY, phase is Phase.RUNNING, phase, message, now)
    draft = draft.condition(ConditionType.PROGRESSING, training, phase, message, now)
    draft = draft.condition(ConditionType.SUSPENDED, phase is Phase.SUSPENDED, phase, _suspension(phase), now)
    draft = _preempted(draft, status.generation, situation)
    draft = handle_watchers(situation, draft)
    draft = handle_pods(situation, draft)
    if spot := spot_sentence(situation, draft):
        if status.fallback_since is not None:
            return draft.condition(ConditionType.SPOT_AVAILABLE, False, EventReason.FELL_BACK, spot, now)
        return draft.condition(ConditionType.SPOT_AVAILABLE, False, ConditionReason.SPOT_PENDING, spot, now)
    return draft.condition(
        ConditionType.SPOT_AVAILABLE, True, ConditionReason.NONE_WAITS, "No spot pod waits for a node", now
    )


def _store(draft: Draft, situation: Situation) -> Draft:
    generation = draft.status.generation
    return _clean_up(_checkpoints(draft, generation, situation), generation, situation)


def _checkpoints(draft: Draft, generation: GenerationStatus | None, situation: Situation) -> Draft:
    """Set CheckpointsHealthy: whether saves become commits.

    The ranks' last reports say so. A change to False, or of its reason, records an event. Between generations no rank
    reports, and the condition stays as it was. False stays until a save succeeds: a new generation, or its failure,
    does not repair a store.
    """
    said = reported_at_all(situation, generation) if generation is not None else []
    known = draft.status.condition(ConditionType.CHECKPOINTS_HEALTHY)
    was_failing = known is not None and known.status == "False"
    failing = [p for p in said if p.checkpoint_failure is not None]
    # The rank that met the fault knows the reason. Rank 0 knows only that the save was given up.
    newest = max(failing, key=lambda p: (_knows_why(p), p.updated_at), default=None)
    failure = newest.checkpoint_failure if newest is not None else None
    if failure is None:
        if not any(p.checkpoint is not None if was_failing else p.phase is not TrainerPhase.STARTING for p in said):
            return draft
        message = "No save has failed"
        message += " since the newest commit" if draft.status.commit is not None else ""
        return draft.condition(
            ConditionType.CHECKPOINTS_HEALTHY, True, ConditionReason.HEALTHY, message, situation.now
        )
    if known is None or not was_failing or known.reason != failure.reason:
        draft = draft.record(failure.reason, failure.message, warning=True)
    return draft.condition(ConditionType.CHECKPOINTS_HEALTHY, False, failure.reason, failure.message, situation.now)


def _clean_up(draft: Draft, generation: GenerationStatus | None, situation: Situation) -> Draft:
    """Set CleanUpHealthy once clean-ups fail: whether old commits are deleted from the store."""
    said = reported_at_all(situation, generation) if generation is not None else []
    failure = next((p.clean_up_failure for p in said if p.clean_up_failure is not None), None)
    known = draft.status.condition(ConditionType.CLEAN_UP_HEALTHY)
    if failure is not None:
        if known is None or known.status == "True":
            draft = draft.record(EventReason.CLEAN_UP_FAILED, failure, warning=True)
        return draft.condition(
            ConditionType.CLEAN_UP_HEALTHY, False, EventReason.CLEAN_UP_FAILED, failure, situation.now
        )
    if known is None or not any(p.checkpoint is not None for p in said):
        return draft
    return draft.condition(
        ConditionType.CLEAN_UP_HEALTHY, True, ConditionReason.HEALTHY, "Old commits are deleted", situation.now
    )


def _knows_why(progress: Progress) -> bool:
    failure = progress.checkpoint_failure
    return failure is not None and failure.reason is not FailureReason.CHECKPOINT_SAVE_FAILED


def _suspension(phase: Phase) -> str:
    return "The job holds no nodes" if phase is Phase.SUSPENDED else "The job isn't suspended"


def _preempted(draft: Draft, generation: GenerationStatus | None, situation: Situation) -> Draft:
    """Set Preempted.

    It is True from a preemption until a new generation replaces the nodes.
    """
    if generation is not None and generation.reason in PREEMPTIONS:
        message = f"Nodes of generation {generation.number} are being taken, or were"
        return draft.condition(ConditionType.PREEMPTED, True, Cause(generation.reason), message, situation.now)
    return draft.condition(
        ConditionType.PREEMPTED,
        False,
        ConditionReason.STEADY,
        "No node of the newest generation is being taken",
        situation.now,
    )
