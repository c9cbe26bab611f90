"""Markdown that MyST reads."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; cells may not hold line breaks."""
    names = list(header)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines) + "\n"


def entry(name: str, text: str, *facts: str, anchor: str | None = None) -> str:
    """A name with short facts beside it, and the text that describes it.

    `anchor` is a target for links.
    """
    target = f"({anchor})=\n" if anchor is not None else ""
    shown = " · ".join(fact for fact in facts if fact)
    beside = f' <span class="facts">{shown}</span>' if shown else ""
    return f"{target}{code(name)}{beside}\n: {textwrap.indent(text, '  ').strip() or '–'}\n"


def code(text: object) -> str:
    """`text`, as it is."""
    return f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
