"""When an agent reports.

It reports news at once, and everything else seldom. It repeats news soon, except a commit.
"""

from __future__ import annotations

from spottrain_api.contract.assignments import AgentReport
from spottrain_api.contract.reports import Progress

FIRST_PAUSE_SECONDS = 1.0


class ReportRhythm:
    """The pauses between reports.

    The pause is a second after news, then twice as long each time, up to what the operator allows. The reports after
    the news show the operator that nothing has changed since. A commit leaves the pause as it is.
    """

    def __init__(self) -> None:
        self._news: tuple[object, ...] | None = None
        self._news_but_commits: tuple[object, ...] | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._next_at = 0.0

    def is_due(self, report: AgentReport, now: float) -> bool:
        """Whether to send this report now."""
        return self._news is None or report.news != self._news or now >= self._next_at

    def seconds_left(self, now: float) -> float:
        """Until the next report without news. It is 0 if one is due, or if nothing was reported yet."""
        return max(0.0, self._next_at - now) if self._news is not None else 0.0

    def sent(self, report: AgentReport, now: float, longest: float) -> None:
        """Note a report that the operator has accepted.

        `longest` is the longest pause that the operator allows, in seconds.
        """
        news, news_but_commits = report.news, report.news_but_commits
        if news_but_commits != self._news_but_commits:
            self._pause = FIRST_PAUSE_SECONDS
        elif news == self._news:
            self._pause *= 2
        self._pause = min(self._pause, longest)
        self._news, self._news_but_commits = news, news_but_commits
        self._next_at = now + self._pause

    def lose_contact(self) -> None:
        """All is news to the operator that answers next."""
        self._news = self._news_but_commits = None


class Milestones:
    """What of a generation's progress the operator waits for."""

    def __init__(self) -> None:
        self._reached: object = None

    def reach(self, progress: Progress | None) -> bool:
        """Whether the ranks have come to another milestone since the last call."""
        before = self._reached
        if progress is None:
            self._reached = None
        else:
            self._reached = (progress.phase, progress.first_step_at, progress.commit, progress.drain_seen_at)
        return self._reached != before
