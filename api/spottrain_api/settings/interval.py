"""How often to commit between preemptions, parsed once from the user's text."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

AUTO_INTERVAL = "auto"
INTERVAL_PATTERN = rf"^({AUTO_INTERVAL}|[1-9][0-9]*(steps|s|m))$"
_MAX_LENGTH = 16


class Interval(NamedTuple):
    """A number of steps, a time, or as often as pays off, if neither is set.

    Messages and the CRD hold the text. Not a dataclass: pydantic would write its fields as the default in the CRD.

    Attributes:
        text: What the user wrote, such as 50steps, 30s, 5m or auto.
        steps: Steps from one commit to the next.
        seconds: Seconds from one commit to the next.
    """

    text: str = AUTO_INTERVAL
    steps: int | None = None
    seconds: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the user's text. The ValueError for other texts says what to write instead."""
        if re.fullmatch(INTERVAL_PATTERN, text) is None:
            raise ValueError("write auto, or a number with steps, s or m, as in 50steps")
        if text == AUTO_INTERVAL:
            return cls()
        if text.endswith("steps"):
            return cls(text, steps=int(text.removesuffix("steps")))
        return cls(text, seconds=int(text[:-1]) * (60 if text.endswith("m") else 1))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.str_schema(max_length=_MAX_LENGTH)
        return core_schema.no_info_wrap_validator_function(
            lambda value, checked: value if isinstance(value, cls) else cls.parse(checked(value)),
            text,
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=text),
        )
