"""Public scripts in examples/ports: each file is a script, and what changes in it for the library.

A line begins with a blank if it is in both, with - if only the plain script has it, and with + if only the ported one
has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "ports"


@dataclass(frozen=True, slots=True)
class PortedScript:
    """A script of a file, in both forms."""

    path: Path

    @classmethod
    def of(cls, name: str) -> PortedScript:
        return cls(FOLDER / f"{name}.diff")

    @property
    def plain(self) -> str:
        return self._without("+")

    @property
    def ported(self) -> str:
        return self._without("-")

    def _without(self, mark: str) -> str:
        """Lines that are left out become empty, so that a traceback has the numbers of the file."""
        return "\n".join("" if line.startswith(mark) else line[1:] for line in self._lines)

    @property
    def _lines(self) -> list[str]:
        lines = self.path.read_text().splitlines()
        assert all(line[:1] in ("", " ", "+", "-") for line in lines), self.path
        return lines

    @property
    def added_and_changed(self) -> tuple[int, int]:
        """New lines, and those that were replaced. Empty ones and deleted ones don't count."""
        added = changed = 0
        for is_common, lines in groupby(self._lines, key=lambda line: line[:1] in ("", " ")):
            if not is_common:
                marks = [line[0] for line in lines if line[1:].strip()]
                here, before = marks.count("+"), marks.count("-")
                added, changed = added + max(0, here - before), changed + min(here, before)
        return added, changed
