"""Steps of a walk through every field of a TrainingJob's spec.

They are other valid values, and invalid ones. They follow from the CRD's schema and from EVERYTHING, a job that
sets each field. A new field needs a value there only if none follows from its schema. What the schema can't say,
such as a rule between fields, is in the other tables of tests/field_values.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from derived_values import Schema
from field_values import BROKEN_RULES, EVERYTHING, INSTEAD, OTHER, REMOVED, spec_schema
from spottrain_api.tolerant import Path

# No type but a string, no known value, and no pattern's match.
WISHFUL = "no such\nvalue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A job with another value in one field.

    Args:
        name: What is changed, and how.
        spec: The whole spec.
        path: Where the changed field is.
        rule: What the rule says that it breaks, if it breaks one.
    """

    name: str
    spec: dict[str, Any]
    path: Path
    rule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of the spec, a job that sets it, and the steps from that job.

    Args:
        name: In the schema, where `[]` are the items of a list and `{}` the values of a map.
        base: The job that sets it.
        valid: Other values that the API server accepts; while the job exists, none of a fixed field.
        fixed: Other values that would be valid in a new job.
        refused: Values that the schema doesn't allow.
        breaking: Values that the schema allows, but a rule doesn't.
    """

    name: str
    base: dict[str, Any]
    valid: tuple[Step, ...]
    fixed: tuple[Step, ...]
    refused: tuple[Step, ...]
    breaking: tuple[Step, ...]


def _schemas(schema: Schema, name: str) -> Iterator[tuple[str, Schema, bool]]:
    """Everything below a schema: its name, its schema, and whether it is required."""
    below = {
        f"{name}.{key}".removeprefix("."): (part, key in schema.get("required", ()))
        for key, part in schema.get("properties", {}).items()
    }
    below |= {f"{name}[]": (schema["items"], False)} if "items" in schema else {}
    values = schema.get("additionalProperties")
    below |= {f"{name}{{}}": (values, False)} if isinstance(values, dict) else {}
    for each, (part, required) in below.items():
        yield each, part, required
        yield from _schemas(part, each)


def _first_place(value: Any, parts: list[str]) -> Path | None:
    """Where a value first has what a name of the schema means."""
    if not parts:
        return ()
    inside: Any = {parts[0]: value.get(parts[0])} if isinstance(value, dict) else {}
    if parts[0] == "[]":
        inside = dict(enumerate(value))
    elif parts[0] == "{}":
        inside = value
    for key, each in inside.items():
        rest = None if each is None else _first_place(each, parts[1:])
        if rest is not None:
            return (key, *rest)
    return None


def _at(spec: Any, path: Path) -> Any:
    for part in path:
        spec = spec[part]
    return spec


def _changed(base: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(json.dumps(base))  # no part of it is another's
    parent = _at(spec, path[:-1])
    if value is REMOVED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return spec


def _other_values(name: str, schema: Schema, now: Any) -> list[Any]:
    """Valid values but the present one."""
    if name in OTHER:
        return OTHER[name]
    if "enum" in schema:
        found = schema["enum"]
    elif "x-kubernetes-int-or-string" in schema:
        found = [3, "4"]
    elif "properties" in schema:
        found = []
    else:
        found = _OTHER[schema["type"]](schema, now)
    return [each for each in found if each != now]


def _numbers(schema: Schema, now: Any) -> list[Any]:
    found = {
        min(now + 1, schema.get("maximum", now + 1)),
        *(schema.get(bound, now) for bound in ("minimum", "maximum")),
    }
    return sorted(found)


def _texts(schema: Schema, now: Any) -> list[Any]:
    text = f"{now}2"
    return [text] if len(text) <= schema["maxLength"] else []


def _lists(_: Schema, now: Any) -> list[Any]:
    last = now[-1]
    return [[*now, {**last, "name": "other"} if isinstance(last, dict) and "name" in last else last]]


def _maps(_: Schema, now: Any) -> list[Any]:
    return [{**now, "other": "b"}, {}]


_OTHER = {
    "boolean": lambda _, now: [not now],
    "integer": _numbers,
    "number": _numbers,
    "string": _texts,
    "array": _lists,
    "object": _maps,
}


def _invalid_values(schema: Schema, now: Any, *, required: bool) -> list[Any]:
    """Values that the schema doesn't allow."""
    kind = "quantity" if "x-kubernetes-int-or-string" in schema else schema["type"]
    found: list[Any] = [{"string": 7, "quantity": True}.get(kind, WISHFUL), *([REMOVED] if required else [])]
    if kind == "integer":
        found.append(1.5)
    found += [schema["minimum"] - 1] if "minimum" in schema else []
    found += [schema["maximum"] + 1] if "maximum" in schema else []
    found += ["x" * (schema["maxLength"] + 1)] if "maxLength" in schema else []
    found += [""] if "minLength" in schema else []
    found += [WISHFUL] if "pattern" in schema or "enum" in schema else []
    found += [[now[0]] * (schema["maxItems"] + 1)] if "maxItems" in schema else []
    if "maxProperties" in schema:
        found.append({f"k{number}": next(iter(now.values())) for number in range(schema["maxProperties"] + 1)})
    if "properties" in schema:
        found.append({**now, "colour": "red"})
    return found


def _step(name: str, base: dict[str, Any], path: Path, value: Any, rule: str = "") -> Step:
    text = value if value is REMOVED else f"= {value!r}"
    return Step(name=f"{name} {text[:60]}", spec=_changed(base, path, value), path=path, rule=rule)


_SAME_AS_BEFORE = r"(?:has\(self\.\w+\) == has\(oldSelf\.\w+\) && .* \|\| )?self\.(\w+) == oldSelf\.\1\)?"


def _fixed_names(schema: Schema) -> set[str]:
    """Fields that can't change while a job exists, by their rules."""
    found = set()
    for name, part, _ in [("", schema, True), *_schemas(schema, "")]:
        for rule in part.get("x-kubernetes-validations", ()):
            same = re.fullmatch(_SAME_AS_BEFORE, rule["rule"])
            found |= {f"{name}.{same[1]}".removeprefix(".")} if same else set()
    return found


def fields(schema: Schema | None = None) -> Iterator[Field]:
    """Every field of the spec with its steps."""
    schema = schema or spec_schema()
    fixed_names = _fixed_names(schema)
    for name, part, required in _schemas(schema, ""):
        base = EVERYTHING | INSTEAD.get(name, {})
        path = _first_place(base, re.findall(r"\[\]|\{\}|\w+", name))
        assert path is not None, f"spec.{name} is not in EVERYTHING: set it in _GIVEN, so that the walk covers it"
        now = _at(base, path)
        broken = [(value, rule) for field, value, rule in BROKEN_RULES if field == name]
        others = [each for each in _other_values(name, part, now) if each not in [value for value, _ in broken]]
        assert others or "properties" in part, f"spec.{name} has no other valid value: add one to OTHER"
        is_default = "default" in part and now == part["default"]  # its removal changes nothing
        if not (required or is_default) and REMOVED not in [value for value, _ in broken]:
            others.append(REMOVED)
        steps = tuple(_step(name, base, path, value) for value in others)
        yield Field(
            name=name,
            base=base,
            valid=() if name in fixed_names else steps,
            fixed=steps if name in fixed_names else (),
            refused=tuple(_step(name, base, path, value) for value in _invalid_values(part, now, required=required)),
            breaking=tuple(_step(name, base, path, value, rule) for value, rule in broken),
        )
