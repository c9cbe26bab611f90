"""The history of membership: each change, with its cost in steps and seconds."""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.status import GenerationStatus, TrainingJobStatus, Transition
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.progress import newest_progress
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import MAX_TRANSITIONS
from spottrain_operator.core.timing import seconds_between


def open_transition(situation: Situation, draft: Draft, cause: Cause, message: str) -> Draft:
    """Record that the newest generation has ended.

    Its cost is known after the next generation's first step. Nobody knows the steps that ranks made after their last
    report.
    """
    status = draft.status
    generation = status.generation
    if generation is None:
        return draft
    stepped = generation.first_step_at is not None
    transition = Transition(
        generation=generation.number,
        reason=cause.value,
        message=message,
        with_notice=cause is Cause.PREEMPTED,
        at=situation.now,
        last_step=_last_step(situation, draft, generation),
        # Without a step of its own, it only prolonged the gap that started before it.
        last_step_at=_last_step_at(situation, draft, generation) if stepped else situation.now,
        world_size_before=generation.world_size,
    )
    return draft.update(transitions=(*status.transitions, transition)[-MAX_TRANSITIONS:])


def _last_step(situation: Situation, draft: Draft, generation: GenerationStatus) -> int:
    newest = newest_progress(situation, generation)
    recorded = draft.status.progress.step
    return recorded if newest is None else max(recorded, newest.step)


def _last_step_at(situation: Situation, draft: Draft, generation: GenerationStatus) -> datetime | None:
    newest = newest_progress(situation, generation)
    recorded = draft.status.progress.last_step_at
    if newest is None or newest.last_step_at is None:
        return recorded
    return newest.last_step_at if recorded is None else max(recorded, newest.last_step_at)


def fill_transitions(situation: Situation, draft: Draft) -> Draft:
    """Fill in the cost of the changes before the generation.

    The cost is known once the generation has made its first step.
    """
    generation = draft.status.generation
    if generation is None or generation.first_step_at is None:
        return draft
    newest = newest_progress(situation, generation)
    if newest is None:
        return draft
    return close_transitions(draft, newest.start_step, generation.first_step_at)


def close_transitions(draft: Draft, resume_step: int, at: datetime) -> Draft:
    """Fill the open transitions: training continued after `resume_step` at `at`.

    Several transitions are open if generations ended without a step. The first one is charged with the steps that are
    redone, and each one with the seconds up to the next, so that the sums are right.
    """
    generation = draft.status.generation
    number = generation.number if generation is not None else 0
    replicated = generation.replicated_step if generation is not None else None
    transitions = list(draft.status.transitions)
    still_open = [i for i, t in enumerate(transitions) if t.seconds_without_step is None and t.generation < number]
    if not still_open:
        return draft
    redone = 0
    for position, i in enumerate(still_open):
        transition = transitions[i]
        until = transitions[still_open[position + 1]].at if position + 1 < len(still_open) else at
        steps = max(0, transition.last_step - resume_step) if position == 0 else 0
        redone += steps
        since = transition.last_step_at or transition.at
        transitions[i] = transition.model_copy(
            update={
                "resume_step": resume_step,
                # Ranks that couldn't read the replicas fell back to the newest commit, which is older.
                "from_replicas": replicated is not None and resume_step >= replicated.step,
                "steps_redone": steps,
                "seconds_without_step": round(max(0.0, seconds_between(since, until)), 3),
            }
        )
    return draft.update(transitions=tuple(transitions), steps_redone=draft.status.steps_redone + redone)


def completed(before: TrainingJobStatus, after: TrainingJobStatus) -> list[Transition]:
    """The changes of members that ended with a step between the two statuses."""
    known = {(each.generation, each.at) for each in before.transitions if each.seconds_without_step is not None}
    return [
        each
        for each in after.transitions
        if each.seconds_without_step is not None and (each.generation, each.at) not in known
    ]
