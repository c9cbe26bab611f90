"""Records commits and progress in the status, from the reports of agents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime

from spottrain_api.contract.conditions import EventReason
from spottrain_api.contract.reports import CommitRef, Progress
from spottrain_api.v1alpha1.status import LONG_DATA_WAIT, GenerationStatus, ProgressStatus, TrainingJobStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.progress import found_commits, newest_progress, reported
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.policies.time_spent import spend_on_steps

# The first steps of a generation wait for the data workers to start, and say little about the others.
TELLING_SECONDS = 60.0
DATA_ADVICE = (
    "Raise num_workers of the data set, or cache_bytes of its shards. One process of each rank reads its streams: do "
    "less in make_stream"
)


def record_commit(situation: Situation, draft: Draft) -> Draft:
    """Record the newest known commit, and the time of the generation's first step.

    Any agent may know of the commit. Both are recorded at once, without a limit on their rate, because later
    decisions depend on them.
    """
    newest = max(_commits(situation), key=commit_order, default=None)
    known = draft.status.commit
    if newest is not None and (known is None or commit_order(newest) > commit_order(known)):
        draft = draft.update(commit=_by_operators_clock(situation, draft.status.generation, newest))
    generation = draft.running
    if generation is not None and generation.first_step_at is None:
        first = min(
            (p.first_step_at for p in reported(situation, generation) if p.first_step_at is not None), default=None
        )
        if first is not None:
            draft = draft.update_generation(first_step_at=first)
    return draft


def _by_operators_clock(situation: Situation, generation: GenerationStatus | None, commit: CommitRef) -> CommitRef:
    """The commit with its time by the operator's clock.

    Whoever reports it, the time was set by node rank 0. If that was in an earlier generation, it stays as it is.
    """
    if generation is None or generation.number != commit.generation:
        return commit
    committing = next((m.pod_uid for m in generation.members if m.node_rank == 0), "")
    view = situation.observed.reports.get(committing)
    if view is None:
        return commit
    return commit.model_copy(update={"committed_at": commit.committed_at + view.clock_offset})


def commit_order(commit: CommitRef) -> tuple[int, int]:
    """Order of commits in HEAD.

    A newer generation fences older ones, so that its commits are newer at any step. Within a generation, steps only
    grow.
    """
    return (commit.generation, commit.step)


def record_progress(situation: Situation, draft: Draft, *, at_once: bool = False) -> Draft:
    """Copy the newest progress into the status.

    This happens when a pass records (`Draft.records`), and always with `at_once`.
    """
    generation = draft.status.generation
    if generation is None or not (at_once or draft.records):
        return draft
    newest = newest_progress(situation, generation)
    if newest is None:
        return draft
    said = reported(situation, generation)
    newest = newest.model_copy(update=_longest_waits(draft.status, generation, said))
    time = spend_on_steps(draft.status, generation, newest, situation.now)
    if newest.strategy is not None and draft.status.strategy is None:
        draft = draft.update(strategy=newest.strategy).record(EventReason.STRATEGY_CHOSEN, newest.strategy.reason)
    if draft.status.progress.total_steps is None and found_commits(generation, newest):
        text = (
            f"This job continues from step {newest.start_step}, whose commit was at {situation.spec.checkpoint.uri} "
            "before it. For a fresh run, create a new job with a different checkpoint.uri"
        )
        draft = draft.record(EventReason.EARLIER_JOB, text)
    progress = _as_status(newest).model_copy(update={"data_wait_ratio": _data_wait_ratio(said)})
    draft = _report_waits(_report_surprises(draft, newest), generation, newest)
    return draft.update(progress=progress, time=time)


def _commits(situation: Situation) -> Iterable[CommitRef]:
    for view in situation.observed.reports.values():
        if view.report.commit is not None:
            yield view.report.commit
        if view.report.progress is not None and view.report.progress.commit is not None:
            yield view.report.progress.commit


def _longest_waits(
    status: TrainingJobStatus, generation: GenerationStatus, reports: Sequence[Progress]
) -> dict[str, float]:
    """The sums of the ranks that have waited longest.

    They stay if such a rank reports no more.
    """
    known = status.progress
    first = generation.first_step_at
    if first is None or known.last_step_at is None or known.last_step_at < first:
        known = ProgressStatus()  # of an earlier generation
    return {
        "waited_seconds": max(known.waited_seconds, *(p.waited_seconds for p in reports)),
        "stalled_seconds": max(known.stalled_seconds, *(p.stalled_seconds for p in reports)),
    }


def _as_status(progress: Progress) -> ProgressStatus:
    total, step = progress.total_steps, progress.step
    remaining = None
    if total is not None and progress.step_seconds is not None:
        remaining = round(max(0, total - step) * progress.step_seconds, 1)
    return ProgressStatus(
        step=step,
        total_steps=total,
        display=f"{step}/{total}" if total is not None else str(step),
        loss=_loss(progress.loss),
        tokens_per_second=_rounded(progress.tokens_per_second, 1),
        samples_per_second=_rounded(progress.samples_per_second, 1),
        epoch=_rounded(progress.epoch, 3),
        eta_seconds=remaining,
        last_step_at=progress.last_step_at,
        waited_seconds=_rounded(progress.waited_seconds, 3) or 0.0,
        stalled_seconds=_rounded(progress.stalled_seconds, 3) or 0.0,
        checkpoint_interval=progress.checkpoint_interval,
        checkpoint_interval_seconds=_rounded(progress.checkpoint_interval_seconds, 1),
        skipped_steps=progress.skipped_steps,
        rollbacks=progress.rollbacks,
        message=progress.message,
    )


def _data_wait_ratio(reports: Iterable[Progress]) -> float | None:
    """The share of the rank that waits longest, as the others wait for it."""
    ratios = [
        p.data_wait_seconds / p.step_seconds for p in reports if p.data_wait_seconds is not None and p.step_seconds
    ]
    return round(min(1.0, max(ratios)), 3) if ratios else None


def _report_surprises(draft: Draft, newest: Progress) -> Draft:
    """Record an event for what did not go as planned since the last record.

    An example is a skipped step. The status of the next generation no longer shows it.
    """
    known = draft.status.progress
    if newest.rollbacks > known.rollbacks:
        return draft.record(
            EventReason.ROLLED_BACK, newest.message or "Training was rolled back to a commit", warning=True
        )
    if newest.skipped_steps > known.skipped_steps:
        return draft.record(EventReason.STEP_SKIPPED, newest.message or "A step was skipped", warning=True)
    if newest.message is not None and newest.message != known.message:
        return draft.record(EventReason.NOT_AS_PLANNED, newest.message, warning=True)
    return draft


def _report_waits(draft: Draft, generation: GenerationStatus, newest: Progress) -> Draft:
    """Record an event once the ranks have waited for data for a long share of a generation's steps."""
    known = draft.status.progress
    before = _waited(generation, known.step, known.waited_seconds, known.last_step_at)
    now = _waited(generation, newest.step, newest.waited_seconds, newest.last_step_at)
    if now < LONG_DATA_WAIT or before >= LONG_DATA_WAIT:
        return draft
    message = (
        f"The slowest rank of generation {generation.number} waits for data for {now:.0%} of a step. {DATA_ADVICE}"
    )
    return draft.record(EventReason.WAITS_FOR_DATA, message, warning=True)


def _waited(generation: GenerationStatus, step: int, waited_seconds: float, last_step_at: datetime | None) -> float:
    """The share of the time since the generation's first step. 0 as long as it says little."""
    first = generation.first_step_at
    if first is None or last_step_at is None or last_step_at <= first:
        return 0.0
    seconds = (last_step_at - first).total_seconds()
    return waited_seconds / seconds if seconds >= TELLING_SECONDS else 0.0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _loss(value: float | None) -> float | None:
    """The loss as people read it in a column.

    It is rounded to four decimals, and a small or a large one to four digits, unless that makes it infinite, which
    JSON can't hold.
    """
    if value is None or 1 <= abs(value) < 1e6:
        return _rounded(value, 4)
    rounded = float(f"{value:.4g}")
    return rounded if math.isfinite(rounded) else value
