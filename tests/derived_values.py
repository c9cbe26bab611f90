"""Values of fields that follow from a schema, so that a new field needs no entry in the tables of tests."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def completed(given: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Add a value other than the default for each field that `given` lacks, if one follows from the schema.

    Items of lists stay as they are, because their fields often exclude each other.
    """
    found = dict(given)
    for name, field in schema.get("properties", {}).items():
        if isinstance(given.get(name), dict) or (name not in given and "properties" in field):
            inside = completed(given.get(name, {}), field)
            found |= {name: inside} if inside or name in given else {}
        elif name not in given and (value := other_value(field)) is not None:
            found[name] = value
    return found


def other_value(field: Schema) -> Any:
    """A valid value other than the default; None if the schema alone doesn't give one."""
    default = field.get("default")
    if "enum" in field:
        return next((value for value in field["enum"] if value != default), None)
    if field.get("type") == "boolean":
        return not default
    if field.get("type") in ("integer", "number"):
        values = (field.get("minimum"), field.get("maximum"), (default or 0) + 1)
        return next((value for value in values if value is not None and value != default), None)
    return None
