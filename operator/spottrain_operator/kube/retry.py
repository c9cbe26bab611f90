"""When to try a refused write again, on which no job depends: after ever longer pauses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spottrain_operator.core.timing import after, growing_pause

FIRST_PAUSE_SECONDS = 1.0
# Without the right to it, a write is refused for as long as the job lasts.
MAX_PAUSE_SECONDS = 300.0


@dataclass(slots=True)
class Retry:
    """Remembers whether the API server refuses a write, and when to try it again.

    The pause after a refusal doubles from one second up to five minutes. It is kept in memory only, so a new operator
    retries.
    """

    _num_tries: int = 0  # in a row
    _tried_at: datetime | None = None

    def is_due(self, now: datetime) -> bool:
        """Whether to make the write now. Before its first refusal, it always is."""
        pause = growing_pause(self._num_tries, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        return self._tried_at is None or now >= after(self._tried_at, pause)

    def note_refusal(self, now: datetime) -> bool:
        """Note that the write was refused.

        Returns:
            Whether it is the first refusal in a row.
        """
        is_first = self._tried_at is None
        self._num_tries, self._tried_at = self._num_tries + 1, now
        return is_first

    def note_success(self) -> None:
        """Note that the write was accepted."""
        self._num_tries, self._tried_at = 0, None
