"""What a change of members costs this job, as measured."""

from __future__ import annotations

from statistics import median

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.timing import seconds_between

# Drains after which enough nodes were there: what passes without a step is the restart.
_RESTARTS = frozenset({Cause.GROW, Cause.SCALE_DOWN})
_NUM_RECENT = 5


def restart_seconds(status: TrainingJobStatus) -> float:
    """Seconds without a step that a planned change costs: the median of the last ones.

    Before the first one, it is the time that the running generation took from its start to its first step.
    """
    measured = [t.seconds_without_step for t in status.transitions if t.reason in _RESTARTS]
    known = [each for each in measured if each is not None][-_NUM_RECENT:]
    if known:
        return median(known)
    generation = status.running
    if generation is None or generation.first_step_at is None:
        return 0.0
    return max(0.0, seconds_between(generation.started_at, generation.first_step_at))
