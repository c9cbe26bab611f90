"""Words for sentences: numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 node", "3 nodes" """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
