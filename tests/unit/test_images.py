"""The images: the commands in the docs build and push what the chart asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from rendered_objects import objects_in
from spottrain_local.install import find_helm, operator_image

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
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", REHEARSED + commands_of(document)],
        cwd=ROOT,
        env=os.environ | {"HELM": find_helm()},
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
    objects = objects_in("\n".join(rendered))
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Deployment", "DaemonSet")]
    assert {container["image"] for pod in pods for container in pod["containers"]} == {built[0]}
    assert built[0].endswith(f"/spottrain-operator:{PROJECT['version']}")


def test_the_version_is_the_same_everywhere() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "spottrain" / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    tags = re.findall(r"spottrain-(?:operator|trainer):([0-9]\S*[0-9])", (ROOT / "README.md").read_text())
    assert set(tags) == {PROJECT["version"]}


def test_the_operators_image_can_be_built_alone() -> None:
    command = ["make", "--dry-run", "image-operator", "BUILDER=podman", "REGISTRY=localhost"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.findall(r" build -t (\S+) ", printed) == [operator_image()]


def test_helm_may_be_in_a_folder_with_a_space_in_its_name() -> None:
    uses = re.findall(r".\$\$\(\$\(BIN\)/python [^)]* helm\).", (ROOT / "Makefile").read_text())
    assert len(uses) == 2
    assert all(use[0] == use[-1] == '"' for use in uses)


def test_images_are_built_before_they_are_pushed() -> None:
    command = ["make", "--dry-run", "push", "images", "BUILDER=docker", "REGISTRY=r"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.findall(r"^docker (\w+) ", printed, re.MULTILINE) == ["build", "build", "push", "push"]


@pytest.mark.parametrize("target", ["images", "image-operator"])
def test_make_images_says_that_it_needs_a_registry(target: str) -> None:
    done = subprocess.run(
        ["make", target, "BUILDER=docker", "REGISTRY="], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "REGISTRY is not set: make images push REGISTRY=" in done.stderr


@pytest.mark.parametrize(
    ("variant", "tag", "base", "torch"),
    [
        ("", "", "docker.io/library/python:", "cuda"),
        ("cpu", "-cpu", "docker.io/library/python:", "cpu"),
        ("devel", "-devel", "docker.io/nvidia/cuda:", "cuda"),
    ],
)
def test_a_variant_of_the_trainers_image_has_its_tag_base_and_torch(
    variant: str, tag: str, base: str, torch: str
) -> None:
    command = ["make", "--dry-run", "images", "BUILDER=docker", "REGISTRY=r", f"VARIANT={variant}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    [line] = [line for line in printed.replace("\\\n", " ").splitlines() if "trainer-image/Dockerfile" in line]
    assert f" -t r/spottrain-trainer:{PROJECT['version']}{tag} " in line
    assert f" --build-arg BASE={base}" in line
    assert f" --build-arg TORCH={torch} " in line
    assert (ROOT / "requirements" / f"trainer-{torch}.txt").exists()


def test_make_images_refuses_an_unknown_variant() -> None:
    command = ["make", "images", "BUILDER=docker", "REGISTRY=r", "VARIANT=rocm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "VARIANT=rocm is none of: cpu devel" in done.stderr


DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def pin(file: Path, tools: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """Pin the images of a file with a crane that gives this answer."""
    crane = tools / "crane"
    crane.write_text(f'#!/bin/sh\necho "$@" >> {tools}/asked\n{answer}\n')
    crane.chmod(0o755)
    command = [sys.executable, str(ROOT / "release/pin_images.py"), str(file)]
    env = os.environ | {"PATH": str(tools)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_base_images_are_pinned_by_digest() -> None:
    bases = re.findall(r"^\w+_BASE := (.*)$", (ROOT / "release/images.mk").read_text(), re.MULTILINE)
    assert len(bases) == 2
    assert all(re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", base) for base in bases)


def test_the_pins_of_base_images_are_renewed(tmp_path: Path) -> None:
    file = tmp_path / "images.mk"
    shutil.copy(ROOT / "release/images.mk", file)
    for _ in range(2):
        assert pin(file, tmp_path, f"echo {DIGEST}").returncode == 0
    bases = re.findall(r"^\w+_BASE := (.*)$", file.read_text(), re.MULTILINE)
    assert len(bases) == 2
    assert {base.partition("@")[2] for base in bases} == {DIGEST}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [f"digest {base.partition('@')[0]}" for base in bases] * 2


def test_the_pins_are_not_renewed_with_a_tool_that_knows_one_platform_alone(tmp_path: Path) -> None:
    file = tmp_path / "images.mk"
    shutil.copy(ROOT / "release/images.mk", file)
    podman = tmp_path / "podman"
    podman.write_text(f"#!/bin/sh\necho {DIGEST}\n")
    podman.chmod(0o755)
    command = [sys.executable, str(ROOT / "release/pin_images.py"), str(file)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "None of skopeo, crane, docker is on the PATH." in done.stderr) == (1, True)
    assert file.read_text() == (ROOT / "release/images.mk").read_text()


def test_what_a_registry_refuses_leaves_the_pins_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "images.mk"
    shutil.copy(ROOT / "release/images.mk", file)
    done = pin(file, tmp_path, "echo no such manifest >&2; exit 1")
    assert done.returncode == 1
    assert "python:3.11.16-slim: crane got no digest, and images.mk stays as it is: no such manifest" in done.stderr
    assert file.read_text() == (ROOT / "release/images.mk").read_text()
