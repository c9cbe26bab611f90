"""What the operator does with NodePools, in memory and on a real API server with Karpenter's schema."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import yaml

from cluster_setups import EACH_CLUSTER, RealSetup, Setup, with_optional
from minimal_job import MINIMAL
from spottrain_api.contract.names import API_VERSION, KIND
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_local.binaries import find_crds
from spottrain_local.go_module import KARPENTER_MODULE
from spottrain_operator.core.model import JobView
from spottrain_operator.core.node_pools import DeleteNodePool, NodePoolsView, WriteNodePool
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import JOBS, NODE_POOLS, Manifest
from spottrain_operator.objects.node_pool_keeper import NodePoolKeeper
from spottrain_operator.objects.node_pools import node_pools
from spottrain_operator.objects.observe import job_view
from spottrain_operator.objects.placement import Site

# All that a NodePool is made of.
POOL: dict[str, Any] = {
    "name": "spot",
    "capacityType": "spot",
    "provider": "karpenter",
    "nodeSelector": {"topology.kubernetes.io/zone": "a", "example.com/team": "gpt"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "value": "gpt", "effect": "NoExecute"},
    ],
    "weight": 100,
    "nodeClass": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
}


def schema() -> Manifest:
    """Karpenter's definition of a NodePool."""
    text = (find_crds(KARPENTER_MODULE) / "karpenter.sh_nodepools.yaml").read_text()
    found: Manifest = yaml.load(text, Loader=yaml.CSafeLoader)
    return found


@pytest.fixture(params=EACH_CLUSTER)
async def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    async with with_optional(request, monkeypatch, NODE_POOLS, schema()) as made:
        yield made


class Job:
    """A job whose pools have NodePools, and what the operator sees and does."""

    def __init__(self, setup: Setup, view: JobView) -> None:
        self.setup, self.view = setup, view
        self.keeper = NodePoolKeeper(setup.cluster, Site(uses_karpenter=True))

    def edit(self, *pools: dict[str, Any]) -> None:
        spec = TrainingJobSpec.model_validate(MINIMAL | {"capacity": {"pools": list(pools)}})
        self.view = replace(self.view, spec=spec)

    async def seen(self) -> NodePoolsView | None:
        return await self.keeper.observe(self.view)

    async def written(self) -> NodePoolsView:
        for name in node_pools(self.view):
            await self.keeper.act(self.view, WriteNodePool(name=name))
        found = await self.seen()
        assert found is not None
        return found

    async def read(self, name: str) -> Manifest:
        found = await self.setup.direct.get(NODE_POOLS, name)
        assert found is not None
        return found


@pytest.fixture
async def job(setup: Setup) -> AsyncIterator[Job]:
    name = f"gpt-{uuid4().hex[:6]}"
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": MINIMAL}
    if isinstance(setup, RealSetup):
        setup.kubectl.create(manifest, setup.namespace)
    else:
        setup.direct.put_job(manifest | {"metadata": {"name": name, "namespace": setup.namespace}})
    found = await setup.direct.get(JOBS, name, namespace=setup.namespace)
    assert found is not None
    made = Job(setup, job_view(found))
    made.edit(POOL)
    yield made
    await made.keeper.delete_all(JobKey.of_view(made.view))


async def test_a_node_pool_is_taken_as_it_is_and_seen_at_once(job: Job) -> None:
    found = await job.written()
    [seen] = found.found
    assert {seen.name: seen.content} == dict(found.wanted)
    assert (found.trouble, seen.not_ready) == (None, "")
    [wanted] = node_pools(job.view).values()
    spec = (await job.read(seen.name))["spec"]
    spec["disruption"].pop("budgets", None)  # Karpenter's default
    assert spec == wanted["spec"], "nothing is dropped or defaulted"
    assert await job.written() == found


async def test_an_edit_changes_it_in_place(job: Job) -> None:
    [before] = (await job.written()).found
    job.edit(POOL | {"weight": 0, "tolerations": [], "nodeSelector": {"example.com/team": "other"}})
    [after] = (await job.written()).found
    assert (after.uid, after.content != before.content) == (before.uid, True)
    spec = (await job.read(after.name))["spec"]
    assert ("weight" in spec, spec["limits"], "taints" in spec["template"]["spec"]) == (False, {"nodes": "0"}, False)


async def test_one_of_another_kind_of_node_class_is_another(job: Job) -> None:
    [before] = (await job.written()).found
    job.edit(POOL | {"nodeClass": POOL["nodeClass"] | {"kind": "OtherClass"}})
    found = await job.written()
    assert found.trouble is None
    assert {each.name for each in found.found} == {before.name, *found.wanted}
    assert before.name not in found.wanted
    await job.keeper.act(job.view, DeleteNodePool(name=before.name, uid=before.uid))
    await job.keeper.act(job.view, DeleteNodePool(name=before.name, uid=before.uid))
    seen = await job.seen()
    assert seen is not None
    assert {each.name for each in seen.found} == set(found.wanted)


async def test_all_of_a_job_that_is_gone_are_deleted_and_no_others(job: Job) -> None:
    await job.written()
    other = Job(job.setup, replace(job.view, name="other", uid="other"))
    kept = await other.written()
    await job.keeper.delete_all(JobKey.of_view(job.view))
    job.edit()
    assert await job.seen() is None
    assert await other.seen() == kept
    await other.keeper.delete_all(JobKey.of_view(other.view))


async def test_what_karpenter_says_shows(job: Job) -> None:
    [before] = (await job.written()).found
    at = "2026-01-01T00:00:00Z"
    said = {"type": "Ready", "status": "False", "reason": "Unready", "message": "m", "lastTransitionTime": at}
    new = await job.read(before.name) | {"status": {"conditions": [said], "nodes": 0}}
    await job.setup.cluster.replace(NODE_POOLS, new, subresource="status")
    found = await job.seen()
    assert found is not None
    assert [each.not_ready for each in found.found] == ["m"]


@pytest.mark.cluster
@pytest.mark.parametrize("setup", ["real"], indirect=True)
async def test_what_karpenters_schema_refuses_is_quoted(job: Job) -> None:
    job.edit(POOL | {"nodeSelector": {"karpenter.sh/nodepool": "mine"}})
    found = await job.written()
    assert found.trouble is not None
    assert found.trouble.message.startswith("a NodePool can't be made: ")
    assert 'label "karpenter.sh/nodepool" is restricted' in found.trouble.message
