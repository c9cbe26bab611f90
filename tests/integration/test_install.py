"""The wheel beside the torch of an image.

pip neither replaces a vendor's build nor complains about it. It looks in a folder that holds our wheel and stand-ins
of all that it requires. They have the metadata, but no code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from distribution import PROJECT, ROOT, build_wheel, closure

EXTRAS = "trainer,s3,gcs,adapters"
FINAL = "2.15.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A virtual environment, and the folder from which pip installs into it."""

    folder: Path
    index: Path

    def install(self, *requirements: str) -> str:
        """What pip says as it installs these; it succeeds."""
        return self._pip("install", "--no-index", "--find-links", str(self.index), *requirements)

    def versions(self) -> dict[str, str]:
        return {each["name"]: each["version"] for each in json.loads(self._pip("list", "--format=json"))}

    def check(self) -> str:
        return self._pip("check")

    def _pip(self, *arguments: str) -> str:
        pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", str(self.folder)]
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel and what it requires, at the versions of this environment.

    Of torch there is only the final release.
    """
    folder = tmp_path_factory.mktemp("index")
    build_wheel(ROOT, folder)
    for name in closure(EXTRAS) - {"torch"}:
        add_stand_in(folder, distribution(name).read_text("METADATA") or "")
    add_stand_in(folder, torch(FINAL))
    return folder


@pytest.fixture
def image(index: Path, tmp_path: Path) -> Image:
    venv.create(tmp_path / "image", with_pip=False)
    return Image(folder=tmp_path / "image", index=index)


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["2.13.0a0+git", "2.13.0.dev20260801+cu130", "2.14.0a0+5228986c39.nv26.7"])
def test_pip_leaves_a_vendors_torch_alone(version: str, image: Image, tmp_path: Path) -> None:
    image.install(str(add_stand_in(tmp_path, torch(version))))
    image.install(f"spottrain[{EXTRAS}]")
    versions = image.versions()
    assert (versions["torch"], versions["spottrain"]) == (version, PROJECT["version"])
    assert image.check() == "No broken requirements found.\n"


@pytest.mark.nightly
def test_pip_would_replace_a_torch_that_is_too_old(image: Image, tmp_path: Path) -> None:
    image.install(str(add_stand_in(tmp_path, torch("2.12.0a0+git"))))
    image.install("spottrain[trainer]")
    assert image.versions()["torch"] == FINAL


def torch(version: str) -> str:
    return f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"


def add_stand_in(folder: Path, metadata: str) -> Path:
    """Write a wheel of this metadata into the folder; where it is."""
    fields = message_from_string(metadata)
    name = f"{fields['Name'].replace('-', '_').replace('.', '_')}-{fields['Version']}"
    wheel = folder / f"{name}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", metadata)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return wheel
