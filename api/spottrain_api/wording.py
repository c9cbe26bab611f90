"""Helpers for sentences that people read."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 node", "3 nodes", "12,000 nodes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], *, most: int = 5) -> str:
    """A list in prose with at most `most` names: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
