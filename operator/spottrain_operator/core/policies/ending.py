"""How a generation, and a job, ends."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from spottrain_api.contract.assignments import AgentPhase
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionType
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, Phase
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.causes import FAILURES, PREEMPTIONS, outranks
from spottrain_operator.core.facts.members import STILL_IN, MemberFacts, MemberState, worked_unseen
from spottrain_operator.core.facts.progress import reported
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.policies.accounting import account
from spottrain_operator.core.policies.recording import record_progress
from spottrain_operator.core.policies.time_spent import spend_on_end
from spottrain_operator.core.timing import after
from spottrain_runtime.wording import clause

_UNWANTED = FAILURES | PREEMPTIONS | {Cause.BUDGET_SPENT, Cause.QUOTA_TAKEN}
AGAIN = "To run it again, delete the job and apply it again, or apply it under another name"


def request_end(
    situation: Situation,
    draft: Draft,
    members: tuple[MemberFacts, ...],
    cause: Cause,
    message: str,
    *,
    deadline: datetime | None = None,
    at_once: bool = False,
) -> Draft:
    """Ask the running generation to end for `cause`.

    It drains, which commits and loses no step, unless `at_once` is set or nothing can have been trained yet. A
    generation that ends already only gets an earlier deadline, a harder stop or a better reason.
    """
    generation = draft.running
    if generation is None:
        return draft
    active = generation.state is GenerationState.ACTIVE
    stop = at_once or (active and not _may_have_trained(generation, members))
    changes = _escalation(situation, generation, cause, message, stop=stop, deadline=deadline)
    if not changes:
        return draft
    draft = draft.update_generation(**changes)
    # The cause of a failure is judged, and reported, once all members have ended.
    if set(changes) == {"deadline"} or cause is Cause.FAILURE:
        return draft
    how = "is stopped" if stop or generation.state is GenerationState.STOPPING else "drains"
    text = f"Generation {generation.number} {how}: {message}"
    return draft.record(cause, text, warning=cause in _UNWANTED)


def _escalation(
    situation: Situation,
    generation: GenerationStatus,
    cause: Cause,
    message: str,
    *,
    stop: bool,
    deadline: datetime | None,
) -> dict[str, object]:
    """The fields of the generation that change."""
    changes: dict[str, object] = {}
    if generation.state is GenerationState.ACTIVE or outranks(cause, generation.reason):
        changes |= {"reason": cause.value, "message": message if cause is Cause.FAILURE else None}
    if generation.state is GenerationState.ACTIVE:
        changes["requested_at"] = situation.now
    if stop:
        if generation.state is not GenerationState.STOPPING:
            changes |= {"state": GenerationState.STOPPING, "requested_at": situation.now, "deadline": None}
    elif generation.state is GenerationState.ACTIVE:
        due = deadline or after(situation.now, _planned_seconds(situation, generation))
        changes |= {"state": GenerationState.DRAINING, "deadline": due}
    elif deadline is not None and _is_nearer(deadline, generation):
        changes["deadline"] = deadline
    return changes


def _planned_seconds(situation: Situation, generation: GenerationStatus) -> float:
    """Time for a drain that nothing forces, with room for saves and steps as measured: ranks stop between steps."""
    said = reported(situation, generation)
    saves = (p.checkpoint.total_seconds for p in said if p.checkpoint is not None)
    steps = (p.step_seconds for p in said if p.step_seconds is not None)
    longest = max((*saves, *steps), default=0.0)
    return max(situation.timing.planned_drain, situation.timing.planned_drain_saves * longest)


def _is_nearer(deadline: datetime, generation: GenerationStatus) -> bool:
    """Whether a second notice leaves less time for the drain than the first."""
    draining = generation.state is GenerationState.DRAINING
    return draining and (generation.deadline is None or deadline < generation.deadline)


def _may_have_trained(generation: GenerationStatus, members: tuple[MemberFacts, ...]) -> bool:
    """Whether the ranks may make a step before a stop arrives.

    They can't if all agents have just reported that their ranks aren't up. In doubt the generation drains, because a
    drain of nothing costs little, and a lost step is lost.
    """
    if generation.first_step_at is not None:
        return True
    return any(_may_step(m) for m in members if m.state in STILL_IN or m.state is MemberState.DRAINED)


def _may_step(m: MemberFacts) -> bool:
    # A script without the library never reports progress. All that is known is that it runs.
    report = m.report
    runs_script = report is not None and report.generation == m.generation and report.phase is AgentPhase.RUNNING
    unheard = m.facts is None or m.facts.received_at is None or m.facts.report_age > m.facts.timing.just_now
    return runs_script or unheard or m.progress is not None


def finish(
    situation: Situation, draft: Draft, phase: Phase, reason: StrEnum, message: str, *, event: str = ""
) -> Draft:
    """End the job, as SUCCEEDED or FAILED.

    Its agents leave, so that its pods end. Nothing is retried. The event is `message`, unless an event before it has
    said a part of that and `event` is the rest.
    """
    now = situation.now
    draft = _end(situation, draft, reason.value)
    failed = phase is Phase.FAILED
    condition = ConditionType.FAILED if failed else ConditionType.SUCCEEDED
    draft = draft.record(reason, f"{event[0].upper()}{event[1:]}" if event else message, warning=failed)
    if failed:
        message = f"{clause(message)}. {AGAIN}"
    draft = draft.update(phase=phase, message=message, completion_time=now)
    return draft.condition(condition, True, reason, message, now)


def end_with_job(situation: Situation, draft: Draft) -> Draft:
    """End the generation of a job that is being deleted. Nobody waits for its ranks."""
    return _end(situation, draft, None) if draft.running is not None else draft


def _end(situation: Situation, draft: Draft, reason: str | None) -> Draft:
    """End the running generation, if there is one, and close the books."""
    draft = record_progress(situation, draft, at_once=True)
    running = draft.running
    if running is not None:
        draft = spend_on_end(situation, draft, unreported=worked_unseen(situation, running))
        draft = draft.update_generation(
            state=GenerationState.ENDED, ended_at=situation.now, reason=running.reason or reason, deadline=None
        )
    return account(situation, draft, at_once=True)
