"""Times that come from another machine, if its clock or ours may be wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_GRAIN_SECONDS = 5.0
# Clocks whose battery is empty start in 1970.
_MAX = timedelta(days=100 * 365)


def clock_offset(date: str | None, now: datetime) -> timedelta:
    """How far our clock is ahead of a server's, by the `Date` header of its answer.

    RFC 9110, section 6.6.1, describes the header. Add the offset to the times in the answer. It is rounded to five
    seconds: the header has whole seconds, and the answer took a moment.

    Args:
        date: The header's value; None if there is none.
        now: The time by our clock.

    Returns:
        The offset. Zero if there is no header, or if its date is invalid or a hundred years off.
    """
    try:
        theirs = parsedate_to_datetime(date or "")
    except ValueError:
        return timedelta()
    theirs = theirs if theirs.tzinfo is not None else theirs.replace(tzinfo=UTC)  # "-0000" means no zone
    return rounded_offset((now - theirs).total_seconds())


def rounded_offset(seconds: float) -> timedelta:
    """The offset of a clock, rounded to five seconds.

    It was measured by a message that took a moment. Zero if it is more than a hundred years.
    """
    offset = timedelta(seconds=_GRAIN_SECONDS * round(seconds / _GRAIN_SECONDS))
    return offset if abs(offset) < _MAX else timedelta()
