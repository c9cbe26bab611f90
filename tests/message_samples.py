"""A sample of each message between parts, with all of its fields.

`python tests/message_samples.py` prints what a release records in tests/contract/release_before.json.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AwareDatetime, BaseModel

from spottrain_api.contract import AgentReport, Assignment, NoticeList, TrainerConfig

# What one part sends another. What an agent and its own ranks write for each other comes from one image. A relay's
# messages are these with peers: see test_release_before.py.
MESSAGES: tuple[type[BaseModel], ...] = (AgentReport, Assignment, NoticeList, TrainerConfig)
# Values of fields with rules of their own, by model and field. None: left out.
_CHOSEN: dict[str, dict[str, Any]] = {
    "Entrypoint": {"module": None},
    "CheckpointConfig": {"interval": "15s"},
}
_PLAIN: dict[Any, Any] = {bool: True, int: 1, float: 1.5, str: "text", Any: "value"}


def sample(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON of a message with all of its fields."""
    chosen = _CHOSEN.get(model.__name__, {})
    found = {field.alias or name: _value(field.annotation) for name, field in model.model_fields.items()}
    return {name: value for name, value in (found | chosen).items() if value is not None}


def least(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON of a message with the fields alone that it must have."""
    required = {field.alias or name for name, field in model.model_fields.items() if field.is_required()}
    return {name: value for name, value in sample(model).items() if name in required}


def _value(annotation: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0])
    if origin in (Union, types.UnionType):
        return _value(next(each for each in arguments if each is not type(None)))
    if origin is Literal:
        return arguments[0]
    if origin is dict:
        return {"key": _value(arguments[1])}
    if origin in (tuple, list, frozenset):
        return [_value(arguments[0])]
    if annotation is AwareDatetime:
        return datetime(2026, 11, 22, tzinfo=UTC).isoformat()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return sample(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation)).value
    return _PLAIN[annotation]


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    for model in MESSAGES:
        text = model.model_validate(sample(model)).model_dump_json(by_alias=True, exclude_none=True)
        yield model.__name__, {"sample": json.loads(text), "schema": _without_words(model.model_json_schema())}


def _without_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_words(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_words(value)
        for key, value in schema.items()
        if not (key in ("title", "description") and isinstance(value, str))
    }


if __name__ == "__main__":
    print(json.dumps(dict(recorded()), indent=1, sort_keys=True))
