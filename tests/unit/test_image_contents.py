"""Each image holds its own code alone, and all that this code imports.

That is true of each strategy that a job may ask for.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.utils import canonicalize_name

from distribution import ROOT, build_wheel, closure

PACKAGES = {
    "Dockerfile": {"spottrain_runtime", "spottrain_api", "spottrain_operator", "spottrain_watcher"},
    "trainer-image/Dockerfile": {
        *("spottrain_runtime", "spottrain_api", "spottrain_planner"),
        *("spottrain", "spottrain_agent"),
    },
}
# The user's image adds these, if the script uses them.
ADAPTERS = {"transformers", "accelerate", "lightning", "peft"}

each_image = pytest.mark.parametrize("dockerfile", PACKAGES)


@each_image
def test_an_image_holds_its_own_code_alone(dockerfile: str, tmp_path: Path) -> None:
    context = tmp_path / "context"
    for source in copied(dockerfile):
        target = context / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target)
        else:
            shutil.copy(ROOT / source, target)
    with ZipFile(build_wheel(context, tmp_path)) as wheel:
        folders = {name.split("/")[0] for name in wheel.namelist()}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == PACKAGES[dockerfile]


@each_image
def test_the_builder_is_sent_what_an_image_copies(dockerfile: str) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [each for each in copied(dockerfile) if not any(Path(each).is_relative_to(path) for path in sent)] == []


def extras_of(dockerfile: str) -> str:
    """The extras of ours that the Dockerfile installs."""
    [extras] = re.findall(r'"\.\[([a-z,-]+)\]"', (ROOT / dockerfile).read_text())
    return str(extras)


def locked(*names: str) -> dict[str, str]:
    """Return the versions in files of requirements/, by package.

    Every package there has hashes.
    """
    blocks = [
        block
        for name in names
        for block in re.split(r"^(?=\S)", (ROOT / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE)
        if block and not block.startswith("#")
    ]
    assert [block for block in blocks if "--hash=sha256:" not in block] == []
    return dict(re.match(r"([\w.-]+)==([\w.]+)", block).groups() for block in blocks)  # type: ignore[union-attr, misc]


REQUIREMENTS = {"Dockerfile": ["operator"], "trainer-image/Dockerfile": ["trainer", "trainer-cuda"]}


@each_image
def test_an_image_has_all_that_its_extras_require_by_hash(dockerfile: str) -> None:
    found = locked(*REQUIREMENTS[dockerfile])
    assert closure(extras_of(dockerfile)) - {canonicalize_name(name) for name in found} == set()


def test_images_have_the_versions_of_the_environment() -> None:
    lines = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins: dict[str, str] = {canonicalize_name(name): version for name, version in lines}
    found = locked("build", "operator", "trainer", "trainer-cuda")
    # Of what other systems need, this environment has nothing.
    elsewhere = {"colorama"}
    assert {name: version for name, version in found.items() if pins.get(name) != version}.keys() <= elsewhere
    [on_cpus] = re.findall(r"^torch==([0-9.]+)", (ROOT / "requirements/trainer-cpu.txt").read_text(), re.MULTILINE)
    assert on_cpus == pins["torch"]


@each_image
def test_an_image_has_what_its_code_imports(dockerfile: str) -> None:
    installed, of_module = closure(extras_of(dockerfile)), packages_distributions()
    missing = {
        module
        for package in copied(dockerfile)
        for path in (ROOT / package).rglob("*.py")
        for module in imports(path) - PACKAGES[dockerfile] - ADAPTERS - set(sys.stdlib_module_names)
        if not {canonicalize_name(name) for name in of_module.get(module, ())} & installed
    }
    assert missing == set()


def copied(dockerfile: str) -> list[str]:
    """What the Dockerfile copies from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / dockerfile).read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()]


def imports(path: Path) -> set[str]:
    """The modules that a file imports, by the first part of their names.

    Imports count anywhere in the file, and also by importlib.
    """
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
