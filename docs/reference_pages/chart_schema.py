"""The chart's values.schema.json, which Helm checks values against.

Types and bounds are written there by hand. `make schema` copies descriptions and defaults to it, from values.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import chart

FILE = chart.FILE.with_name("values.schema.json")
# Helm passes these to a chart that another one contains: `enabled`, if that is the condition for it.
NOT_OURS = {"global", "enabled"}


class SchemaMismatchError(Exception):
    """values.yaml and values.schema.json disagree.

    The text says where, and what to do.
    """


def completed(schema: dict[str, Any], values: str) -> dict[str, Any]:
    """The schema with descriptions and defaults of the text of values.yaml.

    Raises:
        SchemaMismatchError: A value has no entry, or an entry no value.
    """
    described = {each.path: each for each in chart.entries(values)}
    declared = dict(_entries("", schema, set(described)))
    if missing := sorted(described.keys() - declared.keys()):
        raise SchemaMismatchError(
            f"{FILE.name} has no entry for {', '.join(missing)}: write its type and bounds there"
        )
    if unknown := sorted(declared.keys() - described.keys() - NOT_OURS):
        raise SchemaMismatchError(
            f"values.yaml has no {', '.join(unknown)}: add it with a comment, or remove the entry"
        )
    for path, value in described.items():
        entry = declared[path]
        rules = {key: entry[key] for key in entry if key not in ("description", "default")}
        entry.clear()
        entry |= {"description": value.description} | rules | {"default": value.default}
    return schema


def _entries(path: str, schema: dict[str, Any], described: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and entry of each value.

    An entry that has fields, but no comment in values.yaml, gives the entries of its fields.
    """
    for name, each in schema.get("properties", {}).items():
        inner = f"{path}.{name}".removeprefix(".")
        if inner in described or "properties" not in each:
            yield inner, each
        else:
            yield from _entries(inner, each, described)


def shown(schema: dict[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(schema, indent=2) + "\n"


def main(file: Path = FILE) -> None:
    """Write the file again."""
    try:
        text = shown(completed(json.loads(file.read_text()), chart.FILE.read_text()))
    except SchemaMismatchError as error:
        raise SystemExit(str(error)) from error
    file.write_text(text)


if __name__ == "__main__":
    main()
