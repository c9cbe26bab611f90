"""`make help` shows every target, and others cope with what they find."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_target_is_shown_with_its_whole_description() -> None:
    described = re.findall(r"^([a-z-]+):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = [re.fullmatch(r"  make ([a-z-]+) +(.*)", line) for line in shown.splitlines()]
    assert len(described) > 30
    assert [line and line.groups() for line in lines] == described


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, whose Python only notes what it is to do."""
    folder = tmp_path / "a checkout"
    (folder / "release").mkdir(parents=True)
    for name in ("Makefile", "release/images.mk"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("pyproject.toml", "constraints.txt", "commands"):
        (folder / name).touch()
    program(folder / "python", 'echo "$*" >> commands')
    return folder


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make(checkout: Path, target: str) -> list[str]:
    """The commands of Python that a target runs to make the environment."""
    # The environment exists already, so that nothing is installed.
    program(checkout / ".venv" / "bin" / "pip", "true")
    command = ["make", "--silent", target, "PYTHON=./python"]
    subprocess.run(command, cwd=checkout, capture_output=True, check=True, timeout=60)
    return (checkout / "commands").read_text().splitlines()


@pytest.mark.parametrize("state", ["no python", "no pip", "python 3.10"])
def test_an_environment_of_no_use_is_made_anew(checkout: Path, state: str) -> None:
    if state == "no pip":
        program(checkout / ".venv" / "bin" / "python", f'exec {sys.executable} -S -I "$@"')
    elif state == "python 3.10":
        (checkout / "pip.py").touch()
        (checkout / "sitecustomize.py").write_text("import sys\nsys.version_info = (3, 10, 0)\n")
        program(checkout / ".venv" / "bin" / "python", f'PYTHONPATH=. exec {sys.executable} "$@"')
    assert make(checkout, "env") == ["-m venv --clear .venv"]


def test_an_environment_that_works_is_kept(checkout: Path) -> None:
    (checkout / "pip.py").touch()
    program(checkout / ".venv" / "bin" / "python", f'PYTHONPATH=. exec {sys.executable} "$@"')
    assert make(checkout, "env") == []


def test_the_demo_runs_in_a_folder_whose_name_has_a_space(checkout: Path) -> None:
    program(checkout / ".venv" / "bin" / "python", 'echo "$MPLCONFIGDIR $*" >> commands')
    assert make(checkout, "demo")[-1] == f"{checkout}/.venv/matplotlib -m demo --out demo-out"
