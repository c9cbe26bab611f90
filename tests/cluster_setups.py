"""Implementations of the cluster client for contract tests, with a cluster each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from cluster_fixtures import Kubectl
from minimal_job import MINIMAL
from pod_tokens import SigningIssuer
from shared_clusters import SHARED
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import API_VERSION, KIND, LABEL_JOB, LABEL_JOB_UID
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.kubernetes_cluster import KubernetesCluster
from spottrain_operator.kube.resources import DEFINITIONS, JOBS, PODS, Manifest, Resource
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.pods import JobRef, build_pod
from spottrain_operator.objects.watched_cluster import WatchedCluster
from world.cluster import MemoryCluster

# Each is asked itself, and through what is watched of it.
EACH_CLUSTER = [
    "memory",
    "memory, watched",
    pytest.param("real", marks=pytest.mark.cluster),
    pytest.param("real, watched", marks=pytest.mark.cluster),
]


class MemorySetup:
    """How the tests prepare a cluster in memory."""

    namespace = "team"

    def __init__(self) -> None:
        self.direct = MemoryCluster()
        self.direct.namespaces[self.namespace] = {"metadata": {"name": self.namespace}}
        self.cluster: Cluster = self.direct
        self.nodes: list[str] = ["node-a"]
        self.direct.put_node({"metadata": {"name": "node-a"}, "spec": {}, "status": {}})

    def put_job(self, name: str) -> None:
        job = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"namespace": self.namespace, "name": name},
            "spec": MINIMAL,
        }
        self.direct.put_job(job)

    def token_for(self, pod: str, uid: str, audience: str) -> str:
        issuer, identity = SigningIssuer(), PodIdentity(namespace=self.namespace, pod=pod, uid=uid)
        self.direct.raw = issuer.published()
        token = issuer.token(identity, aud=[audience])
        self.direct.tokens[token, audience] = identity
        return token


class RealSetup:
    """The same on a real control plane, in a namespace of its own."""

    def __init__(self, kubectl: Kubectl, direct: KubernetesCluster) -> None:
        self.kubectl = kubectl
        self.namespace = f"contract-{uuid4().hex[:8]}"
        kubectl.create_namespace(self.namespace)
        self.direct = direct
        self.cluster: Cluster = direct
        self.nodes = sorted(name for name, pool in SHARED.pool_of_nodes().items() if not pool.taints)

    def put_job(self, name: str) -> None:
        job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": MINIMAL}
        self.kubectl.create(job, self.namespace)

    def token_for(self, pod: str, uid: str, audience: str) -> str:
        return self.kubectl.token("default", self.namespace, audience=audience, pod=pod, uid=uid)

    def close(self) -> None:
        self.kubectl.delete("namespace", self.namespace)


Setup = MemorySetup | RealSetup


@asynccontextmanager
async def in_memory() -> AsyncIterator[Setup]:
    yield MemorySetup()


@asynccontextmanager
async def on_a_control_plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    kubectl = request.getfixturevalue("kubectl")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    async with KubernetesCluster() as direct:
        real = RealSetup(kubectl, direct)
        try:
            yield real
        finally:
            real.close()


async def put_job(setup: Setup, name: str) -> Manifest:
    """Create a job as a user does, and wait until the client shows it.

    A watch that shows it has begun, and shows what becomes of it, too. A read of the job would not prove that.
    """
    setup.put_job(name)
    key = JobKey(namespace=setup.namespace, name=name)
    async with asyncio.timeout(20):
        while key not in [JobKey.of(job) for job in (await setup.cluster.list(JOBS)).items]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    found = await setup.cluster.get(JOBS, name, namespace=setup.namespace)
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
        control=ControlAddress(url="https://control:8443", ca="CA"),
    )


async def pods_of(setup: Setup, job: Manifest) -> dict[str, Manifest]:
    labels = {LABEL_JOB: "gpt", LABEL_JOB_UID: job["metadata"]["uid"]}
    found = await setup.cluster.list(PODS, namespace=setup.namespace, labels=labels)
    return {pod["metadata"]["name"]: pod for pod in found.items}


@asynccontextmanager
async def with_optional(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, resource: Resource, definition: Manifest
) -> AsyncIterator[Setup]:
    """The cluster of a parameter of EACH_CLUSTER, with a resource that a cluster may not have."""
    where, _, watched = request.param.partition(", ")
    async with on_a_control_plane(request, monkeypatch) if where == "real" else in_memory() as made:
        await _install(made, resource, definition)
        if not watched:
            yield made
            return
        watching = WatchedCluster(made.direct, lambda _resource, _change: None, optional=[resource])
        made.cluster = watching
        synced = asyncio.Event()
        following = asyncio.create_task(watching.follow(synced))
        async with asyncio.timeout(20):
            while not watching._has.get(resource):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield made
        following.cancel()
        await asyncio.wait({following})


async def _install(setup: Setup, resource: Resource, definition: Manifest) -> None:
    """Let the cluster have the resource. It stays: nobody else minds."""
    name = definition["metadata"]["name"]
    if not isinstance(setup, RealSetup) or await setup.direct.get(DEFINITIONS, name) is not None:
        return
    await setup.direct.create(DEFINITIONS, definition)
    async with asyncio.timeout(20):
        while not await _is_served(setup, resource):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _is_served(setup: Setup, resource: Resource) -> bool:
    """Whether the API server answers for the resource. One that has accepted its names may take a moment longer."""
    try:
        await setup.direct.list(resource, namespace=setup.namespace if resource.namespaced else "")
    except ClusterError:
        return False
    return True
