"""The images: the commands in the docs build and push what the chart asks for."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from spottrain_local.binaries import find_binaries

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The commands stay as the docs have them: make only says what it would do, and Helm only renders.
REHEARSED = """
make() { command make --dry-run BUILDER=docker "$@" | sed 's/^/- make: /'; }
helm() {
  [ "$1 $2" = "upgrade --install" ] || return 1
  "$HELM" template "${@:3}"
}
"""


def commands_of(document: str) -> str:
    """The shell commands of the document that install the chart."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    [block] = [block for block in blocks if "helm upgrade" in block]
    return str(block)


@pytest.mark.cluster
@pytest.mark.parametrize("document", ["README.md", "charts/spottrain/README.md"])
def test_the_chart_asks_for_the_image_that_the_documents_commands_push(document: str) -> None:
    binaries = find_binaries()
    if binaries is None:
        pytest.fail("Helm is not built: run `make binaries`.")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", REHEARSED + commands_of(document)],
        cwd=ROOT,
        env=os.environ | {"HELM": str(binaries.path("helm"))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    made, rendered = (
        [line for line in done.stdout.splitlines() if line.startswith("- make: ") == is_make]
        for is_make in (True, False)
    )
    built = re.findall(r" build -t (\S+) ", "\n".join(made))
    pushed = re.findall(r" push (\S+)$", "\n".join(made), re.MULTILINE)
    assert len(built) == 2
    assert pushed == built
    objects = [each for each in yaml.safe_load_all("\n".join(rendered)) if each]
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Deployment", "DaemonSet")]
    assert {container["image"] for pod in pods for container in pod["containers"]} == {built[0]}
    assert built[0].endswith(f"/spottrain-operator:{PROJECT['version']}")


def test_the_version_is_the_same_everywhere() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "spottrain" / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    tags = re.findall(r"spottrain-(?:operator|trainer):([0-9]\S*[0-9])", (ROOT / "README.md").read_text())
    assert set(tags) == {PROJECT["version"]}


def test_make_images_says_that_it_needs_a_registry() -> None:
    done = subprocess.run(
        ["make", "images", "BUILDER=docker", "REGISTRY="], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "REGISTRY is not set: make images push REGISTRY=" in done.stderr
