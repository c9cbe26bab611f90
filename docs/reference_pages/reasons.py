"""Phases, conditions, events and reasons, from the tables of their meanings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spottrain_api.contract.reports import FATAL_REASONS

from .markdown import entry
from .meanings import CAUSES, CONDITIONS, EVENTS, FAILURES, PHASES, Reason


def phases() -> str:
    return _entries(PHASES.items())


def causes() -> str:
    return _entries(CAUSES.items())


def events() -> str:
    return _entries(EVENTS.items())


def failures() -> str:
    """With whether the operator tries again."""
    return "\n".join(
        entry(reason, _text(each), "not retried" if reason in FATAL_REASONS else "retried")
        for reason, each in FAILURES.items()
    )


def conditions() -> str:
    """A section for each type."""
    return "\n".join(_conditions())


def _conditions() -> Iterator[str]:
    for name, each in CONDITIONS.items():
        yield f"### {name}\n"
        yield f"True: {each.when_true}\n"
        yield f"False: {each.when_false}\n"
        yield _entries(each.reasons.items())


def _entries(reasons: Iterable[tuple[str, Reason]]) -> str:
    return "\n".join(entry(name, _text(each)) for name, each in reasons)


def _text(reason: Reason) -> str:
    return f"{reason.meaning} **What to do:** {reason.action}" if reason.action else reason.meaning
