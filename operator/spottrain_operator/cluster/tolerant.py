"""Reads what a newer version of the API may have written, and keeps what only that version understands."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spottrain_api.v1alpha1 import Condition, GenerationStatus, TrainingJobStatus
from spottrain_operator.cluster.client import Manifest

_M = TypeVar("_M", bound=BaseModel)
Path = tuple[int | str, ...]


def read_known(model: type[_M], content: Manifest) -> tuple[_M, tuple[Path, ...]]:
    """Parse `content` without the fields and values that `model` doesn't know. Their defaults apply.

    Returns:
        The model, and the paths of what is left out. An object that lacks a required field then is left out, too.

    Raises:
        ValidationError: A required field of `model` itself can't be read.
    """
    left_out: list[Path] = []
    while True:
        try:
            return model.model_validate(content), tuple(sorted(left_out, key=str))
        except ValidationError as error:
            # The last one first, so that earlier items of the same list keep their numbers.
            last = error.errors(include_url=False)[-1]
            path = last["loc"][:-1] if last["type"] == "missing" else last["loc"]
            content = copy.deepcopy(content)
            if not path or not _remove(content, path):
                raise
            if not any(known[: len(path)] == path for known in left_out):
                left_out.append(last["loc"])


def _remove(content: Any, path: Path) -> bool:
    """Remove what lies at `path`. Returns whether there was anything."""
    try:
        for part in path[:-1]:
            content = content[part]
        del content[path[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def dotted(path: Path) -> str:
    """A path as people write it: pools[0].name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def as_written(status: TrainingJobStatus, before: TrainingJobStatus, found: Manifest) -> Manifest:
    """`status` as JSON, with what a newer operator wrote into `found` and this one doesn't know.

    A part that hasn't changed since it was read as `before` stays as it was found. In a changed part, unknown fields
    stay at the top level, and in a generation that is still the same. Elsewhere they would describe something else.
    """
    written = _kept(TrainingJobStatus, status.to_dict(), before.to_dict(), found)
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
    """The status as it was `found`, with this condition. Its transition time stays if its truth does."""
    others = [each for each in found.get("conditions") or () if each.get("type") != condition.type]
    old: Manifest = next((each for each in found.get("conditions") or () if each.get("type") == condition.type), {})
    new = condition.to_dict()
    if old.get("status") == condition.status:
        new["lastTransitionTime"] = old["lastTransitionTime"]
    return found | {"conditions": sorted([*others, new], key=lambda each: str(each.get("type")))}
