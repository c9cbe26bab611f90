"""Helpers for sentences that people read."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import TracebackType

# With the sentence before it, this fits into a Kubernetes event.
_TRACEBACK_LENGTH = 700


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 node", "3 nodes", "12,000 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], *, most: int = 5) -> str:
    """A list in prose with at most `most` names: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def one_line(text: str, *, most: int = 300) -> str:
    """Clean text of others for a sentence of ours.

    The result is on one line, without control characters, and at most `most` characters long.
    """
    printable = "".join(each if each.isprintable() else " " for each in text[: 4 * most])
    line = " ".join(printable.split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def traceback_tail(trace: TracebackType | None) -> str | None:
    """The last lines of a traceback, without the exception itself.

    None if there is no traceback.
    """
    text = "".join(traceback.format_tb(trace)).rstrip()
    if len(text) <= _TRACEBACK_LENGTH:
        return text or None
    return text[-_TRACEBACK_LENGTH:].partition("\n")[2] or None


def place_of(error: BaseException) -> str:
    """Where an exception was raised, or a source can't be parsed.

    An example is "train.py, line 3". Empty if that isn't known.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
