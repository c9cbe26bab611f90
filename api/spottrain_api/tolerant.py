"""Reading of objects that a newer version of the API may have written."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_M = TypeVar("_M", bound=BaseModel)
Path = tuple[int | str, ...]


def read_known(model: type[_M], content: dict[str, Any]) -> tuple[_M, tuple[Path, ...]]:
    """Parse `content` without the fields and values that `model` doesn't know.

    The defaults of these fields apply. An object that then lacks a required field is left out, too.

    Returns:
        The model, and the paths of the parts that were left out.

    Raises:
        ValidationError: A required field of `model` itself can't be read. It names all that is wrong.
    """
    left_out: list[Path] = []
    given: ValidationError | None = None
    while True:
        try:
            return model.model_validate(content), tuple(sorted(left_out, key=str))
        except ValidationError as error:
            given = given or error
            # The last one first, so that earlier items of the same list keep their numbers.
            last = error.errors(include_url=False)[-1]
            path = last["loc"][:-1] if last["type"] == "missing" else last["loc"]
            content = copy.deepcopy(content)
            if not path or not _remove(content, path):
                raise given from None
            if not any(known[: len(path)] == path for known in left_out):
                left_out.append(last["loc"])


def _remove(content: Any, path: Path) -> bool:
    """Remove the value at `path`. Returns whether there was one."""
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
