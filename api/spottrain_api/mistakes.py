"""Validation errors of a file that a user wrote, as sentences."""

from __future__ import annotations

from pydantic import ValidationError

from spottrain_api.tolerant import dotted

# By the type of pydantic's error, if its own message doesn't say what to do.
_REMEDIES = {
    "extra_forbidden": "There is no such field; correct its name, or remove it",
    "missing": "This field is required; add it",
    "model_type": "This must be a mapping of fields",
}


def mistakes(error: ValidationError, *within: str) -> str:
    """One sentence for each mistake.

    It has the field's path, which starts with `within`, and says what is wrong.
    """
    sentences = []
    for each in error.errors(include_url=False):
        said = each["msg"].removeprefix("Value error, ")
        sentences.append(f"{dotted((*within, *each['loc']))}: {_REMEDIES.get(each['type'], said)}.")
    return " ".join(sentences)
