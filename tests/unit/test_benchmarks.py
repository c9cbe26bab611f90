"""Benchmarks that fail or are interrupted: what they leave, and what they print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks import bench_notice
from benchmarks.recovery import managed

from spottrain_local.layout import LocalClusterError


class FakeCluster:
    """Records what is done with it."""

    kubeconfig = "no kubeconfig"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def up(self, spec: object) -> None:
        self.calls.append("up")

    def down(self, *, delete: bool) -> None:
        self.calls.append("down")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """The cluster that the benchmarks open."""
    found = FakeCluster()
    monkeypatch.setenv("SPOTTRAIN_LOCAL_HOME", "")
    monkeypatch.setattr(managed, "open_cluster", lambda name: found)
    return found


def fail_to_install(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def install(cluster: object) -> None:
        raise error

    monkeypatch.setattr(managed, "install_operator", install)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), LocalClusterError("Helm failed.")], ids=repr)
def test_a_start_that_ends_halfway_takes_the_cluster_down(
    error: BaseException, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_install(monkeypatch, error)
    with pytest.raises(type(error)), managed.managed_job(tmp_path):
        pass
    assert cluster.calls == ["up", "down"]


@pytest.mark.parametrize("error", [TimeoutError("The operator is not ready."), LocalClusterError("Helm failed.")])
def test_a_cluster_that_does_not_start_is_told_in_a_sentence(
    error: Exception,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_to_install(monkeypatch, error)
    monkeypatch.setattr(sys, "argv", ["bench_notice", "--out", str(tmp_path)])
    monkeypatch.setattr(bench_notice, "clean_up_on_sigterm", lambda: None)
    assert bench_notice.main() == 2
    assert capsys.readouterr().err == f"bench_notice: {error}\n"
    assert cluster.calls == ["up", "down"]
