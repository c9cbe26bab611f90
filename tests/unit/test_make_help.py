"""`make help` shows every target, with the files that the Makefile includes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_target_is_shown_with_its_whole_description() -> None:
    described = re.findall(r"^([a-z-]+):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [re.fullmatch(r"  make ([a-z-]+) +(.*)", line) for line in shown.splitlines()]
    assert len(described) > 30
    assert [line and line.groups() for line in lines] == described
