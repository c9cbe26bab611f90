"""What all parts of a TrainingJob have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Resource(BaseModel):
    """Base of everything in a TrainingJob: immutable, camelCase, unknown fields refused.

    `cel_rules` are (rule, message) pairs that the API server checks; `self` is the object of that class. A rule
    that names `oldSelf` says what may change after creation.
    """

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="forbid")
    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """As in YAML, without what is unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class FreeForm(Resource):
    """A part of another Kubernetes API, passed through as it is; the API server checks it on the pod."""

    model_config = ConfigDict(
        frozen=True, extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
