"""A job that a newer version wrote.

What this operator doesn't understand disturbs nothing that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from spottrain_api.contract import ConditionReason, ConditionType, EventReason
from spottrain_api.wording import listed
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.situation import Situation


def waits_to_be_understood(situation: Situation, draft: Draft) -> bool:
    """Whether a job that has never run has to wait.

    It would start with other settings than its user asked for.
    """
    return bool(situation.observed.job.not_understood) and draft.status.generation is None


def heed_unknown_fields(situation: Situation, draft: Draft) -> Draft:
    """SpecNotUnderstood: names the fields that this operator leaves out.

    An event reports the start.
    """
    unknown, now = situation.observed.job.not_understood, situation.now
    known = draft.status.condition(ConditionType.SPEC_NOT_UNDERSTOOD)
    if unknown:
        waits = waits_to_be_understood(situation, draft)
        message = sentence(unknown, "The job waits" if waits else "The job continues without")
        if known is None or known.status == "False":
            draft = draft.record(EventReason.SPEC_NOT_UNDERSTOOD, message, warning=True)
        return draft.condition(ConditionType.SPEC_NOT_UNDERSTOOD, True, ConditionReason.NEWER_VERSION, message, now)
    if known is None:
        return draft
    return draft.condition(
        ConditionType.SPEC_NOT_UNDERSTOOD,
        False,
        ConditionReason.UNDERSTOOD,
        "The operator understands the whole job",
        now,
    )


def sentence(fields: Sequence[str], consequence: str) -> str:
    """What this operator doesn't understand, what to do, and what happens until then."""
    return (
        f"This operator doesn't understand {listed(fields)}, which a newer version may have written: upgrade the "
        f"operator, or remove what it doesn't understand. {consequence} until then"
    )
