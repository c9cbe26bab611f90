"""Helm installs, upgrades, rolls back and uninstalls the operator.

Jobs train meanwhile, and lose no step: on nodes that run processes, and on nodes that run containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_fixtures import processes_of, throw_away_cluster, wait_for
from container_fixtures import containers
from e2e.rehearsal import Rehearsal, command_lines, manifest, rehearsal
from helm_release import HelmRelease
from spottrain_api import crd
from spottrain_api.contract import LABEL_JOB, LABEL_LEADER
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NODES = ClusterSpec(
    nodes=[
        NodePool(name="system", gpus=0),
        NodePool(name="on-demand", count=2),
        NodePool(name="spot", capacity_type="spot"),
    ]
)
ONE_NODE: dict[str, Any] = {
    "nodes": {"min": 1, "max": 1},
    "capacity": {"onDemand": {"min": 1, "max": 1}, "spot": {"max": 0}},
}
TWO_NODES: dict[str, Any] = {
    "nodes": {"min": 2, "max": 2},
    "capacity": {"onDemand": {"min": 1, "max": 1}, "spot": {"max": 1}},
}
MORE_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A release, and where jobs find their image and leave their records."""

    release: HelmRelease
    image: str
    folder: Path


@pytest.fixture(params=["process", pytest.param("podman", marks=pytest.mark.containers)])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Installed]:
    image, folder = "local/trainer", tmp_path
    if request.param == "podman":
        request.getfixturevalue("operator_image")
        image, folder = request.getfixturevalue("trainer_image"), request.getfixturevalue("shared_folder")
    nodes = NODES.model_copy(update={"runtime": request.param})
    with throw_away_cluster(tmp_path / "cluster", nodes) as cluster:
        release = HelmRelease(cluster=cluster, folder=tmp_path)
        notes = release(*release.upgrade("--set", "operator.logLevel=WARNING", "--wait", "--timeout", "90s"))
        assert "Missing in this cluster" not in notes
        yield Installed(release=release, image=image, folder=folder)


def test_jobs_train_through_the_life_of_a_release(installed: Installed) -> None:
    release, image, folder = installed.release, installed.image, installed.folder
    with rehearsal(release.cluster, "kept", folder / "kept", members=2, image=image, **TWO_NODES) as job:
        with_deleted_job(release, job, folder / "deleted", image)
        pods, generation = pod_uids(job), job.generation().number

        two = ("--set", "operator.logLevel=DEBUG", "--set", "operator.replicas=2")
        release(*release.upgrade(*two, "--wait", "--timeout", "90s"))
        wait_for(lambda: operators(release) == ["DEBUG", "DEBUG"], "two new operators run", 60)
        wait_for(lambda: len(leaders(release)) == 1, "the Service finds one of them")
        wait_until_followed(job)
        [leader] = leaders(release)
        release.kubectl("delete", "pod", leader, "-n", release.namespace, "--wait=false")
        wait_for(lambda: leaders(release) not in ([], [leader]), "the other one leads, and the Service finds it", 60)
        wait_until_followed(job)

        release("rollback", release.name, "1")
        wait_for(lambda: operators(release) == ["WARNING"], "the first release's operator runs", 60)
        wait_until_followed(job)

        assert running_parts(release)
        release("uninstall", release.name, "--wait")
        wait_for(lambda: not running_parts(release), "no operator and no watcher is left")
        wait_until_trained(job)
        assert release.kubectl("get", "crd", crd.NAME, "-o", "name").strip().endswith(crd.NAME)
        # Nothing holds a job back: no finalizer waits for an operator that is gone.
        release.kubectl("delete", "tj", "deleted", "--timeout=30s")
        wait_for(lambda: not release.kubectl.list("pod", labels=f"{LABEL_JOB}=deleted"), "its pods go", 60)

        release(*release.upgrade("--wait", "--timeout", "90s"))
        wait_until_followed(job)
        assert (pod_uids(job), job.generation().number) == (pods, generation)
        status = job.finish()
        assert (status.failures, status.steps_redone, job.audit().num_redone) == (0, 0, 0)


def with_deleted_job(release: HelmRelease, job: Rehearsal, folder: Path, image: str) -> None:
    """Start the job that is deleted while there is no operator."""
    spec = manifest("deleted", folder, image=image, **ONE_NODE)
    release.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(spec))
    other = Rehearsal(cluster=job.cluster, name="deleted", folder=folder)
    other.wait_for_nodes(1)


def pod_uids(job: Rehearsal) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.kubectl.list("pod", labels=f"{LABEL_JOB}={job.name}")}


def operators(release: HelmRelease) -> list[str]:
    """The log level of each operator that runs, once one of them is ready."""
    pods = release.kubectl.list("pod", release.namespace, "app.kubernetes.io/component=operator")
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    ready = {each["status"] for pod in running for each in pod["status"]["conditions"] if each["type"] == "Ready"}
    env = [{v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]} for pod in running]
    return [str(each["SPOTTRAIN_LOG_LEVEL"]) for each in env] if "True" in ready else []


def leaders(release: HelmRelease) -> list[str]:
    """The operator's ready pods that the Service selects."""
    pods = release.kubectl.list("pod", release.namespace, f"app.kubernetes.io/component=operator,{LABEL_LEADER}=true")
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    conditions = {p["metadata"]["name"]: p["status"].get("conditions", []) for p in alive}
    return [
        name for name, each in conditions.items() if any(c["type"] == "Ready" and c["status"] == "True" for c in each)
    ]


def running_parts(release: HelmRelease) -> list[str]:
    """Operators and watchers that run: commands of processes, or names of containers."""
    cluster = release.cluster
    if cluster.spec().runtime == "podman":
        names = containers(cluster, show="{{.Names}}")
        return [name for name in names if {"operator", "watcher"} & set(name.split("."))]
    lines = command_lines(processes_of(cluster.layout.root))
    return [" ".join(line) for line in lines if {"spottrain_operator", "spottrain_watcher"} & set(line)]


def wait_until_trained(job: Rehearsal) -> None:
    """Until the ranks themselves have recorded more steps."""
    before = max(record.step for record in job.records())
    wait_for(lambda: max(record.step for record in job.records()) > before + MORE_STEPS, "the ranks train on", 60)


def wait_until_followed(job: Rehearsal) -> None:
    """Until the operator has seen steps that were made from now on."""
    newest = max(record.step for record in job.records())
    job.wait(f"the status is past step {newest}", lambda: job.status().progress.step > newest)
