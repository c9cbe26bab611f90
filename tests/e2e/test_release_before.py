"""This release beside the one before it.

Agents and trainer of the release before run under this operator, and the other way round. Both jobs lose nodes with
notice under either operator, and train through the upgrade between them.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_fixtures import throw_away_cluster
from distribution import ROOT, build_wheel
from e2e.rehearsal import Rehearsal, manifest, rehearsal
from helm_release import HelmRelease
from release_before import RELEASE_BEFORE
from spottrain_local.cluster import Cluster
from spottrain_local.install import chart_folder, local_values
from spottrain_local.spec import ClusterSpec, NodePool

NODES = ClusterSpec(nodes=[NodePool(name="system", gpus=0), NodePool(name="spot", count=3, capacity_type="spot")])
ONE_SPOT_NODE: dict[str, Any] = {
    "nodes": {"min": 1, "max": 1},
    "capacity": {"onDemand": {"min": 0, "max": 0}, "spot": {"max": 1}},
}
NOTICE_SECONDS = 20.0

pytestmark = [pytest.mark.cluster, pytest.mark.history, pytest.mark.nightly, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRelease:
    """The release before: its checkout, and the packages of its wheel."""

    checkout: Path
    packages: Path

    @property
    def chart(self) -> Path:
        return self.checkout / "charts" / "spottrain"

    @property
    def env(self) -> list[dict[str, str]]:
        """The variables with which a process of the local cluster runs that release."""
        return [{"name": "PYTHONPATH", "value": str(self.packages)}]


@pytest.fixture
def before(tmp_path: Path) -> OldRelease:
    archive, checkout, packages = tmp_path / "before.tar", tmp_path / "before", tmp_path / "packages"
    subprocess.run(["git", "archive", f"--output={archive}", RELEASE_BEFORE], cwd=ROOT, check=True)
    checkout.mkdir()
    subprocess.run(["tar", "--extract", f"--file={archive}", f"--directory={checkout}"], check=True)
    with zipfile.ZipFile(build_wheel(checkout, tmp_path / "wheel")) as wheel:
        wheel.extractall(packages)
    return OldRelease(checkout=checkout, packages=packages)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with throw_away_cluster(tmp_path / "cluster", NODES) as cluster:
        yield cluster


def install(
    release: HelmRelease, chart: Path, env: list[dict[str, str]], ports: dict[str, int], *options: str
) -> None:
    selector = local_values(release.cluster.spec(), release.cluster.unused_ip())["nodeSelector"]
    values = {"nodeSelector": selector, "operator": ports | {"env": env}, "watcher": {"env": env}}
    file = release.folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    files = ("--values", str(chart / "values.local.yaml"), "--values", str(file))
    upgrade = ("upgrade", "--install", release.name, str(chart), "--create-namespace", *options)
    release(*upgrade, *files, "--wait", "--timeout", "90s")


def lose_their_nodes(jobs: list[Rehearsal], title: str) -> None:
    jobs[0].bring_back()
    with ExitStack() as incidents:
        for job in jobs:
            incidents.enter_context(job.incident(f"{title}, {job.name}"))
        jobs[0].preempt({node for job in jobs for node in job.wait_for_spot_nodes()}, NOTICE_SECONDS)


def test_jobs_of_both_releases_train_under_the_operators_of_both(
    before: OldRelease, cluster: Cluster, tmp_path: Path
) -> None:
    release = HelmRelease(cluster=cluster, folder=tmp_path)
    ports = local_values(cluster.spec(), cluster.unused_ip())["operator"]
    install(release, before.chart, before.env, {"port": ports["plainPort"]})

    of_before = [*manifest("old", tmp_path / "old")["spec"]["env"], *before.env]
    with (
        rehearsal(cluster, "old", tmp_path / "old", members=1, env=of_before, **ONE_SPOT_NODE) as old,
        rehearsal(cluster, "new", tmp_path / "new", members=1, **ONE_SPOT_NODE) as new,
    ):
        assert "PYTHONPATH" in old.agent_process(old.wait_for_members()[0].pod).environ()
        lose_their_nodes([old, new], "under the operator of the release before")
        generations = [job.generation().number for job in (old, new)]

        # That release had its CRD in crds/, which no release owns.
        install(release, chart_folder(), [], ports, "--take-ownership")
        for job in (old, new):
            wait_until_followed(job)
        assert [job.generation().number for job in (old, new)] == generations
        lose_their_nodes([old, new], "under this operator")

        for job in (old, new):
            (job.folder / "over").touch()
        for job in (old, new):
            status = job.finish()
            assert [each.redone for each in job.evidence] == [0, 0]
            assert (status.failures, status.preemptions, job.audit().num_redone) == (0, 2, 0)


def wait_until_followed(job: Rehearsal) -> None:
    """Until the operator has seen steps that were made from now on."""
    newest = max(record.step for record in job.records())
    job.wait(f"the status is past step {newest}", lambda: job.status().progress.step > newest)
