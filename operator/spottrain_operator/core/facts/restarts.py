"""What a change of members costs this job, as measured."""

from __future__ import annotations

from statistics import median

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.timing import seconds_between

_NUM_RECENT = 5


def restart_seconds(status: TrainingJobStatus) -> float:
    """Seconds without a step that a planned change costs: the median of the last times that the job grew.

    After these, enough nodes were there: what passed without a step was the restart. A job that shrinks may have
    given its nodes back, and wait for others.
    Before the first one, it is the time that the running generation took from its start to its first step.
    """
    measured = [t.seconds_without_step for t in status.transitions if t.reason == Cause.GROW]
    known = [each for each in measured if each is not None][-_NUM_RECENT:]
    if known:
        return median(known)
    generation = status.running
    if generation is None or generation.first_step_at is None:
        return 0.0
    return max(0.0, seconds_between(generation.started_at, generation.first_step_at))
