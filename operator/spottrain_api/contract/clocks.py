"""Moments that come from another machine, whose clock may be wrong, or ours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_GRAIN_SECONDS = 5.0
# Clocks that have lost their battery begin in 1970.
_MAX = timedelta(days=100 * 365)


def clock_offset(date: str | None, now: datetime) -> timedelta:
    """How far our clock, which says `now`, is ahead of that of a server by the `Date` header of its answer
    (RFC 9110, section 6.6.1): what to add to the moments in it. To five seconds, as the header has whole seconds and
    the answer took a moment. Zero where there is no such header, or one that no clock can mean."""
    try:
        theirs = parsedate_to_datetime(date or "")
    except ValueError:
        return timedelta()
    theirs = theirs if theirs.tzinfo is not None else theirs.replace(tzinfo=UTC)  # "-0000" means no zone
    offset = timedelta(seconds=_GRAIN_SECONDS * round((now - theirs).total_seconds() / _GRAIN_SECONDS))
    return offset if abs(offset) < _MAX else timedelta()
