"""What the images install: all that their code imports, whichever strategy the job asks for."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"spottrain_api", "spottrain_operator", "spottrain_watcher", "spottrain", "spottrain_agent"}
# The user's image adds these, if the script uses them.
ADAPTERS = {"transformers", "accelerate", "lightning", "peft"}


@pytest.mark.parametrize(
    ("dockerfile", "folders"),
    [
        ("Dockerfile", ["operator/spottrain_api", "operator/spottrain_operator", "operator/spottrain_watcher"]),
        (
            "trainer-image/Dockerfile",
            ["operator/spottrain_api", "trainer-image/spottrain", "trainer-image/spottrain_agent"],
        ),
    ],
)
def test_an_image_has_what_its_code_imports(dockerfile: str, folders: list[str]) -> None:
    [extras] = re.findall(r'"\.\[([a-z,]+)\]"', (ROOT / dockerfile).read_text())
    installed = closure(extras.split(","))
    of_module = packages_distributions()
    missing = {
        module
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for module in imports(path) - OURS - ADAPTERS - set(sys.stdlib_module_names)
        if not {canonicalize_name(name) for name in of_module.get(module, ())} & installed
    }
    assert missing == set()


def imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it and also by importlib, by the first part of their names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names}
            case (
                ast.ImportFrom(module=str(name), level=0)
                | ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))])
            ):
                found.add(name.split(".")[0])
    return found


def closure(extras: list[str]) -> set[NormalizedName]:
    """The distributions that pip installs for these extras of ours, with what they require in turn."""
    own = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    to_see, seen = [Requirement(line) for line in own], set()
    while to_see:
        requirement = to_see.pop()
        name = canonicalize_name(requirement.name)
        if name not in seen:
            seen.add(name)
            further = (Requirement(line) for line in requires(name) or ())
            to_see += [each for each in further if each.marker is None or each.marker.evaluate({"extra": ""})]
    return seen
