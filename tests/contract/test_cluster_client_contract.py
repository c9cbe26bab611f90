"""The contract of the cluster client.

It holds for the cluster in memory and for a real API server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_fixtures import wait_for
from memory_cluster import MemoryCluster
from spottrain_api.contract import API_VERSION, KIND, LABEL_JOB_UID, TOKEN_AUDIENCE, CapacityType
from spottrain_api.history import HISTORY_FIELD, HISTORY_KIND
from spottrain_api.v1alpha1 import TrainingJobSpec
from spottrain_operator.cluster.client import AlreadyExistsError, ConflictError, JobKey, Manifest, PodIdentity
from spottrain_operator.cluster.events import EventRecorder
from spottrain_operator.cluster.kubernetes_client import KubernetesCluster, client_configuration
from spottrain_operator.cluster.pods import JobRef, build_pod
from spottrain_operator.core.model import Event

CRDS = Path(__file__).parents[2] / "crds"
SPEC: dict[str, Any] = {
    "image": "local/none",
    "entrypoint": {"script": "train.py"},
    "nodes": {"max": 2},
    "batch": {"global": 8},
    "checkpoint": {"uri": "s3://bucket/prefix"},
}


class MemorySetup:
    """How the tests prepare a cluster in memory."""

    namespace = "team"

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.cluster.namespaces[self.namespace] = {"metadata": {"name": self.namespace}}
        self.nodes: list[str] = ["node-a"]
        self.cluster.put_node({"metadata": {"name": "node-a"}, "spec": {}, "status": {}})

    def put_job(self, name: str) -> None:
        job = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"namespace": self.namespace, "name": name},
            "spec": SPEC,
        }
        self.cluster.put_job(job)

    def token_for(self, pod: str, uid: str, audience: str) -> str:
        token = f"token-{uid}"
        self.cluster.tokens[token, audience] = PodIdentity(namespace=self.namespace, pod=pod, uid=uid)
        return token


class RealSetup:
    """The same with kubectl on a real control plane, in a namespace of its own."""

    def __init__(self, kubectl: Any) -> None:
        self.kubectl = kubectl
        self.namespace = f"contract-{uuid4().hex[:8]}"
        kubectl("apply", "--server-side", "-f", str(CRDS))
        wait_for(lambda: kubectl.run("get", "tj").returncode == 0, "the CRD is served")
        kubectl("create", "namespace", self.namespace)
        self.cluster = KubernetesCluster(client_configuration())
        self.nodes: list[str] = sorted(kubectl.ready_nodes())

    def put_job(self, name: str) -> None:
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": SPEC}
        self.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump(job))

    def token_for(self, pod: str, uid: str, audience: str) -> str:
        return str(
            self.kubectl(
                *("create", "token", "default", "-n", self.namespace, f"--audience={audience}"),
                *("--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--bound-object-uid={uid}"),
            )
        ).strip()

    def close(self) -> None:
        self.cluster.close()
        self.kubectl.run("delete", "namespace", self.namespace, "--wait=false")


Setup = MemorySetup | RealSetup


@pytest.fixture(params=["memory", pytest.param("real", marks=pytest.mark.cluster)])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    if request.param == "memory":
        yield MemorySetup()
        return
    kubectl = request.getfixturevalue("kubectl")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    real = RealSetup(kubectl)
    try:
        yield real
    finally:
        real.close()


@pytest.fixture
async def job(setup: Setup) -> Manifest:
    setup.put_job("gpt")
    found = await setup.cluster.get_job(JobKey(namespace=setup.namespace, name="gpt"))
    assert found is not None
    return found


def pod_of(setup: Setup, job: Manifest, sequence: int) -> Manifest:
    ref = JobRef(namespace=setup.namespace, name="gpt", uid=job["metadata"]["uid"])
    return build_pod(
        ref,
        TrainingJobSpec.model_validate(job["spec"]),
        name=f"gpt-{sequence}",
        sequence=sequence,
        capacity_type=CapacityType.SPOT,
        pool=None,
        control_url="http://control:8080",
    )


async def pods_of(setup: Setup, job: Manifest) -> dict[str, Manifest]:
    pods = await setup.cluster.list_pods(setup.namespace, labels={LABEL_JOB_UID: job["metadata"]["uid"]})
    return {pod["metadata"]["name"]: pod for pod in pods}


async def test_what_is_not_there_is_none(setup: Setup) -> None:
    assert await setup.cluster.get_job(JobKey(namespace=setup.namespace, name="nobody")) is None
    assert await setup.cluster.get_nodes({"nobody"}) == []
    assert await setup.cluster.read_lease(setup.namespace, "nobody") is None
    assert await setup.cluster.read_history(JobKey(namespace=setup.namespace, name="nobody")) is None


async def test_the_jobs_of_all_namespaces_are_listed(setup: Setup, job: Manifest) -> None:
    setup.put_job("other")
    found = await setup.cluster.list_jobs()
    mine = [each for each in found if each["metadata"]["namespace"] == setup.namespace]
    assert sorted(each["metadata"]["name"] for each in mine) == ["gpt", "other"]
    assert next(each for each in mine if each["metadata"]["name"] == "gpt") == job


async def test_a_status_is_written_once_per_version(setup: Setup, job: Manifest) -> None:
    written = await setup.cluster.replace_job_status(job | {"status": {"phase": "Running", "message": "first"}})
    assert written["status"]["phase"] == "Running"
    with pytest.raises(ConflictError):
        await setup.cluster.replace_job_status(job | {"status": {"phase": "Failed"}})
    again = await setup.cluster.replace_job_status(written | {"status": {"phase": "Running"}})
    assert not again["status"].get("message"), "what the new status doesn't say is gone"


async def test_a_status_write_leaves_the_spec_alone(setup: Setup, job: Manifest) -> None:
    changed = job | {"spec": job["spec"] | {"image": "other"}, "status": {"phase": "Running"}}
    if isinstance(setup, RealSetup):
        written = await setup.cluster.replace_job_status(changed)
        assert written["spec"]["image"] == SPEC["image"]
        assert written["metadata"]["generation"] == job["metadata"]["generation"]


async def test_a_status_of_a_job_that_is_gone_conflicts(setup: Setup, job: Manifest) -> None:
    await setup.cluster.delete_job(JobKey(namespace=setup.namespace, name="gpt"), uid=job["metadata"]["uid"])
    with pytest.raises(ConflictError):
        await setup.cluster.replace_job_status(job | {"status": {"phase": "Failed"}})


async def test_pods_are_created_once_and_found_by_label(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    with pytest.raises(AlreadyExistsError):
        await setup.cluster.create_pod(pod_of(setup, job, 1))
    await setup.cluster.create_pod(pod_of(setup, job, 2))
    assert sorted(await pods_of(setup, job)) == ["gpt-1", "gpt-2"]
    assert await setup.cluster.list_pods(setup.namespace, labels={LABEL_JOB_UID: "other"}) == []


async def test_only_the_very_pod_is_deleted_and_twice_is_no_error(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    [pod] = (await pods_of(setup, job)).values()
    await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid="another-uid")
    assert "deletionTimestamp" not in (await pods_of(setup, job))["gpt-1"]["metadata"]
    for _ in range(2):
        await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=pod["metadata"]["uid"], grace_seconds=0)
    assert await pods_of(setup, job) == {}


async def test_only_the_very_pod_is_annotated(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    [pod] = (await pods_of(setup, job)).values()

    async def annotate(uid: str, **annotations: str | None) -> dict[str, str]:
        await setup.cluster.annotate_pod(setup.namespace, "gpt-1", uid=uid, annotations=annotations)
        [found] = (await pods_of(setup, job)).values()
        return dict(found["metadata"].get("annotations", {}))

    uid = pod["metadata"]["uid"]
    own = pod["metadata"]["annotations"]
    assert await annotate("another-uid", a="1") == own
    assert await annotate(uid, a="1", b="2") == own | {"a": "1", "b": "2"}
    assert await annotate(uid, a=None, c="3", d=None) == own | {"b": "2", "c": "3"}
    await setup.cluster.annotate_pod(setup.namespace, "gpt-2", uid=uid, annotations={"a": "1"})
    assert sorted(await pods_of(setup, job)) == ["gpt-1"], "one that is gone is no error"


async def test_labels_of_a_pod_are_set_and_removed(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    own = (await pods_of(setup, job))["gpt-1"]["metadata"]["labels"]
    for labels, more in (({"a": "1"}, {"a": "1"}), ({"a": None, "b": None}, {})):
        await setup.cluster.label_pod(setup.namespace, "gpt-1", labels=labels)
        assert (await pods_of(setup, job))["gpt-1"]["metadata"]["labels"] == own | more
    await setup.cluster.label_pod(setup.namespace, "gpt-2", labels={"a": "1"})
    assert sorted(await pods_of(setup, job)) == ["gpt-1"], "one that is gone is no error"


async def test_only_the_very_job_is_deleted(setup: Setup, job: Manifest) -> None:
    key = JobKey(namespace=setup.namespace, name="gpt")
    await setup.cluster.delete_job(key, uid="another-uid")
    assert await setup.cluster.get_job(key) is not None
    for _ in range(2):
        await setup.cluster.delete_job(key, uid=job["metadata"]["uid"])
    assert await setup.cluster.get_job(key) is None


async def test_the_newest_event_about_an_object(setup: Setup, job: Manifest) -> None:
    uid = job["metadata"]["uid"]
    assert await setup.cluster.newest_event(setup.namespace, uid=uid) is None
    recorder = EventRecorder(setup.cluster)
    for number in range(3):
        await recorder.record(job, Event(type="Normal", reason="Counted", message=str(number)))
    event = await setup.cluster.newest_event(setup.namespace, uid=uid)
    assert event is not None
    assert event["message"] == "2"


async def test_a_long_event_is_cut_to_the_bytes_that_kubernetes_takes(setup: Setup, job: Manifest) -> None:
    await EventRecorder(setup.cluster).record(job, Event(type="Warning", reason="Failure", message="é" * 2000))
    event = await setup.cluster.newest_event(setup.namespace, uid=job["metadata"]["uid"])
    assert event is not None
    assert event["message"] == "é" * 500


async def test_nodes_are_read_by_name(setup: Setup) -> None:
    found = await setup.cluster.get_nodes([*setup.nodes, "nobody", setup.nodes[0]])
    assert [node["metadata"]["name"] for node in found] == setup.nodes


async def test_leases_and_histories_are_written_by_the_fastest(setup: Setup) -> None:
    metadata = {"namespace": setup.namespace, "name": "one"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
    history = {"apiVersion": API_VERSION, "kind": HISTORY_KIND, "metadata": metadata, HISTORY_FIELD: "1"}
    key = JobKey(namespace=setup.namespace, name="one")
    read_lease = partial(setup.cluster.read_lease, key.namespace, key.name)
    read_history = partial(setup.cluster.read_history, key)
    cases: list[tuple[Manifest, Callable[..., Any], Callable[..., Any]]] = [
        (lease, setup.cluster.write_lease, read_lease),
        (history, setup.cluster.write_history, read_history),
    ]
    for new, write, read in cases:
        await write(new)
        with pytest.raises(ConflictError):
            await write(new)
        stored = await read()
        assert stored is not None
        await write(stored | {"metadata": stored["metadata"] | {"labels": {"turn": "2"}}})
        with pytest.raises(ConflictError):
            await write(stored)


async def test_leases_are_found_by_name_in_all_namespaces(setup: Setup) -> None:
    for name in ("mine", "another"):
        metadata = {"namespace": setup.namespace, "name": name}
        await setup.cluster.write_lease(
            {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
        )
    found = {
        (lease["metadata"]["namespace"], lease["metadata"]["name"])
        for lease in await setup.cluster.list_leases("mine")
    }
    assert (setup.namespace, "mine") in found
    assert {name for _, name in found} == {"mine"}


async def test_a_namespace_is_read(setup: Setup) -> None:
    namespace = await setup.cluster.get_namespace(setup.namespace)
    assert namespace is not None
    assert namespace["metadata"]["name"] == setup.namespace
    assert await setup.cluster.get_namespace("nobody") is None


async def test_a_bound_token_speaks_for_its_pod_and_only_to_its_audience(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    uid = (await pods_of(setup, job))["gpt-1"]["metadata"]["uid"]
    token = setup.token_for("gpt-1", uid, TOKEN_AUDIENCE)
    assert await setup.cluster.review_token(token, audience=TOKEN_AUDIENCE) == PodIdentity(
        namespace=setup.namespace, pod="gpt-1", uid=uid
    )
    assert await setup.cluster.review_token(token, audience="someone-else") is None
    assert await setup.cluster.review_token("nonsense", audience=TOKEN_AUDIENCE) is None
