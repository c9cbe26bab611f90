"""How often an agent reports.

It reports news at once, and everything else seldom. It repeats news soon, except a commit.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from spottrain_agent.report_rhythm import Milestones, ReportRhythm
from spottrain_api.contract.assignments import AgentPhase, AgentReport
from spottrain_api.contract.notices import NodeWatch, WatchState
from spottrain_api.contract.reports import CommitRef, Progress, TrainerPhase

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def report(**changes: Any) -> AgentReport:
    return AgentReport(pod="gpt-1", pod_uid="u", rendezvous_port=1, sent_at=NOW, **changes)


def at_step(step: int, age: float = 0.1) -> AgentReport:
    progress = Progress(
        generation=1, phase=TrainerPhase.TRAINING, step=step, step_seconds=2.0, first_step_at=NOW, updated_at=NOW
    )
    return report(generation=1, phase=AgentPhase.RUNNING, progress=progress, step_age_seconds=age)


def times(longest: float, seconds: int, rhythm: ReportRhythm | None = None) -> list[int]:
    """When an agent that makes a step a second reports."""
    rhythm = rhythm or ReportRhythm()
    found = []
    for now in range(seconds):
        if rhythm.is_due(at_step(now), now):
            rhythm.sent(at_step(now), now, longest)
            found.append(now)
    return found


def test_reports_become_rare_after_the_last_news() -> None:
    assert times(30.0, 130) == [0, 1, 3, 7, 15, 31, 61, 91, 121]


def test_an_operator_that_names_no_pause_is_reported_every_second() -> None:
    assert times(1.0, 5) == [0, 1, 2, 3, 4]


def test_news_are_reported_at_once_and_repeated_soon() -> None:
    rhythm = ReportRhythm()
    times(30.0, 100, rhythm)
    news = report(generation=1, phase=AgentPhase.FAILED)
    assert rhythm.is_due(news, 100.0)
    rhythm.sent(news, 100.0, 30.0)
    assert next(now for now in range(101, 105) if rhythm.is_due(news, now)) == 101


def test_a_commit_is_reported_at_once_and_not_repeated() -> None:
    rhythm = ReportRhythm()
    times(30.0, 100, rhythm)
    committed = at_step(99).model_copy(
        update={"commit": CommitRef(generation=1, step=99, manifest="m", committed_at=NOW)}
    )
    assert rhythm.is_due(committed, 100.0)
    rhythm.sent(committed, 100.0, 30.0)
    assert next(now for now in range(101, 191) if rhythm.is_due(committed, now)) == 130


def test_steps_that_no_longer_come_are_news() -> None:
    rhythm = ReportRhythm()
    times(30.0, 100, rhythm)
    assert not rhythm.is_due(at_step(99, age=9.0), 100.0), "five steps of two seconds"
    assert rhythm.is_due(at_step(99, age=10.5), 100.0)


def test_what_a_watcher_says_is_news_but_not_for_how_long() -> None:
    rhythm = ReportRhythm()
    blind = [report(watch=NodeWatch(state=WatchState.BLIND, seconds=float(number))) for number in range(9)]
    rhythm.sent(blind[0], 0.0, 30.0)
    assert not rhythm.is_due(blind[8], 0.5)
    assert rhythm.is_due(report(watch=NodeWatch(state=WatchState.WATCHED)), 0.5)


def test_an_operator_that_was_lost_is_reported_all_again() -> None:
    rhythm = ReportRhythm()
    times(30.0, 100, rhythm)
    rhythm.lose_contact()
    assert rhythm.is_due(at_step(99), 99.5)


def test_milestones_are_what_the_operator_waits_for_and_no_steps() -> None:
    milestones = Milestones()
    progress = Progress(generation=1, phase=TrainerPhase.STARTING, step=0, updated_at=NOW)
    assert not milestones.reach(None), "there are no ranks yet"
    assert milestones.reach(progress)
    changes = (
        {"phase": TrainerPhase.TRAINING},
        {"first_step_at": NOW},
        {"commit": CommitRef(generation=1, step=3, manifest="m", committed_at=NOW)},
        {"drain_seen_at": NOW},
    )
    for change in changes:
        progress = progress.model_copy(update=change)
        assert milestones.reach(progress), change
        progress = progress.model_copy(update={"step": progress.step + 1})
        assert not milestones.reach(progress), "each is reached once, and a step is none"
