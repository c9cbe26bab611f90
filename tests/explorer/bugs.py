"""Seeded bugs: patches of the real code, each of which the explorer has to find.

The packages are copied to a folder of their own, and patched there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "bugs"
PACKAGES = (
    "api/spottrain_api",
    "planner/spottrain_planner",
    "runtime/spottrain_runtime",
    "operator/spottrain_operator",
    "trainer-image/spottrain",
    "trainer-image/spottrain_agent",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug, as a patch.

    The patch's first line says what is wrong, and its second line in which world that shows.
    """

    name: str
    what: str
    world: str
    patch: Path

    @classmethod
    def read(cls, patch: Path) -> Bug:
        what, world, *_ = patch.read_text().splitlines()
        return cls(name=patch.stem, what=what, world=world.removeprefix("World: "), patch=patch)


def seeded() -> list[Bug]:
    """All of them, in order of name."""
    return [Bug.read(patch) for patch in sorted(FOLDER.glob("*.patch"))]


def patched(bug: Bug, folder: Path) -> list[Path]:
    """Copy the packages to `folder` with the bug in them.

    Returns the folders to import from.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(bug.patch)], cwd=folder, check=True)
    return [folder / name for name in dict.fromkeys(package.partition("/")[0] for package in PACKAGES)]


def hunt(bug: Bug, *, max_states: int = 400_000) -> tuple[bool, str]:
    """Explore the bug's world with the patched code.

    Returns whether a problem was found, and what was printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = map(str, [*patched(bug, Path(folder)), ROOT / "tests"])
        ended = subprocess.run(
            [sys.executable, "-m", "explorer", bug.world, "--max-states", str(max_states)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode not in (0, 1):
        raise RuntimeError(ended.stderr)
    return ended.returncode == 1, ended.stdout
