"""Words of the sentences that people read."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """ "1 node", "3 nodes", "12,000 nodes" """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], *, most: int = 5) -> str:
    """ "a, b and 3 more", with at most that many names"""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
