"""Writes back what only a newer operator understands of the status that it left."""

from __future__ import annotations

from pydantic import BaseModel

from spottrain_api.v1alpha1.status import Condition, GenerationStatus, TrainingJobStatus
from spottrain_operator.kube.resources import Manifest


def as_written(status: TrainingJobStatus, before: TrainingJobStatus, found: Manifest) -> Manifest:
    """`status` as JSON, with the fields of a newer operator.

    They are those in `found` that this operator doesn't know. A part that hasn't changed since it was read as
    `before` stays as it was found. In a changed part, unknown fields stay at the top level, and in a generation that
    is still the same. Elsewhere they would describe something else.
    """
    new, read = status.to_dict(), before.to_dict()
    if read == found:
        return new
    written = _kept(TrainingJobStatus, new, read, found)
    generation, known = status.generation, before.generation
    if generation is not None and known is not None and generation.number == known.number:
        written["generation"] = _kept(
            GenerationStatus, generation.to_dict(), known.to_dict(), found.get("generation") or {}
        )
    return written


def _kept(model: type[BaseModel], new: Manifest, before: Manifest, found: Manifest) -> Manifest:
    aliases = {field.alias or name for name, field in model.model_fields.items()}
    unknown = {key: value for key, value in found.items() if key not in aliases}
    unchanged = {key: found[key] for key in new if key in found and new[key] == before.get(key)}
    return unknown | new | unchanged


def with_condition(found: Manifest, condition: Condition) -> Manifest:
    """The status as it was `found`, with this condition.

    Its transition time stays if its truth does.
    """
    others = [each for each in found.get("conditions") or () if each.get("type") != condition.type]
    old: Manifest = next((each for each in found.get("conditions") or () if each.get("type") == condition.type), {})
    new = condition.to_dict()
    if old.get("status") == condition.status:
        new["lastTransitionTime"] = old["lastTransitionTime"]
    return found | {"conditions": sorted([*others, new], key=lambda each: str(each.get("type")))}
