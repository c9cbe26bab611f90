"""The distribution in pyproject.toml: its extras and what pip installs for them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build_wheel(checkout: Path, to: Path) -> Path:
    """The wheel of that checkout, or of a part of it."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(to)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [wheel] = to.glob("spottrain-*.whl")
    return wheel


def closure(extras: str) -> set[str]:
    """The distributions that pip installs for these extras of ours.

    What they require in turn is among them.
    """
    to_see = [Requirement(f"{PROJECT['name']}[{extras}]")]
    seen: set[tuple[str, str]] = set()
    while to_see:
        requirement = to_see.pop()
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) not in seen:
                seen.add((name, extra))
                to_see += _required(name, extra)
    return {name for name, _ in seen} - {PROJECT["name"]}


def _required(name: str, extra: str) -> list[Requirement]:
    if name == PROJECT["name"]:
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    else:
        lines = requires(name) or []
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
