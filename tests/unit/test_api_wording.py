"""Words of the sentences that people read."""

from __future__ import annotations

import runpy
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spottrain_runtime.wording import (
    counted,
    listed,
    one_line,
    place_of,
    printable,
    sentence_of,
    time_of_day,
    traceback_tail,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1_000, "1,000 steps"), (12_345, "12,345 steps")],
)
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "step") == text


def test_a_long_list_says_how_many_more() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"], most=2) == "a, b"
    assert listed(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0, "10:02:03 UTC"),
        (12, "22:02:03 UTC"),
        (-12, "22:02:03 UTC"),
        (13, "2026-01-01 23:02:03 UTC"),
        (-13, "2025-12-31 21:02:03 UTC"),
        (48, "2026-01-03 10:02:03 UTC"),
    ],
)
def test_a_time_of_another_day_has_its_date(hours: int, text: str) -> None:
    now = datetime(2026, 1, 1, 10, 2, 3, tzinfo=UTC)
    assert time_of_day(now + timedelta(hours=hours), now) == text


def test_text_of_others_gives_a_terminal_no_commands() -> None:
    hostile = "a\x1b[2J\tb\nc\x9b31m\x00\x7f\r\u202e\ud800é…"
    assert printable(hostile) == "a [2J\tb\nc 31m     é…"
    assert one_line(hostile) == "a [2J b c 31m é…"


def test_of_a_long_traceback_the_last_whole_lines_are_reported() -> None:
    def deeper(levels: int) -> None:
        if levels == 0:
            raise KeyError
        if levels % 2:  # two lines, so that the traceback doesn't fold them
            deeper(levels - 1)
        else:
            deeper(levels - 1)

    def tail_of(levels: int) -> str:
        with pytest.raises(KeyError) as raised:
            deeper(levels)
        return traceback_tail(raised.value.__traceback__) or ""

    assert "in tail_of" in tail_of(0)
    assert "in tail_of" not in tail_of(30)
    for tail in (tail_of(0), tail_of(30)):
        assert len(tail) <= 700
        assert tail.endswith("    raise KeyError")
        assert all(line.startswith("  ") for line in tail.splitlines())
    assert traceback_tail(None) is None


def test_an_error_is_reported_with_file_and_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"

    def place(source: str) -> str:
        script.write_text(source)
        with pytest.raises((ImportError, SyntaxError, KeyError)) as raised:
            runpy.run_path(str(script))
        return place_of(raised.value)

    assert place("import math\nimport pandaz\n") == f"{script}, line 2"
    assert place("x = 1\ny = (\n") == f"{script}, line 2", "no frame of the script has run"
    assert place("\n\n{}['a']\n") == f"{script}, line 3"
    assert place("import importlib\nimportlib.import_module('pandaz')\n") == f"{script}, line 2", "called a library"
    assert place("import runpy\nrunpy.run_module('spottrain.nothing')\n") == f"{script}, line 2"
    assert place_of(KeyError("a")) == ""


def test_the_notes_of_an_error_are_not_its_sentence() -> None:
    error = ValueError("no such column")
    error.add_note("in row 17")
    assert sentence_of(error) == "ValueError: no such column"
    assert sentence_of(SyntaxError("invalid syntax", ("train.py", 3, 1, "a b"))) == "SyntaxError: invalid syntax"
