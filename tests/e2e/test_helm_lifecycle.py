"""Helm installs, upgrades, rolls back and uninstalls the CRDs and the operator.

Five jobs train meanwhile, and lose no step: on nodes that run processes, and on nodes that run containers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster_fixtures import processes_of, throw_away_cluster, wait_for
from container_fixtures import containers
from e2e.rehearsal import Rehearsal, command_lines, manifest
from helm_release import NEWER_FIELD, HelmRelease, older_chart
from spottrain_api.contract.names import LABEL_JOB, LABEL_LEADER
from spottrain_cli.main import main
from spottrain_local.spec import ClusterSpec, NodePool

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]

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
# Of the control API. The agents that train get its new address by an annotation of their pods.
OTHER_PORT = 8543


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
        first = ("--set", "operator.logLevel=WARNING", "--wait", "--timeout", "90s")
        notes = release(*release.upgrade(*first, chart=older_chart(tmp_path)))
        assert "Missing in this cluster" not in notes
        assert not release.has_newer_crd()
        yield Installed(release=release, image=image, folder=folder)


def test_five_jobs_train_through_the_life_of_a_release(installed: Installed) -> None:
    release = installed.release
    jobs = started(installed)
    members = [(pod_uids(job), job.generation().number) for job in jobs]

    two = ("--set", "operator.logLevel=DEBUG", "--set", "operator.replicas=2", "--set", f"operator.port={OTHER_PORT}")
    release(*release.upgrade(*two, "--wait", "--timeout", "90s"))
    assert release.has_newer_crd()
    assert OTHER_PORT in ports(release)
    wait_for(lambda: operators(release) == ["DEBUG", "DEBUG"], "two new operators run", 60)
    wait_for(lambda: len(leaders(release)) == 1, "the Service finds one of them")
    wait_until_followed(jobs)
    set_newer_field(jobs[0])
    [leader] = leaders(release)
    release.kubectl("delete", "pod", leader, "-n", release.namespace, "--wait=false")
    wait_for(lambda: leaders(release) not in ([], [leader]), "the other one leads, and the Service finds it", 60)
    wait_until_followed(jobs)

    release("rollback", release.name, "1")
    assert not release.has_newer_crd()
    wait_for(lambda: operators(release) == ["WARNING"], "the first release's operator runs", 60)
    wait_until_followed(jobs)
    assert NEWER_FIELD not in jobs[0].kubectl.get("tj", jobs[0].name)["spec"]["runPolicy"]

    assert running_parts(release)
    release("uninstall", release.name, "--wait")
    wait_for(lambda: not running_parts(release), "no operator and no watcher is left")
    wait_until_trained(jobs)
    kept = {each["metadata"]["name"]: each["metadata"] for each in release.kubectl.list("tj")}
    assert kept.keys() == {job.name for job in jobs}
    assert not any("deletionTimestamp" in each for each in kept.values())
    # Nothing holds a job back: no finalizer waits for an operator that is gone.
    *left, deleted = jobs
    release.kubectl("delete", "tj", deleted.name, "--timeout=30s")
    wait_for(lambda: not pod_uids(deleted), "its pods go", 60)

    release(*release.upgrade("--wait", "--timeout", "90s"))
    wait_until_followed(left)
    # What the older CRD did not know is lost: the operator wrote the job meanwhile.
    assert release.has_newer_crd()
    assert NEWER_FIELD not in jobs[0].kubectl.get("tj", jobs[0].name)["spec"]["runPolicy"]
    assert [(pod_uids(job), job.generation().number) for job in left] == members[:-1]
    for job in left:
        (job.folder / "over").touch()
    for job in left:
        status = job.finish()
        assert (status.failures, status.steps_redone, job.audit().num_redone) == (0, 0, 0), job.name
    for job in jobs:
        assert_commits_are_whole(job)


def started(installed: Installed) -> list[Rehearsal]:
    """Five jobs that train: one of two members, and four of one."""
    sizes = [TWO_NODES, *[ONE_NODE] * 4]
    cluster, folder = installed.release.cluster, installed.folder
    jobs = [Rehearsal(cluster=cluster, name=f"job-{n}", folder=folder / f"job-{n}") for n in range(len(sizes))]
    for job, size in zip(jobs, sizes, strict=True):
        over = str(job.folder / "over")
        entrypoint = {"script": "tests/e2e/jobs/mlp.py", "args": ["--until", over, "--step-seconds", "0.2"]}
        job.apply(manifest(job.name, job.folder, image=installed.image, entrypoint=entrypoint, **size))
    for job, size in zip(jobs, sizes, strict=True):
        job.wait_for_members(size["nodes"]["min"])
    return jobs


def set_newer_field(job: Rehearsal) -> None:
    patch = json.dumps({"spec": {"runPolicy": {NEWER_FIELD: 86_400}}})
    job.kubectl("patch", "tj", job.name, "--type=merge", "-p", patch)
    assert job.kubectl.get("tj", job.name)["spec"]["runPolicy"][NEWER_FIELD] == 86_400


def assert_commits_are_whole(job: Rehearsal) -> None:
    store = job.cluster.running_status()["store"]
    verified = CliRunner(env=store).invoke(main, ["checkpoints", "verify", f"s3://checkpoints/{job.name}"])
    assert verified.exit_code == 0, verified.output
    assert ": whole" in verified.output


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


def ports(release: HelmRelease) -> set[int]:
    """The ports of the release's Services."""
    services = release.kubectl.list("service", release.namespace)
    return {port["port"] for each in services for port in each["spec"]["ports"]}


def running_parts(release: HelmRelease) -> list[str]:
    """Operators and watchers that run: commands of processes, or names of containers."""
    cluster = release.cluster
    if cluster.spec().runtime == "podman":
        names = containers(cluster, show="{{.Names}}")
        return [name for name in names if {"operator", "watcher"} & set(name.split("."))]
    lines = command_lines(processes_of(cluster.layout.root))
    return [" ".join(line) for line in lines if {"spottrain_operator", "spottrain_watcher"} & set(line)]


def wait_until_trained(jobs: Sequence[Rehearsal]) -> None:
    """Until the ranks of each job themselves have recorded more steps."""
    goals = {job.name: newest_step(job) + MORE_STEPS for job in jobs}
    wait_for(lambda: all(newest_step(job) > goals[job.name] for job in jobs), "the ranks of each job train on", 60)


def wait_until_followed(jobs: Sequence[Rehearsal]) -> None:
    """Until the operator has seen steps of each job that were made from now on."""
    seen = {job.name: newest_step(job) for job in jobs}
    for job in jobs:
        job.wait(f"the status is past step {seen[job.name]}", partial(is_followed, job, seen[job.name]))


def is_followed(job: Rehearsal, step: int) -> bool:
    return job.status().progress.step > step


def newest_step(job: Rehearsal) -> int:
    return max(record.step for record in job.records())
