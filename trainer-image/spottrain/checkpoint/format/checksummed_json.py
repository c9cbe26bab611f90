"""JSON with its own checksum. A reader trusts HEAD and manifests only if they are what was written."""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import BaseModel

_MARK = b',"sha256":"'
_END = b'"}'


class ChecksumMismatch(ValueError):
    """The bytes are not those that were written."""


def dump_checksummed(model: BaseModel, *, indent: int | None = None, exclude: Any = None) -> bytes:
    """The JSON object of a model, with the SHA-256 of all that precedes it as the last field.

    Args:
        model: What to write.
        indent: Spaces of indentation, as pydantic's `model_dump_json` takes them.
        exclude: Fields to leave out, as pydantic takes them.
    """
    text = model.model_dump_json(indent=indent, exclude=exclude).encode().removesuffix(b"}")
    return text + _MARK + _digest(text) + _END


def verify_checksummed(data: bytes) -> bytes:
    """The JSON without its checksum. JSON without one, as a later format may be, is returned as it is.

    Raises:
        ChecksumMismatch: The bytes are not those that were written.
    """
    text, mark, digest = data.rpartition(_MARK)
    if not mark:
        return data
    if digest != _digest(text) + _END:
        raise ChecksumMismatch("its checksum differs")
    return text + b"}"


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
