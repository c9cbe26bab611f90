"""Bounds of a report's fields: what no agent sends, and nothing may store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from pydantic import ValidationError

from spottrain_api.contract.assignments import RelayReport
from spottrain_api.contract.message import MAX_INTEGER, MAX_TEXT_LENGTH, Message

# A relay's own report, and a batch of its peers', of which each has half a dozen texts.
MAX_BODY_BYTES = 384 * 1024
MAX_ITEMS = 1024
# Each takes a microsecond or two, in which the operator does nothing else. A relay with 511 peers of 64 ranks, which
# hold two steps of two members each, sends 24,000 while they start.
MAX_VALUES = 32_000
# A clock whose battery is empty starts in 1970.
FIRST_YEAR, LAST_YEAR = 1960, 2200
# Numbers that the user's script makes. They may be any: a loss that diverges must not cut its job off.
OF_THE_SCRIPT = {"loss", "tokens_per_second", "samples_per_second", "epoch"}
# The exit code of a process that a signal ended is negative.
SIGNED = {"exit_code"}


class InvalidReportError(Exception):
    """What was sent is no report that an agent would send. The text is a sentence."""


def parse_report(body: bytes) -> RelayReport:
    """Parse a report.

    Raises:
        InvalidReportError: It isn't one, or a field is out of bounds.
    """
    try:
        report = RelayReport.from_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidReportError(f"not an agent report: {field}: {first['msg']}") from error
    for number, (name, value) in enumerate(_values("", report), start=1):
        problem = _problem(name, value) if number <= MAX_VALUES else f"more than {MAX_VALUES} values"
        if problem:
            raise InvalidReportError(f"not an agent report: {problem}")
    return report


def _values(name: str, value: object) -> Iterator[tuple[str, object]]:
    """A value and all that it holds, each with the name of its field."""
    yield name, value
    match value:
        case Message():
            for field, each in vars(value).items():
                if each is not None:
                    yield from _values(field, each)
        case Mapping():
            for item in value.items():
                for part in item:
                    yield from _values(name, part)
        case tuple() | list():
            for each in value:
                yield from _values(name, each)


def _problem(name: str, value: object) -> str:
    """What is wrong with one value, with its name; empty if nothing is."""
    match value:
        case tuple() | list() | dict() if len(value) > MAX_ITEMS:
            return f"{name}: {len(value)} items, of at most {MAX_ITEMS}"
        case str() if len(value) > MAX_TEXT_LENGTH:
            return f"{name}: {len(value)} characters, of at most {MAX_TEXT_LENGTH}"
        case int() | float() if name in OF_THE_SCRIPT:
            return ""
        case int() | float() if value < 0 and name not in SIGNED:
            return f"{name}: {value} is negative"
        case int() | float() if abs(value) > MAX_INTEGER:
            return f"{name}: the number is too large"
        case datetime() if not FIRST_YEAR <= value.year < LAST_YEAR:
            return f"{name}: the year {value.year} is not one of this time"
    return ""
