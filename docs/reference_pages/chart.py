"""The chart's values, from the comments in its values.yaml.

A key with a comment above it is one entry, whatever lies below it; a key without one is looked into.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from .markdown import code, entry

FILE = Path(__file__).parents[2] / "charts" / "spottrain" / "values.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    path: str
    default: object
    description: str


def values() -> str:
    """An entry for each."""
    return "\n".join(entry(each.path, each.description, _shown(each.default)) for each in entries(FILE.read_text()))


def entries(text: str) -> Iterator[Value]:
    """Raises ValueError for a value that no comment describes."""
    yield from _entries("", yaml.compose(text), text.splitlines())


def _entries(path: str, node: yaml.Node | None, lines: list[str]) -> Iterator[Value]:
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        inner = f"{path}.{key.value}".removeprefix(".")
        description = _comment_above(key.start_mark.line, lines)
        if description:
            yield Value(path=inner, default=_plain(value), description=description)
        elif isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _entries(inner, value, lines)
        else:
            raise ValueError(f"{FILE.name}: {inner} has no comment that says what it is for")


def _comment_above(line: int, lines: list[str]) -> str:
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        comment.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(comment)


def _plain(node: yaml.Node) -> object:
    return yaml.safe_load(yaml.serialize(node))


def _shown(default: object) -> str:
    text = json.dumps(default)
    return f"default {code(text)}" if len(text) <= 60 else ""
