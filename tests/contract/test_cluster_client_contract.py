"""The contract of the cluster client.

It holds for the cluster in memory and for a real API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_fixtures import wait_for
from memory_cluster import MemoryCluster
from pod_tokens import SigningIssuer
from spottrain_api.contract import API_VERSION, KIND, LABEL_JOB, LABEL_JOB_UID, TOKEN_AUDIENCE, CapacityType
from spottrain_api.history import HISTORY_FIELD, HISTORY_KIND
from spottrain_api.v1alpha1 import TrainingJobSpec
from spottrain_operator.cluster.client import (
    AlreadyExistsError,
    ClusterClient,
    ConflictError,
    ExpiredError,
    JobKey,
    Kind,
    Listing,
    Manifest,
    PodIdentity,
    WatchClient,
    WatchEvent,
    is_gone,
)
from spottrain_operator.cluster.control_address import ControlAddress
from spottrain_operator.cluster.events import EventRecorder
from spottrain_operator.cluster.isolation import network_policy
from spottrain_operator.cluster.kopf_watch import KopfWatch
from spottrain_operator.cluster.kubernetes_client import KubernetesCluster, client_configuration
from spottrain_operator.cluster.pods import ANNOTATION_POOL, JobRef, build_pod
from spottrain_operator.cluster.watch_client import KubernetesWatch
from spottrain_operator.cluster.watched_cluster import WatchedCluster
from spottrain_operator.control_api.agents import ReportBox
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.control_api.tokens import NotOurPodError, TokenGate
from spottrain_operator.core.model import Event
from spottrain_operator.core.protection import PROTECTION

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
        self.direct = MemoryCluster()
        self.direct.namespaces[self.namespace] = {"metadata": {"name": self.namespace}}
        self.watches: WatchClient = self.direct
        self.cluster: ClusterClient = self.direct
        self.nodes: list[str] = ["node-a"]
        self.direct.put_node({"metadata": {"name": "node-a"}, "spec": {}, "status": {}})

    def put_job(self, name: str) -> None:
        job = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"namespace": self.namespace, "name": name},
            "spec": SPEC,
        }
        self.direct.put_job(job)

    def token_for(self, pod: str, uid: str, audience: str) -> str:
        issuer, identity = SigningIssuer(), PodIdentity(namespace=self.namespace, pod=pod, uid=uid)
        self.direct.issuer = issuer.published()
        token = issuer.token(identity, aud=[audience])
        self.direct.tokens[token, audience] = identity
        return token


class RealSetup:
    """The same with kubectl on a real control plane, in a namespace of its own."""

    def __init__(self, kubectl: Any, watches: KubernetesWatch) -> None:
        self.kubectl = kubectl
        self.watches: WatchClient = watches
        self.namespace = f"contract-{uuid4().hex[:8]}"
        kubectl("apply", "--server-side", "-f", str(CRDS))
        wait_for(lambda: kubectl.run("get", "tj").returncode == 0, "the CRD is served")
        kubectl("create", "namespace", self.namespace)
        self.direct = KubernetesCluster(client_configuration())
        self.cluster: ClusterClient = self.direct
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
        self.direct.close()
        self.kubectl.run("delete", "namespace", self.namespace, "--wait=false")


Setup = MemorySetup | RealSetup


@pytest.fixture(
    params=[
        "memory",
        "memory, watched",
        pytest.param("real", marks=pytest.mark.cluster),
        pytest.param("real, watched", marks=pytest.mark.cluster),
    ]
)
async def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    where, _, watched = request.param.partition(", ")
    async with _real(request, monkeypatch) if where == "real" else _memory() as made:
        if not watched:
            yield made
            return
        watches = KopfWatch(made.watches) if where == "real" else made.watches
        made.cluster = cluster = WatchedCluster(made.direct, watches, lambda _kind, _change: None)
        synced = asyncio.Event()
        following = asyncio.create_task(cluster.follow(synced))
        await synced.wait()
        yield made
        following.cancel()
        await asyncio.wait({following})


@asynccontextmanager
async def _memory() -> AsyncIterator[Setup]:
    yield MemorySetup()


@asynccontextmanager
async def _real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    kubectl = request.getfixturevalue("kubectl")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    async with KubernetesWatch(client_configuration()) as watches:
        real = RealSetup(kubectl, watches)
        try:
            yield real
        finally:
            real.close()


async def put_job(setup: Setup, name: str) -> Manifest:
    """Create a job as a user does, and wait until the client shows it."""
    setup.put_job(name)
    async with asyncio.timeout(20):
        while (found := await setup.cluster.get_job(JobKey(namespace=setup.namespace, name=name))) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def job(setup: Setup) -> Manifest:
    return await put_job(setup, "gpt")


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
    pods = await setup.cluster.list_pods(setup.namespace, labels=labels)
    return {pod["metadata"]["name"]: pod for pod in pods}


async def test_what_is_not_there_is_none(setup: Setup) -> None:
    assert await setup.cluster.get_job(JobKey(namespace=setup.namespace, name="nobody")) is None
    assert await setup.cluster.get_nodes({"nobody"}) == []
    assert await setup.direct.read_lease(setup.namespace, "nobody") is None
    assert await setup.direct.read_secret(setup.namespace, "nobody") is None
    assert await setup.direct.read_history(JobKey(namespace=setup.namespace, name="nobody")) is None


async def test_the_jobs_of_all_namespaces_are_listed(setup: Setup, job: Manifest) -> None:
    await put_job(setup, "other")
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


async def test_a_network_policy_is_created_once(setup: Setup, job: Manifest) -> None:
    await setup.direct.create_network_policy(network_policy(job))
    with pytest.raises(AlreadyExistsError):
        await setup.direct.create_network_policy(network_policy(job))


async def test_pods_are_created_once_and_found_by_label(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    with pytest.raises(AlreadyExistsError):
        await setup.cluster.create_pod(pod_of(setup, job, 1))
    await setup.cluster.create_pod(pod_of(setup, job, 2))
    assert sorted(await pods_of(setup, job)) == ["gpt-1", "gpt-2"]
    assert await setup.cluster.list_pods(setup.namespace, labels={LABEL_JOB: "gpt", LABEL_JOB_UID: "other"}) == []


async def test_only_the_very_pod_is_deleted_and_twice_is_no_error(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    [pod] = (await pods_of(setup, job)).values()
    await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid="another-uid")
    assert "deletionTimestamp" not in (await pods_of(setup, job))["gpt-1"]["metadata"]
    for _ in range(2):
        await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=pod["metadata"]["uid"], grace_seconds=0)
    assert await pods_of(setup, job) == {}


async def test_only_the_very_pod_is_annotated(setup: Setup, job: Manifest) -> None:
    """With annotations that the operator reads: a cache need not show others."""
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    [pod] = (await pods_of(setup, job)).values()
    a, b, c = *PROTECTION, ANNOTATION_POOL

    async def annotate(uid: str, annotations: dict[str, str | None]) -> dict[str, str]:
        await setup.cluster.annotate_pod(setup.namespace, "gpt-1", uid=uid, annotations=annotations)
        return annotations_of((await pods_of(setup, job))["gpt-1"])

    def annotations_of(pod: Manifest) -> dict[str, str]:
        found = pod["metadata"].get("annotations", {})
        return {key: value for key, value in found.items() if key in (a, b, c)}

    uid = pod["metadata"]["uid"]
    own = annotations_of(pod)
    assert await annotate("another-uid", {a: "1"}) == own
    assert await annotate(uid, {a: "1", b: "2"}) == own | {a: "1", b: "2"}
    assert await annotate(uid, {a: None, c: "3"}) == own | {b: "2", c: "3"}
    await setup.cluster.annotate_pod(setup.namespace, "gpt-2", uid=uid, annotations={a: "1"})
    assert sorted(await pods_of(setup, job)) == ["gpt-1"], "one that is gone is no error"


async def test_labels_of_a_pod_are_set_and_removed(setup: Setup, job: Manifest) -> None:
    async def labelled_pods() -> dict[str, Manifest]:
        pods = await setup.direct.list_pods(setup.namespace, labels={LABEL_JOB: "gpt"})
        return {pod["metadata"]["name"]: pod for pod in pods}

    pod = pod_of(setup, job, 1)
    pod["spec"]["schedulerName"] = "none"  # a pod gets its node's topology as labels
    await setup.cluster.create_pod(pod)
    own = (await labelled_pods())["gpt-1"]["metadata"]["labels"]
    for labels, more in (({"a": "1"}, {"a": "1"}), ({"a": None, "b": None}, {})):
        await setup.direct.label_pod(setup.namespace, "gpt-1", labels=labels)
        assert (await labelled_pods())["gpt-1"]["metadata"]["labels"] == own | more
    await setup.direct.label_pod(setup.namespace, "gpt-2", labels={"a": "1"})
    assert sorted(await labelled_pods()) == ["gpt-1"], "one that is gone is no error"


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


async def test_leases_histories_and_secrets_are_written_by_the_fastest(setup: Setup) -> None:
    metadata = {"namespace": setup.namespace, "name": "one"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
    history = {"apiVersion": API_VERSION, "kind": HISTORY_KIND, "metadata": metadata, HISTORY_FIELD: "1"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"a": "MQ=="}}
    key = JobKey(namespace=setup.namespace, name="one")
    kinds: list[tuple[Manifest, Callable[[Manifest], Awaitable[Manifest]], Callable[[], Awaitable[Manifest | None]]]]
    kinds = [
        (lease, setup.direct.write_lease, partial(setup.direct.read_lease, key.namespace, key.name)),
        (history, setup.direct.write_history, partial(setup.direct.read_history, key)),
        (secret, setup.direct.write_secret, partial(setup.direct.read_secret, key.namespace, key.name)),
    ]
    for new, write, read in kinds:
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
        await setup.direct.write_lease(
            {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
        )
    found = {
        (lease["metadata"]["namespace"], lease["metadata"]["name"])
        for lease in await setup.direct.list_leases("mine")
    }
    assert (setup.namespace, "mine") in found
    assert {name for _, name in found} == {"mine"}


async def test_a_namespace_is_read(setup: Setup) -> None:
    namespace = await setup.direct.get_namespace(setup.namespace)
    assert namespace is not None
    assert namespace["metadata"]["name"] == setup.namespace
    assert await setup.direct.get_namespace("nobody") is None


async def test_a_bound_token_speaks_for_its_pod_and_only_to_its_audience(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    uid = (await pods_of(setup, job))["gpt-1"]["metadata"]["uid"]
    token = setup.token_for("gpt-1", uid, TOKEN_AUDIENCE)
    assert await setup.direct.review_token(token, audience=TOKEN_AUDIENCE) == PodIdentity(
        namespace=setup.namespace, pod="gpt-1", uid=uid
    )
    assert await setup.direct.review_token(token, audience="someone-else") is None
    assert await setup.direct.review_token("nonsense", audience=TOKEN_AUDIENCE) is None


class NoReviews:
    """Fails at a review."""

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        raise AssertionError("the token costs a review")


async def test_a_bound_token_costs_no_review_and_ends_with_its_pod(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    uid = (await pods_of(setup, job))["gpt-1"]["metadata"]["uid"]
    token = setup.token_for("gpt-1", uid, TOKEN_AUDIENCE)
    keys = ClusterKeys(setup.direct)
    pods = ReportBox(lambda _job, urgent: None)
    gate = TokenGate(NoReviews(), keys, pods.knows)
    key = JobKey(namespace=setup.namespace, name="gpt")
    pods.keep(key, frozenset({uid}))
    assert await gate.identify(token, "10.0.0.1") == PodIdentity(namespace=setup.namespace, pod="gpt-1", uid=uid)
    assert await keys.verify(token, audience="someone-else") is None
    assert await keys.verify(token[:-8] + "AAAAAAAA", audience=TOKEN_AUDIENCE) is None

    await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=uid, grace_seconds=0)
    async with asyncio.timeout(20):
        while await pods_of(setup, job):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    pods.keep(key, frozenset())
    for fresh_gate in (gate, TokenGate(NoReviews(), keys, pods.knows)):
        with pytest.raises(NotOurPodError):
            await fresh_gate.identify(token, "10.0.0.1")


async def test_a_job_that_others_delete_is_gone(setup: Setup, job: Manifest) -> None:
    key = JobKey(namespace=setup.namespace, name="gpt")
    await setup.direct.delete_job(key, uid=job["metadata"]["uid"])
    async with asyncio.timeout(20):
        while await setup.cluster.get_job(key) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert job["metadata"]["uid"] not in [each["metadata"]["uid"] for each in await setup.cluster.list_jobs()]


async def events_of(setup: Setup, kind: Kind, version: int, names: set[str]) -> list[tuple[str, bool]]:
    """Watch until the last of these objects is gone.

    Returns the names in the order of the watch, and whether each object is gone.
    """
    found: list[tuple[str, bool]] = []
    async with asyncio.timeout(20):
        async for event in setup.watches.watch_kind(kind, version):
            if event.object is not None and event.object["metadata"]["name"] in names:
                found.append((event.object["metadata"]["name"], event.deleted))
                if event.deleted:
                    return found
    raise AssertionError(f"the watch has ended after {found}")


async def test_a_watch_shows_what_has_happened_since_a_list(setup: Setup, job: Manifest) -> None:
    before = await setup.watches.list_kind(Kind.PODS)
    await setup.cluster.create_pod(pod_of(setup, job, 1))
    pod = (await pods_of(setup, job))["gpt-1"]
    await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=pod["metadata"]["uid"], grace_seconds=0)
    found = await events_of(setup, Kind.PODS, before.version, {"gpt-1"})
    assert found[0] == ("gpt-1", False)
    assert found[-1] == ("gpt-1", True)


async def test_a_list_names_the_pods_of_one_job_in_one_namespace(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create_pod(pod_of(setup, job, 1))

    async def listed(job: str) -> Listing:
        return await setup.watches.list_kind(
            Kind.PODS,
            namespace=setup.namespace,
            labels={LABEL_JOB: job},
            keep=lambda pod: {"metadata": pod["metadata"]},
        )

    [pod] = (await listed("gpt")).items
    assert list(pod) == ["metadata"], "only what is kept of it"
    assert (await listed("other")).items == ()
    assert (await listed("gpt")).version >= int(pod["metadata"]["resourceVersion"])


async def test_pods_that_are_not_the_operators_are_not_watched(setup: Setup, job: Manifest) -> None:
    stranger = pod_of(setup, job, 1)
    stranger["metadata"]["labels"] = {"app": "web"}
    await setup.cluster.create_pod(stranger)
    listing = await setup.watches.list_kind(Kind.PODS, namespace=setup.namespace)
    assert listing.items == ()


async def test_a_watch_from_a_version_that_is_too_old_has_expired(setup: Setup, job: Manifest) -> None:
    if isinstance(setup, MemorySetup):
        setup.direct.forget_history()

    async def watch() -> WatchEvent:
        return await anext(aiter(setup.watches.watch_kind(Kind.JOBS, 1)))

    with pytest.raises(ExpiredError):
        await watch()


@pytest.mark.parametrize("placed", [False, True], ids=["no node", "on a node"])
async def test_the_answer_to_a_deletion_says_whether_the_pod_is_gone(
    setup: Setup, job: Manifest, placed: bool
) -> None:
    """The caches rely on it."""
    pod = pod_of(setup, job, 1)
    pod["spec"] |= {"nodeName": setup.nodes[0]} if placed else {"schedulerName": "none"}
    made = await setup.cluster.create_pod(pod)
    uid = made["metadata"]["uid"]
    deleted = await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=uid, grace_seconds=0 if placed else None)
    assert deleted is not None
    assert is_gone(deleted)
    assert await pods_of(setup, job) == {}
    assert await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=uid) is None


async def test_a_pod_that_gets_its_grace_period_is_still_there(setup: Setup, job: Manifest) -> None:
    pod = pod_of(setup, job, 1)
    pod["spec"]["nodeName"] = setup.nodes[0]
    made = await setup.cluster.create_pod(pod)
    deleted = await setup.cluster.delete_pod(setup.namespace, "gpt-1", uid=made["metadata"]["uid"])
    assert deleted is not None
    assert not is_gone(deleted)
    assert "deletionTimestamp" in deleted["metadata"]
    assert int(deleted["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
