"""Only one of two jobs at the same checkpoint folder runs, and the other waits.

Otherwise they would fence each other until both have spent their budgets.
"""

from __future__ import annotations

from enum import StrEnum

from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.pauses import own_pause
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import Rival


def rival_of(situation: Situation, draft: Draft) -> Rival | None:
    """The job for which this one waits, without pods.

    A running generation is left alone.
    """
    if draft.finished or draft.running is not None or own_pause(situation) is not None:
        return None
    return situation.observed.rival


def give_way(situation: Situation, draft: Draft) -> Draft:
    """Blocked: another unfinished job comes first at the checkpoint folder.

    An event reports the start.
    """
    rival, now = rival_of(situation, draft), situation.now
    known = draft.status.condition(ConditionType.BLOCKED)
    if rival is not None:
        message = sentence(situation.spec.checkpoint.uri, rival)
        if known is None or known.status == "False":
            draft = draft.record(EventReason.CHECKPOINT_URI_IN_USE, message, warning=True)
        return draft.condition(ConditionType.BLOCKED, True, EventReason.CHECKPOINT_URI_IN_USE, message, now)
    if known is None:
        return draft
    return draft.condition(ConditionType.BLOCKED, False, *_why_not(situation, draft), now)


def _why_not(situation: Situation, draft: Draft) -> tuple[StrEnum, str]:
    """Reason and message of a job that was blocked, and no longer is."""
    if draft.finished:
        return ConditionReason.FINISHED, "The job is over"
    if situation.observed.rival is None:
        return ConditionReason.FREE, "No other job comes first at checkpoint.uri"
    if draft.running is not None:
        return ConditionReason.RUNNING, "A generation that runs is left alone"
    return ConditionReason.SUSPENDED, "A suspended job waits for no other"


def sentence(uri: str, rival: Rival) -> str:
    """What is wrong, and what to do."""
    return (
        f"checkpoint.uri ({uri}) is the folder of the unfinished job {rival.namespace}/{rival.name}, which comes "
        "first. For a run of its own, create this job again with a different checkpoint.uri. Otherwise wait until "
        "that one has finished (it may be suspended), or delete it: this job then continues from its newest commit"
    )
