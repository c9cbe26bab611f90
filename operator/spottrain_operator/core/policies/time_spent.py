"""What a job's time went into: lasting steps, and where the rest was lost.

Every second belongs to one part. `TimeStatus.until` is the time up to which that is decided. It moves to the newest
step while a generation makes steps, and to the present while none runs. Parts never decrease.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.reports import Progress
from spottrain_api.v1alpha1.spending import TimeStatus
from spottrain_api.v1alpha1.status import GenerationStatus, Phase, TrainingJobStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import seconds_between


def spend_on_steps(
    status: TrainingJobStatus, generation: GenerationStatus, newest: Progress, now: datetime
) -> TimeStatus | None:
    """The time with the steps up to the newest one.

    Before a generation's first step lies the gap that it ends.

    Args:
        status: With the progress that was recorded last.
        generation: The newest generation.
        newest: Its newest progress, with the waits of the slowest rank.
        now: Time of the decision. Clocks of ranks may be wrong, so their times count only up to here.
    """
    time = _time(status)
    if time is None or generation.first_step_at is None or newest.last_step_at is None:
        return time
    now = max(now, time.until)  # a new leader's clock may be behind
    first = min(max(generation.first_step_at, time.until), now)
    last = min(max(newest.last_step_at, first), now)
    time = _add(time, first, _gap(status))
    recorded = status.progress
    if recorded.last_step_at is None or recorded.last_step_at < generation.first_step_at:
        step, waited, stalled = newest.start_step + 1, 0.0, 0.0
    else:
        step, waited, stalled = recorded.step, recorded.waited_seconds, recorded.stalled_seconds
    left = seconds_between(first, last)
    data_wait = min(left, max(0.0, newest.waited_seconds - waited))
    left -= data_wait
    commit_stall = min(left, max(0.0, newest.stalled_seconds - stalled))
    left -= commit_stall
    redone = left * _share_redone(status, step, newest.step)
    return time.model_copy(
        update={
            "until": last,
            "data_wait_seconds": time.data_wait_seconds + data_wait,
            "commit_stall_seconds": time.commit_stall_seconds + commit_stall,
            "redone_seconds": time.redone_seconds + redone,
            "productive_seconds": time.productive_seconds + (left - redone),
        }
    )


def spend_on_end(situation: Situation, draft: Draft, *, unreported: bool) -> Draft:
    """Add the time since the newest step of the generation that ends now.

    Args:
        situation: The job at one moment.
        draft: What was decided so far.
        unreported: Whether its script ran without the library.
    """
    return _up_to(situation.now, draft, "unreported_seconds" if unreported else _gap(draft.status))


def spend_on_wait(situation: Situation, draft: Draft) -> Draft:
    """Add the time since the last record, if no generation runs."""
    if draft.running is not None:
        return draft
    # What the status says, it was until now: the user may just have ended the suspension.
    if draft.status.phase is Phase.SUSPENDED:
        return _up_to(situation.now, draft, "suspended_seconds")
    placed = sorted(
        facts.pod.placed_at for facts in situation.pods.values() if facts.usable and facts.pod.node is not None
    )
    minimum = situation.spec.nodes.min
    enough = len(placed) >= minimum
    draft = _up_to(min(placed[minimum - 1], situation.now) if enough else situation.now, draft, "capacity_seconds")
    return _up_to(situation.now, draft, _gap(draft.status)) if enough else draft


def _up_to(until: datetime, draft: Draft, part: str) -> Draft:
    time = _time(draft.status)
    return draft if time is None else draft.update(time=_add(time, max(time.until, until), part))


def _time(status: TrainingJobStatus) -> TimeStatus | None:
    """What is recorded so far; None before the first generation."""
    if status.time is None and status.start_time is not None:
        return TimeStatus(until=status.start_time)
    return status.time


def _add(time: TimeStatus, until: datetime, part: str) -> TimeStatus:
    return time.model_copy(update={"until": until, part: getattr(time, part) + seconds_between(time.until, until)})


def _gap(status: TrainingJobStatus) -> str:
    """The part to which time between two generations belongs.

    It applies if there are enough nodes. A generation that starts has a progress without a step.
    """
    time = status.time
    stepped = status.progress.last_step_at is not None or (time is not None and any(_since_first_step(time)))
    return "restart_seconds" if stepped else "start_up_seconds"


def _since_first_step(time: TimeStatus) -> tuple[float, ...]:
    """The parts that begin with the first step of the job."""
    steps = (time.productive_seconds, time.data_wait_seconds, time.commit_stall_seconds, time.redone_seconds)
    return (*steps, time.restart_seconds, time.unreported_seconds)


def _share_redone(status: TrainingJobStatus, step: int, newest: int) -> float:
    """Share of the steps after `step` that earlier generations had completed already."""
    completed = max((transition.last_step for transition in status.transitions), default=0)
    return min(1.0, max(0, completed - step) / (newest - step)) if newest > step else 0.0
