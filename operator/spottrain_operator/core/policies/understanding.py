"""A job that a newer version wrote, or that holds too much.

What this operator can't apply disturbs nothing that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_api.v1alpha1.free_form import MOST_FREE_FORM, MOST_LEVELS
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.situation import Situation
from spottrain_runtime.wording import listed


def waits_to_be_understood(situation: Situation, draft: Draft) -> bool:
    """Whether nothing new starts: no pod, and no generation.

    A job that has never run would start with other settings than its user asked for, and so would any job with one
    that is too large.
    """
    job = situation.observed.job
    return bool(job.too_large) or (bool(job.not_understood) and draft.status.generation is None)


def handle_unknown_fields(situation: Situation, draft: Draft) -> Draft:
    """SpecNotUnderstood: names the fields that this operator leaves out.

    An event reports the start.
    """
    job, now = situation.observed.job, situation.now
    known = draft.status.condition(ConditionType.SPEC_NOT_UNDERSTOOD)
    if job.left_out:
        reason, message = _why(situation, draft)
        if known is None or known.status == "False":
            draft = draft.record(EventReason.SPEC_NOT_UNDERSTOOD, message, warning=True)
        return draft.condition(ConditionType.SPEC_NOT_UNDERSTOOD, True, reason, message, now)
    if known is None:
        return draft
    return draft.condition(
        ConditionType.SPEC_NOT_UNDERSTOOD,
        False,
        ConditionReason.UNDERSTOOD,
        "The operator understands the whole job",
        now,
    )


def _why(situation: Situation, draft: Draft) -> tuple[ConditionReason, str]:
    job = situation.observed.job
    consequence = "The job waits" if waits_to_be_understood(situation, draft) else "The job continues without"
    if not job.too_large:
        return ConditionReason.NEWER_VERSION, sentence(job.not_understood, consequence)
    if draft.running is not None:
        consequence = "The running generation continues; no pod and no other generation starts"
    return ConditionReason.TOO_LARGE, (
        f"{listed(job.too_large)}: above {MOST_FREE_FORM // 1024} KiB, or {MOST_LEVELS} levels, which the operator "
        "does not pass on to pods. "
        f"Shorten it, or put it into a ConfigMap or the image. {consequence} until then"
    )


def sentence(fields: Sequence[str], consequence: str) -> str:
    """What this operator doesn't understand, what to do, and what happens until then."""
    return (
        f"This operator doesn't understand {listed(fields)}, which a newer version may have written: upgrade the "
        f"operator, or remove what it doesn't understand. {consequence} until then"
    )
