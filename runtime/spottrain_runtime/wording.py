"""Helpers for sentences that people read."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import PurePath
from types import FrameType, TracebackType

# A time of day that is at most so far away is not taken for that of another day.
_WITHOUT_DATE = timedelta(hours=12)
# With the sentence before it, this fits into a Kubernetes event.
_TRACEBACK_LENGTH = 700
# Of the frames of a traceback, these are not the user's own.
_OURS = {"spottrain", "spottrain_agent", "spottrain_api", "spottrain_planner", "spottrain_runtime"}
_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 node", "3 nodes", "12,000 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], *, most: int = 5) -> str:
    """A list in prose with at most `most` names: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def clause(sentence: str) -> str:
    """The sentence without its full stop, so that it can be continued."""
    return sentence.removesuffix(".")


def time_of_day(moment: datetime, now: datetime) -> str:
    """A time of day: "10:02:03 UTC".

    If it is more than twelve hours from `now`, it has its date: "2026-01-04 10:02:03 UTC".
    """
    day = f"{moment:%Y-%m-%d} " if abs(moment - now) > _WITHOUT_DATE else ""
    return f"{day}{moment:%H:%M:%S} UTC"


def printable(text: str) -> str:
    """Clean text of others for a terminal.

    Control characters, and those that hide or turn around others, become spaces. Line breaks and tabs stay.
    """
    return "".join(each if each.isprintable() or each in "\n\t" else " " for each in text)


def one_line(text: str, *, most: int = 300) -> str:
    """Clean text of others for a sentence of ours.

    The result is on one line, without control characters, and at most `most` characters long.
    """
    line = " ".join(printable(text[: 4 * most]).split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def sentence_of(error: BaseException) -> str:
    """An exception as the last line of its traceback has it, without its notes."""
    bare = traceback.TracebackException(type(error), error, None, compact=True)
    bare.__notes__ = None
    return list(bare.format_exception_only())[-1].strip()


def traceback_tail(trace: TracebackType | None) -> str | None:
    """The last lines of a traceback, without the exception itself; None if there is no traceback."""
    lines = "".join(traceback.format_tb(trace)).splitlines(keepends=True)
    text = "".join(line for line in lines if line.strip(" ^~\n")).rstrip()
    if len(text) <= _TRACEBACK_LENGTH:
        return text or None
    return text[-_TRACEBACK_LENGTH:].partition("\n")[2] or None


def place_of(error: BaseException) -> str:
    """Where an exception was raised, or a source can't be parsed.

    An example is "train.py, line 3". If a library raised it, the line that called the library counts. Empty if that
    isn't known.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if not _is_of_library(frame)]
    return next((f"{frame.f_code.co_filename}, line {line}" for frame, line in reversed(own or frames)), "")


def _is_of_library(frame: FrameType) -> bool:
    file = PurePath(frame.f_code.co_filename)
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS or str(file).startswith("<"):
        return True
    return not _PACKAGES.isdisjoint(file.parts) or file.is_relative_to(_STANDARD_LIBRARY)
