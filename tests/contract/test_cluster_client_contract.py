"""The contract of the cluster client.

It holds for the cluster in memory and for a real API server.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from cluster_setups import RealSetup, Setup, pod_of, pods_of, put_job
from minimal_job import MINIMAL
from spottrain_api import crd
from spottrain_api.contract.names import ANNOTATION_POOL, API_VERSION, LABEL_JOB, LABEL_JOB_UID, TOKEN_AUDIENCE
from spottrain_api.cost_record import DAYS_KEPT, CostRecord
from spottrain_api.history import HISTORY_FIELD, HISTORY_KIND
from spottrain_api.v1alpha1.spending import CostStatus, DayCost, PoolCost
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.control_api.agents import ReportBox
from spottrain_operator.control_api.cluster_keys import ClusterKeys
from spottrain_operator.control_api.token_review import review_token
from spottrain_operator.control_api.tokens import NotOurPodError, TokenGate
from spottrain_operator.core.model import PROTECTION, Event
from spottrain_operator.kube.cluster import write
from spottrain_operator.kube.errors import AlreadyExistsError, ConflictError
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.resources import (
    COSTS,
    DEFINITIONS,
    HISTORIES,
    JOBS,
    LEASES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SECRETS,
    Manifest,
)
from spottrain_operator.objects.costs import CostKeeper, Spending
from spottrain_operator.objects.definitions import crd_problem
from spottrain_operator.objects.events import EventRecorder, events_about
from spottrain_operator.objects.isolation import network_policy
from spottrain_operator.objects.pods import annotate_pod


async def test_what_is_not_there_is_none(setup: Setup) -> None:
    for resource in (JOBS, LEASES, SECRETS, HISTORIES):
        assert await setup.cluster.get(resource, "nobody", namespace=setup.namespace) is None
    for resource in (NODES, NAMESPACES):
        assert await setup.cluster.get(resource, "nobody") is None


async def test_the_crds_of_this_release_are_read_as_such(setup: Setup) -> None:
    for name in crd.definitions():
        assert crd_problem(await setup.cluster.get(DEFINITIONS, name), name) == ""
    assert await setup.cluster.get(DEFINITIONS, "nobodies.spottrain.dev") is None


async def test_the_jobs_of_all_namespaces_are_listed(setup: Setup, job: Manifest) -> None:
    await put_job(setup, "other")
    found = await setup.cluster.list(JOBS)
    mine = [each for each in found.items if each["metadata"]["namespace"] == setup.namespace]
    assert sorted(each["metadata"]["name"] for each in mine) == ["gpt", "other"]
    assert next(each for each in mine if each["metadata"]["name"] == "gpt") == job


async def test_a_status_is_written_once_per_version(setup: Setup, job: Manifest) -> None:
    written = await setup.cluster.replace(
        JOBS, job | {"status": {"phase": "Running", "message": "first"}}, subresource="status"
    )
    assert written["status"]["phase"] == "Running"
    with pytest.raises(ConflictError):
        await setup.cluster.replace(JOBS, job | {"status": {"phase": "Failed"}}, subresource="status")
    again = await setup.cluster.replace(JOBS, written | {"status": {"phase": "Running"}}, subresource="status")
    assert not again["status"].get("message"), "what the new status doesn't say is gone"


async def test_a_status_write_leaves_the_spec_alone(setup: Setup, job: Manifest) -> None:
    changed = job | {"spec": job["spec"] | {"image": "other"}, "status": {"phase": "Running"}}
    if isinstance(setup, RealSetup):
        written = await setup.cluster.replace(JOBS, changed, subresource="status")
        assert written["spec"]["image"] == MINIMAL["image"]
        assert written["metadata"]["generation"] == job["metadata"]["generation"]


async def test_a_status_of_a_job_that_is_gone_conflicts(setup: Setup, job: Manifest) -> None:
    await setup.cluster.delete(JOBS, "gpt", namespace=setup.namespace, uid=job["metadata"]["uid"])
    with pytest.raises(ConflictError):
        await setup.cluster.replace(JOBS, job | {"status": {"phase": "Failed"}}, subresource="status")


async def test_a_network_policy_is_created_once(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create(NETWORK_POLICIES, network_policy(job))
    with pytest.raises(AlreadyExistsError):
        await setup.cluster.create(NETWORK_POLICIES, network_policy(job))


async def test_pods_are_created_once_and_found_by_label(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create(PODS, pod_of(setup, job, 1))
    with pytest.raises(AlreadyExistsError):
        await setup.cluster.create(PODS, pod_of(setup, job, 1))
    await setup.cluster.create(PODS, pod_of(setup, job, 2))
    assert sorted(await pods_of(setup, job)) == ["gpt-1", "gpt-2"]
    of_another = {LABEL_JOB: "gpt", LABEL_JOB_UID: "other"}
    assert list((await setup.cluster.list(PODS, namespace=setup.namespace, labels=of_another)).items) == []


async def test_only_the_very_pod_is_deleted_and_twice_is_no_error(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create(PODS, pod_of(setup, job, 1))
    [pod] = (await pods_of(setup, job)).values()
    await setup.cluster.delete(PODS, "gpt-1", namespace=setup.namespace, uid="another-uid")
    assert "deletionTimestamp" not in (await pods_of(setup, job))["gpt-1"]["metadata"]
    for _ in range(2):
        await setup.cluster.delete(
            PODS, "gpt-1", namespace=setup.namespace, uid=pod["metadata"]["uid"], grace_seconds=0
        )
    assert await pods_of(setup, job) == {}


async def test_only_the_very_pod_is_annotated(setup: Setup, job: Manifest) -> None:
    """With annotations that the operator reads: a cache need not show others."""
    await setup.cluster.create(PODS, pod_of(setup, job, 1))
    [pod] = (await pods_of(setup, job)).values()
    a, b, c = *PROTECTION, ANNOTATION_POOL

    async def annotate(uid: str, annotations: dict[str, str | None]) -> dict[str, str]:
        await annotate_pod(setup.cluster, setup.namespace, "gpt-1", uid=uid, annotations=annotations)
        return annotations_of((await pods_of(setup, job))["gpt-1"])

    def annotations_of(pod: Manifest) -> dict[str, str]:
        found = pod["metadata"].get("annotations", {})
        return {key: value for key, value in found.items() if key in (a, b, c)}

    uid = pod["metadata"]["uid"]
    own = annotations_of(pod)
    assert await annotate("another-uid", {a: "1"}) == own
    assert await annotate(uid, {a: "1", b: "2"}) == own | {a: "1", b: "2"}
    del own[a]
    assert await annotate(uid, {a: None, c: "3"}) == own | {b: "2", c: "3"}
    await annotate_pod(setup.cluster, setup.namespace, "gpt-2", uid=uid, annotations={a: "1"})
    assert sorted(await pods_of(setup, job)) == ["gpt-1"], "one that is gone is no error"


async def test_labels_of_a_pod_are_set_and_removed(setup: Setup, job: Manifest) -> None:
    async def labelled_pods() -> dict[str, Manifest]:
        found = await setup.direct.list(PODS, namespace=setup.namespace, labels={LABEL_JOB: "gpt"})
        return {pod["metadata"]["name"]: pod for pod in found.items}

    pod = pod_of(setup, job, 1)
    pod["spec"]["schedulerName"] = "none"  # a pod gets its node's topology as labels
    await setup.cluster.create(PODS, pod)
    own = (await labelled_pods())["gpt-1"]["metadata"]["labels"]
    for labels, more in (({"a": "1"}, {"a": "1"}), ({"a": None, "b": None}, {})):
        await setup.cluster.patch(PODS, "gpt-1", {"metadata": {"labels": labels}}, namespace=setup.namespace)
        assert (await labelled_pods())["gpt-1"]["metadata"]["labels"] == own | more
    await setup.cluster.patch(PODS, "gpt-2", {"metadata": {"labels": {"a": "1"}}}, namespace=setup.namespace)
    assert sorted(await labelled_pods()) == ["gpt-1"], "one that is gone is no error"


async def test_only_the_very_job_is_deleted(setup: Setup, job: Manifest) -> None:
    await setup.cluster.delete(JOBS, "gpt", namespace=setup.namespace, uid="another-uid")
    assert await setup.cluster.get(JOBS, "gpt", namespace=setup.namespace) is not None
    for _ in range(2):
        await setup.cluster.delete(JOBS, "gpt", namespace=setup.namespace, uid=job["metadata"]["uid"])
    assert await setup.cluster.get(JOBS, "gpt", namespace=setup.namespace) is None


async def test_events_about_an_object(setup: Setup, job: Manifest) -> None:
    uid = job["metadata"]["uid"]
    assert await events_about(setup.cluster, setup.namespace, uid=uid) == []
    recorder = EventRecorder(setup.cluster)
    for number in range(3):
        await recorder.record(job, Event(type="Normal", reason="Counted", message=str(number)))
    events = await events_about(setup.cluster, setup.namespace, uid=uid)
    assert [event["message"] for event in events] == ["0", "1", "2"]


async def test_a_long_event_is_cut_to_the_bytes_that_kubernetes_takes(setup: Setup, job: Manifest) -> None:
    await EventRecorder(setup.cluster).record(job, Event(type="Warning", reason="Failure", message="é" * 2000))
    [event] = await events_about(setup.cluster, setup.namespace, uid=job["metadata"]["uid"])
    assert event["message"] == "é" * 500


async def test_nodes_are_read_by_name(setup: Setup) -> None:
    found = [await setup.cluster.get(NODES, name) for name in setup.nodes]
    assert [node["metadata"]["name"] for node in found if node is not None] == setup.nodes


async def test_leases_histories_and_secrets_are_written_by_the_fastest(setup: Setup) -> None:
    metadata = {"namespace": setup.namespace, "name": "one"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
    history = {"apiVersion": API_VERSION, "kind": HISTORY_KIND, "metadata": metadata, HISTORY_FIELD: "1"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"a": "MQ=="}}
    for resource, new in ((LEASES, lease), (HISTORIES, history), (SECRETS, secret)):
        await write(setup.cluster, resource, new)
        with pytest.raises(ConflictError):
            await write(setup.cluster, resource, new)
        stored = await setup.cluster.get(resource, "one", namespace=setup.namespace)
        assert stored is not None
        await write(setup.cluster, resource, stored | {"metadata": stored["metadata"] | {"labels": {"turn": "2"}}})
        with pytest.raises(ConflictError):
            await write(setup.cluster, resource, stored)


async def test_costs_of_jobs_are_recorded_and_the_old_ones_are_deleted(setup: Setup) -> None:
    key, keeper = JobKey(namespace=setup.namespace, name="gpt"), CostKeeper(setup.cluster)
    now = datetime(2026, 3, 1, tzinfo=UTC)
    for uid, age, total in (("old", DAYS_KEPT + 1, 1.0), ("new", 0, 2.0), ("new", 0, 3.0)):
        pools = (PoolCost(capacity_type="spot", pool="h100", total=total, on_demand_only=9.5),)
        day = DayCost(day=(now - timedelta(days=age)).date(), pools=pools)
        status = TrainingJobStatus(cost=CostStatus(days=(day,)), completion_time=now)
        await keeper.keep(key, uid, Spending(), status, now)
    [record] = (await setup.cluster.list(COSTS, namespace=setup.namespace)).items
    assert (record["metadata"]["name"], record["job"], record["uid"]) == ("gpt-new", "gpt", "new")
    assert CostRecord.model_validate({"job": "", "uid": "", "days": record["days"]}).days == (day,)


async def test_leases_are_found_by_name_in_all_namespaces(setup: Setup) -> None:
    for name in ("mine", "another"):
        metadata = {"namespace": setup.namespace, "name": name}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
        await setup.cluster.create(LEASES, lease)
    found = {
        (lease["metadata"]["namespace"], lease["metadata"]["name"])
        for lease in (await setup.cluster.list(LEASES, fields={"metadata.name": "mine"})).items
    }
    assert (setup.namespace, "mine") in found
    assert {name for _, name in found} == {"mine"}


async def test_a_namespace_is_read(setup: Setup) -> None:
    namespace = await setup.cluster.get(NAMESPACES, setup.namespace)
    assert namespace is not None
    assert namespace["metadata"]["name"] == setup.namespace
    assert await setup.cluster.get(NAMESPACES, "nobody") is None


async def test_a_bound_token_speaks_for_its_pod_and_only_to_its_audience(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create(PODS, pod_of(setup, job, 1))
    uid = (await pods_of(setup, job))["gpt-1"]["metadata"]["uid"]
    token = setup.token_for("gpt-1", uid, TOKEN_AUDIENCE)
    assert await review_token(setup.cluster, token, audience=TOKEN_AUDIENCE) == PodIdentity(
        namespace=setup.namespace, pod="gpt-1", uid=uid
    )
    assert await review_token(setup.cluster, token, audience="someone-else") is None
    assert await review_token(setup.cluster, "nonsense", audience=TOKEN_AUDIENCE) is None


async def no_review(token: str) -> PodIdentity | None:
    raise AssertionError("the token costs a review")


async def test_a_bound_token_costs_no_review_and_ends_with_its_pod(setup: Setup, job: Manifest) -> None:
    await setup.cluster.create(PODS, pod_of(setup, job, 1))
    uid = (await pods_of(setup, job))["gpt-1"]["metadata"]["uid"]
    token = setup.token_for("gpt-1", uid, TOKEN_AUDIENCE)
    keys = ClusterKeys(setup.direct.get_raw)
    pods = ReportBox(lambda _job, urgent: None)
    gate = TokenGate(no_review, keys, pods.knows)
    key = JobKey(namespace=setup.namespace, name="gpt")
    pods.keep(key, frozenset({uid}))
    assert await gate.identify(token, "10.0.0.1") == PodIdentity(namespace=setup.namespace, pod="gpt-1", uid=uid)
    assert await keys.verify(token, audience="someone-else") is None
    assert await keys.verify(token[:-8] + "AAAAAAAA", audience=TOKEN_AUDIENCE) is None

    await setup.cluster.delete(PODS, "gpt-1", namespace=setup.namespace, uid=uid, grace_seconds=0)
    async with asyncio.timeout(20):
        while await pods_of(setup, job):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    pods.keep(key, frozenset())
    for fresh_gate in (gate, TokenGate(no_review, keys, pods.knows)):
        with pytest.raises(NotOurPodError):
            await fresh_gate.identify(token, "10.0.0.1")


async def test_a_job_that_others_delete_is_gone(setup: Setup, job: Manifest) -> None:
    await setup.direct.delete(JOBS, "gpt", namespace=setup.namespace, uid=job["metadata"]["uid"])
    async with asyncio.timeout(20):
        while await setup.cluster.get(JOBS, "gpt", namespace=setup.namespace) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    left = await setup.cluster.list(JOBS)
    assert job["metadata"]["uid"] not in [each["metadata"]["uid"] for each in left.items]
