"""PodsHealthy: whether the job gets its pods, in the words of whoever stands against it."""

from __future__ import annotations

from .capacity import missing
from .draft import Draft
from .situation import Situation

PODS_HEALTHY = "PodsHealthy"


def heed_pods(situation: Situation, draft: Draft) -> Draft:
    """False while a pod that the job lacks can't be had. A job that is over keeps what was said last."""
    if draft.finished:
        return draft
    trouble = _trouble(situation, draft)
    if trouble is None:
        message = "No pod is kept from being created"
        return draft.condition(PODS_HEALTHY, True, "Healthy", message, situation.now)
    reason, message = trouble
    return draft.condition(PODS_HEALTHY, False, reason, message, situation.now)


def _trouble(situation: Situation, draft: Draft) -> tuple[str, str] | None:
    """Reason and message."""
    refusal = situation.refusal
    if refusal is not None and missing(situation, draft):
        return "PodsRefused", f"{refusal.message}. It is tried again; the pods that are there go on"
    return None
