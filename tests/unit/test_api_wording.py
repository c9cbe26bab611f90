"""Words of the sentences that people read."""

from __future__ import annotations

import pytest

from spottrain_api.wording import counted, listed


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
