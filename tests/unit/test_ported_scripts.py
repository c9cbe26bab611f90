"""The table of docs/ports.md says of each script in examples/ports what it needs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ported_scripts import FOLDER, PortedScript

PAGE = Path(__file__).parents[2] / "docs" / "ports.md"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.diff"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_counts_the_lines_of_a_script(name: str) -> None:
    script = PortedScript.of(name)
    rows = re.findall(rf"^\| \[.*\]\(\.\./examples/ports/{name}\.diff\) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.M)
    assert rows == [tuple(map(str, script.added_and_changed))]
    assert script.added_and_changed[0] <= 30


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_python_in_both_forms(name: str) -> None:
    script = PortedScript.of(name)
    assert "spottrain" not in script.plain
    for form in (script.plain, script.ported):
        ast.parse(form)


def test_lines_are_counted_by_place(tmp_path: Path) -> None:
    path = tmp_path / "script.diff"
    path.write_text(" a\n-b\n-c\n+d\n e\n+\n+f\n+g\n-h\n\n-i\n")
    assert PortedScript(path).added_and_changed == (1, 2)
    assert PortedScript(path).plain.split() == ["a", "b", "c", "e", "h", "i"]
    assert PortedScript(path).ported.split() == ["a", "d", "e", "f", "g"]
