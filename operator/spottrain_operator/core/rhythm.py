"""When to decide again if nothing happens before.

Changes wake the reconciler, but time alone doesn't.
"""

from __future__ import annotations

from spottrain_api.v1alpha1 import GenerationState
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.rivals import rival_of
from spottrain_operator.core.situation import Situation
from spottrain_operator.core.timing import RECORD_INTERVAL, seconds_between

# While a generation ends, each delay is time without a step.
_ENDING = 0.5
_WAITING = 1.0
_SUSPENDED = 30.0
_BLOCKED = 5.0


def look_again(situation: Situation, draft: Draft) -> float | None:
    """Seconds until time alone may require a decision. None: never."""
    if draft.finished:
        return _until_expiry(situation, draft)
    running = draft.running
    if running is not None:
        return RECORD_INTERVAL if running.state is GenerationState.ACTIVE else _ENDING
    if situation.spec.run_policy.suspend and not situation.pods:
        return _SUSPENDED
    if rival_of(situation, draft) is not None and not situation.pods:
        return _BLOCKED
    return _WAITING


def _until_expiry(situation: Situation, draft: Draft) -> float | None:
    if any(not facts.finished for facts in situation.pods.values()):
        return _WAITING
    ttl, completed = situation.spec.run_policy.ttl_seconds_after_finished, draft.status.completion_time
    if ttl is None or completed is None:
        return None
    return max(_WAITING, ttl - seconds_between(completed, situation.now))
