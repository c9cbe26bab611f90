"""JSON that carries its own checksum: what HEAD and manifests say is believed only if it is what was written."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import BaseModel

_MARK = b',"sha256":"'
_END = b'"}'


class BrokenSeal(ValueError):
    """The bytes are not those that were sealed."""


def seal(model: BaseModel, *, indent: int | None = None, exclude: Any = None) -> bytes:
    """The JSON object of a model, without what pydantic is to `exclude`, with the SHA-256 of all before it as its
    last field."""
    body = model.model_dump_json(indent=indent, exclude=exclude).encode().removesuffix(b"}")
    return body + _MARK + _digest(body) + _END


def unseal(data: bytes) -> bytes:
    """The JSON that was sealed; raises BrokenSeal. What was never sealed is returned as it is."""
    body, mark, digest = data.rpartition(_MARK)
    if not mark:
        return data
    if digest != _digest(body) + _END:
        raise BrokenSeal("its checksum differs")
    return body + b"}"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
