"""The base classes of the models in a TrainingJob."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

# Text that messages, logs and tables show: on one line, and without characters that hide or turn around others.
Line = Annotated[str, Field(pattern=r"^[^\p{Cc}\p{Cf}\p{Zl}\p{Zp}]*$")]
# Longer ones could not be passed to a process: Linux allows 128 KiB for an argument or a variable.
Argument = Annotated[str, Field(max_length=131_000)]


class Resource(BaseModel):
    """Base of everything in a TrainingJob: immutable, with camelCase keys.

    Unknown fields are refused. `cel_rules` are (rule, message) pairs that the API server checks; `self` is the object
    of that class. A rule with `oldSelf` restricts changes after creation.
    """

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="forbid")
    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object as in YAML, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusResource(Resource):
    """Base of the status.

    Unknown fields are ignored, so that an older operator can read a newer status.
    """

    model_config = ConfigDict(extra="ignore")


class FreeForm(Resource):
    """A part of another API, passed through unchanged.

    The API server checks it on the pod.
    """

    model_config = ConfigDict(
        frozen=True, extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
