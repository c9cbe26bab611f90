"""Documents that every machine has: the definitions in Python's standard library, read file by file."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Definitions:
    """One pass through the files of one stream, in an order of its own.

    Items are the bytes of functions and classes. It has a state, which commits hold.
    """

    def __init__(self, stream: int, number: int, *, streams: int) -> None:
        self._paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[stream::streams]
        random.Random(number).shuffle(self._paths)
        self._file = self._definition = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._file < len(self._paths):
            definitions = self._paths[self._file].read_bytes().split(b"\n\n\n")
            while self._definition < len(definitions):
                self._definition += 1
                yield list(definitions[self._definition - 1])
            self._file, self._definition = self._file + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"file": self._file, "definition": self._definition}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file, self._definition = state["file"], state["definition"]
