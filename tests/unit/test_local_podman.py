"""Whether podman works on this machine, and what is said if it does not."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from spottrain_local.binaries import CONTROL_PLANE
from spottrain_local.cli import local
from spottrain_local.cluster import Cluster
from spottrain_local.layout import ClusterLayout, LocalClusterError
from spottrain_local.podman import check_podman, last_line
from spottrain_local.spec import DEFAULT_SPEC, ClusterSpec, NodePool


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize(
    ("present", "sentence"),
    [((), "needs `podman`, which is not installed"), (("podman",), "needs `ip`.*package iproute2")],
)
def test_a_missing_tool_is_named(tools: Path, tmp_path: Path, present: tuple[str, ...], sentence: str) -> None:
    for name in present:
        tool(tools, name, "exit 0")
    with pytest.raises(LocalClusterError, match=sentence):
        check_podman(Path("/probe"), tmp_path)


def test_podmans_complaint_is_passed_on(tools: Path, tmp_path: Path) -> None:
    tool(tools, "ip", "exit 0")
    tool(tools, "podman", "echo first >&2; echo Error: limits cannot be set >&2; exit 125")
    # Without root it gets no further than that.
    sentence = "limits cannot be set. docs" if os.geteuid() == 0 else "needs root"
    with pytest.raises(LocalClusterError, match=sentence):
        check_podman(Path("/probe"), tmp_path)
    assert list(tmp_path.iterdir()) == [tools]


def test_the_operators_image_is_missed_before_anything_starts(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tools, "ip", "exit 0")
    tool(tools, "podman", '[ "$1" = run ]')
    for program in CONTROL_PLANE:
        tool(tools, program, "exit 0")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tools))
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", str(tmp_path / "home"))
    said = CliRunner().invoke(local, ["up", "--runtime", "podman"])
    assert said.exit_code == 1
    # Without root it gets no further than that.
    assert ("podman has no image" if os.geteuid() == 0 else "needs root") in said.output
    assert not list(tmp_path.glob("home/default/*"))


@pytest.mark.parametrize(
    ("printed", "line"),
    [("Error: no such image\n", "no such image"), ("a\nb\n", "b"), ("", "it printed nothing")],
)
def test_the_last_line_is_what_counts(printed: str, line: str) -> None:
    assert last_line(printed) == line


def test_a_cluster_keeps_its_runtime_until_another_is_named(tmp_path: Path) -> None:
    cluster = Cluster(layout=ClusterLayout(root=tmp_path))
    own = ClusterSpec(nodes=[NodePool(name="a")])
    assert cluster.with_choices(None) is None
    assert cluster.with_choices(own) == own
    assert cluster.with_choices(None, runtime="podman") == DEFAULT_SPEC.model_copy(update={"runtime": "podman"})
    cluster.layout.spec.write_text(own.model_copy(update={"runtime": "podman"}).model_dump_json(by_alias=True))
    assert cluster.with_choices(None, runtime="process") == own
