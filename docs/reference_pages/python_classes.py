"""Attributes of the Python classes that a TrainingJob's spec is made of, too."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel

from spottrain_api.settings.resource import Resource


def add_attributes(app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Add the fields of a model to its docstring, with their descriptions.

    `lines` hold the docstring. The descriptions are those in the spec. Sphinx calls this again for the docstring of
    `__init__`, which is pydantic's own. That one is left out.
    """
    if not (inspect.isclass(documented) and issubclass(documented, Resource)):
        return
    if lines[:1] == (BaseModel.__init__.__doc__ or "").splitlines()[:1]:
        lines.clear()
        return
    fields = documented.model_fields.items()
    lines += ["", "Attributes:", *(f"    {each}: {field.description}" for each, field in fields)]
