"""Reading of objects that a newer version of the API may have written."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from spottrain_api.tolerant import dotted, read_known


class Part(BaseModel):
    kind: int
    size: int = 0


class Item(BaseModel):
    name: str
    part: Part
    parts: tuple[Part, ...] = ()


class Known(BaseModel):
    title: str = ""
    items: tuple[Item, ...] = ()


def item(name: str, kind: object = 1, **more: object) -> dict[str, Any]:
    return {"name": name, "part": {"kind": kind, **more}}


def test_what_is_left_out_is_named_by_the_numbers_of_the_content() -> None:
    parts = [{"kind": "x"}, {"kind": 1}, {}, "x"]
    content = {
        "title": 3,
        "items": [
            item("a"),
            item("b", size="x"),
            item("c", kind="x"),
            {"name": "d"},
            "e",
            item("f") | {"parts": parts},
        ],
    }
    model, left_out = read_known(Known, content)
    assert [each.name for each in model.items] == ["a", "b", "f"]
    assert model.items[2].parts == (Part(kind=1),)
    assert sorted(map(dotted, left_out)) == [
        *("items[1].part.size", "items[2].part.kind", "items[3].part", "items[4]"),
        *("items[5].parts[0].kind", "items[5].parts[2].kind", "items[5].parts[3]", "title"),
    ]


def test_many_items_of_an_unknown_kind_are_read_in_a_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[object] = []
    read = Known.model_validate

    def counted(content: object) -> Known:
        passes.append(content)
        return read(content)

    monkeypatch.setattr(Known, "model_validate", counted)
    model, left_out = read_known(Known, {"items": [item(str(number), kind="x") for number in range(512)]})
    assert (model.items, len(left_out)) == ((), 512)
    assert len(passes) < 10
