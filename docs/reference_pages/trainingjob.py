"""Every field of a TrainingJob, from the schema that the API server applies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spottrain_api.crd import structural_schema
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import PRINTER_COLUMNS, TrainingJobStatus

from .markdown import code, entry, table

Schema = dict[str, Any]


def spec() -> str:
    """The spec's objects, one after the other."""
    return "\n".join(sections("spec", structural_schema(TrainingJobSpec)))


def status() -> str:
    """The status's objects, one after the other."""
    return "\n".join(sections("status", structural_schema(TrainingJobStatus)))


def printer_columns() -> str:
    """What `kubectl get tj` shows."""
    rows = [
        (name, code(path.removeprefix(".")), "`kubectl get tj -o wide`" if priority else "`kubectl get tj`")
        for name, _, path, priority in PRINTER_COLUMNS
    ]
    return table(("Column", "Field", "Shown by"), rows)


def field_paths(path: str, schema: Schema) -> Iterator[str]:
    """The path of every field below `path`, as the pages write it."""
    for name, each in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        suffix, inner = _inner(each)
        yield from field_paths(f"{path}.{name}{suffix}", inner)


def anchor(path: str) -> str:
    """The target by which other pages link to a field."""
    return path.replace("[]", "").replace(".", "-").lower()


def object_anchor(path: str) -> str:
    """The target of an object's section."""
    return f"{anchor(path)}-fields"


def sections(path: str, schema: Schema) -> Iterator[str]:
    """A section for the object at `path`, then one for each object inside it.

    A section shows the object's fields and rules.
    """
    fields = schema["properties"]
    yield f"({object_anchor(path)})="
    yield f"## {code(path)}\n"
    if schema.get("description"):
        yield f"{schema['description']}\n"
    for name, each in fields.items():
        yield _field(f"{path}.{name}", name, each, required=name in schema.get("required", ()))
    rules = schema.get("x-kubernetes-validations", ())
    if rules:
        yield "Refused at `kubectl apply` unless each of these holds:\n"
        yield table(("Rule", "Message"), ((code(rule["rule"]), rule["message"]) for rule in rules))
    for name, each in fields.items():
        suffix, inner = _inner(each)
        if inner.get("properties"):
            yield from sections(f"{path}.{name}{suffix}", inner)


def _field(path: str, name: str, schema: Schema, *, required: bool) -> str:
    facts = (_type(schema), "required" if required else _default(schema), *_limits(schema))
    suffix, inner = _inner(schema)
    text = schema.get("description", "")
    for rule in _value(schema).get("x-kubernetes-validations", ()):
        text += f" Other values are refused: {rule['message']}."
    if inner.get("properties"):
        text += f" Fields: [{path}{suffix}](#{object_anchor(path)})."
    return entry(name, text, *facts, anchor=anchor(path))


def _inner(schema: Schema) -> tuple[str, Schema]:
    """What a list or a map holds, and how its path says so."""
    if "items" in schema:
        return "[]", schema["items"]
    return "", schema


def _value(schema: Schema) -> Schema:
    """The schema of a field's values, which are no objects; empty if they are."""
    value = schema.get("additionalProperties", schema)
    return {} if value.get("type") == "object" else value


def _type(schema: Schema) -> str:
    if "items" in schema:
        return f"list of {_plural(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_plural(schema['additionalProperties'])}"
    if schema.get("format") == "date-time":
        return "time (RFC 3339)"
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    return str(schema.get("type", "any"))


def _plural(schema: Schema) -> str:
    name = _type(schema)
    return name if name.startswith("time") else " or ".join(f"{each}s" for each in name.split(" or "))


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return "optional"
    if schema["default"] == {}:
        return ""  # of an object: those of its fields
    return f"default {code(json.dumps(schema['default']).strip(chr(34)) or json.dumps(''))}"


def _limits(schema: Schema) -> Iterator[str]:
    if "enum" in schema:
        yield "one of " + ", ".join(code(each) for each in schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"{low:g} to {high:g}"
    elif low is not None:
        yield f"at least {low:g}"
    elif high is not None:
        yield f"at most {high:g}"
    if schema.get("minLength"):
        yield "not empty"
    if "maxLength" in schema:
        yield f"at most {schema['maxLength']} characters"
    if "maxItems" in schema:
        yield f"at most {schema['maxItems']}"
    if "pattern" in schema:
        yield f"matches {code(schema['pattern'])}"
