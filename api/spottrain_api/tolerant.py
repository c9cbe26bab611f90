"""Reading of objects that a newer version of the API may have written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
    known: set[Path] = set()
    given: ValidationError | None = None
    while True:
        try:
            return model.model_validate(content), tuple(sorted(left_out, key=str))
        except ValidationError as error:
            given = given or error
            content = copy.deepcopy(content)
            removed: set[Path] = set()
            for path, named in _wrong(error):
                if any(path[:length] in removed for length in range(len(path))):
                    continue
                if not _remove(content, path):
                    raise given from None
                removed.add(path)
                if path not in known:
                    left_out.append(named)
                    known.update(named[:length] for length in range(len(named) + 1))


def _wrong(error: ValidationError) -> Iterator[tuple[Path, Path]]:
    """Paths to remove in one pass, each with the path that is named for it.

    Items of lists wait for a pass in which nothing else is wrong, and the last one comes first. So all items keep
    their numbers until they have been named.
    """
    wrong: dict[Path, Path] = {}
    for each in error.errors(include_url=False):
        wrong[each["loc"][:-1] if each["type"] == "missing" else each["loc"]] = each["loc"]
    others = [path for path in wrong if not path or isinstance(path[-1], str)]
    for path in reversed(others or list(wrong)):
        yield path, wrong[path]


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
