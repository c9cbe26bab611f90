"""The CRDs come with the release that owns them, and outlive it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster_fixtures import wait_for
from helm_release import HelmRelease, installed, older_chart
from minimal_job import MINIMAL
from spottrain_api import crd
from spottrain_local.cluster import Cluster
from spottrain_local.install import chart_folder

pytestmark = pytest.mark.cluster

# Nothing of the release runs: these tests look at its CRDs.
ASLEEP = ("--set", "operator.replicas=0,watcher.enabled=false")
# Kubernetes keeps a release in a Secret of 1 MiB at most.
HALF_A_SECRET = 512 * 1024


@pytest.fixture(scope="module")
def cluster_release(whole_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HelmRelease]:
    release = HelmRelease(cluster=whole_cluster, folder=tmp_path_factory.mktemp("crds"))
    with installed(release):
        yield release


@pytest.fixture
def release(cluster_release: HelmRelease) -> Iterator[HelmRelease]:
    """An installed release, and a job; none of both is left."""
    release = cluster_release
    install(release)
    job = {
        "apiVersion": "spottrain.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job"},
        "spec": MINIMAL,
    }
    release.kubectl.create(job)
    yield release
    release.run("uninstall", release.name, "--ignore-not-found")
    release.kubectl.delete_definitions(crd.definitions())


def install(release: HelmRelease, *options: str) -> None:
    release(*release.upgrade(*ASLEEP, *options))
    wait_for(lambda: release.kubectl.serves("tj", "tjh"), "the CRDs are served")


def test_an_uninstalled_release_leaves_crds_and_jobs_to_the_next_one(release: HelmRelease) -> None:
    uid = release.kubectl.get("tj", "job")["metadata"]["uid"]
    release("uninstall", release.name)
    install(release)
    assert release.kubectl.get("tj", "job")["metadata"]["uid"] == uid

    release("uninstall", release.name)
    other = replace(release, name="other", namespace="elsewhere")
    refused = other.run(*other.upgrade(*ASLEEP))
    assert refused.returncode != 0
    assert any(f'CustomResourceDefinition "{name}"' in refused.stderr for name in crd.definitions())
    assert 'key "meta.helm.sh/release-name" must equal "other": current value is "spottrain"' in refused.stderr
    install(other, "--take-ownership")
    other("uninstall", other.name)
    assert release.kubectl.get("tj", "job")["metadata"]["uid"] == uid


def test_crds_from_before_they_came_with_the_release_are_taken_over(release: HelmRelease) -> None:
    release("uninstall", release.name)
    for name in crd.definitions():
        release.kubectl("annotate", "crd", name, "meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-")
        release.kubectl("label", "crd", name, "app.kubernetes.io/managed-by-")
    refused = release.run(*release.upgrade(*ASLEEP))
    assert "invalid ownership metadata" in refused.stderr
    install(release, "--take-ownership")
    assert release.kubectl.get("tj", "job")["spec"]["image"] == MINIMAL["image"]


def test_a_rollback_can_leave_the_newer_crds(release: HelmRelease) -> None:
    older = older_chart(release.folder)
    release(*release.upgrade(*ASLEEP, "--set", "crds.enabled=false", chart=older))
    assert release.has_newer_crd()
    release(*release.upgrade(*ASLEEP, chart=older))
    assert not release.has_newer_crd()
    install(release)
    assert release.has_newer_crd()


def test_crds_can_come_without_a_release(release: HelmRelease) -> None:
    release("uninstall", release.name)
    release.kubectl.delete_definitions(crd.definitions())
    install_without = ("--set", "crds.enabled=false")
    notes = release(*release.upgrade(*ASLEEP, *install_without))
    assert f"No CRD {crd.NAME}: the operator waits for it. Set `crds.enabled`, or apply it:" in notes
    [command, *_] = [line.strip() for line in notes.splitlines() if "helm template CHART" in line]
    template, apply = (each.split()[1:] for each in command.replace("CHART", str(chart_folder())).split(" | "))
    release.kubectl(*apply, stdin=release(*template))
    wait_for(lambda: release.kubectl.serves("tj", "tjh"), "the CRDs are served")
    install(release, "--take-ownership")


def test_the_release_has_room_in_its_secret(release: HelmRelease) -> None:
    [secret] = release.kubectl.list("secret", release.namespace, "owner=helm,status=deployed")
    assert len(b64decode(secret["data"]["release"])) < HALF_A_SECRET
