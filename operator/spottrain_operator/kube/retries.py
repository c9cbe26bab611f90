"""Retries of refused writes on which no job depends, with ever longer pauses."""

from __future__ import annotations

from collections.abc import Hashable
from datetime import datetime

from spottrain_operator.core.timing import after, growing_pause

FIRST_PAUSE_SECONDS = 1.0
# Without the right to it, a write is refused for as long as the job lasts.
MAX_PAUSE_SECONDS = 300.0


class Retries:
    """Remembers which writes the API server refuses, and when to try them again.

    The pause after a refusal doubles from one second up to five minutes. It is kept in memory only, so a new operator
    retries.
    """

    def __init__(self) -> None:
        self._refused: dict[Hashable, tuple[int, datetime]] = {}  # by write: tries in a row, time of the last one

    def is_due(self, write: Hashable, now: datetime) -> bool:
        """Whether to make the write now. Before its first refusal, it always is."""
        num_tries, tried_at = self._refused.get(write, (0, now))
        pause = growing_pause(num_tries, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        return num_tries == 0 or now >= after(tried_at, pause)

    def note_refusal(self, write: Hashable, now: datetime) -> bool:
        """Note that the write was refused.

        Returns:
            Whether it is the first refusal in a row.
        """
        num_tries, _ = self._refused.get(write, (0, now))
        self._refused[write] = (num_tries + 1, now)
        return num_tries == 0

    def forget(self, write: Hashable) -> None:
        """Drop what is kept of a write that succeeded, or that is no longer wanted."""
        self._refused.pop(write, None)
