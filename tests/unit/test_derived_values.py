"""A new field gets its value for the tests from its schema."""

from __future__ import annotations

from typing import Any

import pytest

from derived_values import completed, other_value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param({"type": "boolean", "default": True}, False, id="bool"),
        pytest.param({"type": "boolean"}, True, id="bool without a default"),
        pytest.param({"type": "string", "enum": ["a", "b"], "default": "a"}, "b", id="choice"),
        pytest.param({"type": "integer", "default": 3, "minimum": 1}, 1, id="number"),
        pytest.param({"type": "integer", "default": 1, "minimum": 1, "maximum": 8}, 8, id="number at its minimum"),
        pytest.param({"type": "number", "default": 0.5}, 1.5, id="number without bounds"),
        pytest.param({"type": "string", "default": "a"}, None, id="string"),
    ],
)
def test_another_value(field: dict[str, Any], value: object) -> None:
    assert other_value(field) == value
    assert value is None or value != field.get("default")


def test_what_is_given_stays() -> None:
    inside = {"properties": {"new": {"type": "boolean"}, "name": {"type": "string"}}}
    schema = {"properties": {"kept": {"type": "boolean", "default": True}, "section": inside, "names": inside}}
    given = {"kept": True, "section": {"name": "a"}}
    assert completed(given, schema) == {
        "kept": True,
        "section": {"name": "a", "new": True},
        "names": {"new": True},
    }
    assert given == {"kept": True, "section": {"name": "a"}}
