"""Reads the API server's JSON, however deeply a user has nested it."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

# Parsers refuse deeper texts, some two hundred levels. What a user can nest that deeply, the operator refuses anyway.
_LEVELS = 150
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)


def parsed(text: bytes) -> Any:
    """The value of a JSON text. Null stands for what is nested too deeply.

    Otherwise, one such job would hide all others of its list.

    Raises:
        ValueError: It is no JSON.
    """
    try:
        return from_json(text)
    except ValueError:
        return from_json(_cut(text))


def _cut(text: bytes) -> bytes:
    kept, begin, level = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in (b"{", b"["):
            level += 1
            if level == _LEVELS + 1:
                kept.append(text[begin : token.start()] + b"null")
        elif token[0] in (b"}", b"]"):
            if level == _LEVELS + 1:
                begin = token.end()
            level -= 1
    return b"".join((*kept, text[begin:]))
