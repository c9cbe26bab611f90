"""What the operator does with Workloads, on the cluster in memory and on a real API server with Kueue's schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from cluster_setups import EACH_CLUSTER, RealSetup, Setup, with_optional
from minimal_job import MINIMAL
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import API_VERSION, KIND, LABEL_QUEUE
from spottrain_local.binaries import find_crds
from spottrain_local.go_module import KUEUE_MODULE
from spottrain_operator.core.model import JobView
from spottrain_operator.core.workloads import (
    CreateWorkload,
    DeleteWorkload,
    Part,
    ReadyWorkload,
    ReleaseWorkload,
    WorkloadAction,
    WorkloadView,
)
from spottrain_operator.core.workloads import FinishWorkload as Finish
from spottrain_operator.kube.resources import JOBS, WORKLOADS, Manifest
from spottrain_operator.objects.observe import job_view
from spottrain_operator.objects.placement import Site
from spottrain_operator.objects.queues import Queues

MINIMUM = {CapacityType.ON_DEMAND: 0, CapacityType.SPOT: 2}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=EACH_CLUSTER)
async def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    async with with_optional(request, monkeypatch, WORKLOADS, schema()) as made:
        yield made


def schema() -> Manifest:
    """Kueue's definition of a Workload, without the version that its webhook would convert."""
    text = (find_crds(KUEUE_MODULE) / "kueue.x-k8s.io_workloads.yaml").read_text()
    found: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    found["spec"]["versions"] = [each for each in found["spec"]["versions"] if each["name"] == "v1beta2"]
    return found


class Job:
    """A job in a queue, and what the operator sees and does."""

    def __init__(self, setup: Setup, view: JobView) -> None:
        self.setup, self.view = setup, view
        self.queues = Queues(setup.cluster, Site(uses_kueue=True))
        self.minimum = CreateWorkload(name="gpt-c1", part=Part.MINIMUM, content="c1", nodes=MINIMUM)

    async def workloads(self) -> tuple[WorkloadView, ...]:
        queue = await self.queues.observe(self.view)
        assert queue is not None
        assert queue.trouble is None
        return queue.workloads

    async def act(self, action: WorkloadAction) -> None:
        await self.queues.act(self.view, action, NOW)

    async def created(self) -> WorkloadView:
        await self.act(self.minimum)
        [workload] = await self.workloads()
        return workload

    async def say(self, admission: bool, **conditions: bool) -> WorkloadView:
        """Write the status as Kueue does, and wait until the operator sees it."""
        workload = await self.read()
        at = "2026-01-01T00:00:00Z"
        said = [
            {"type": kind, "status": str(holds), "reason": "Preempted", "message": "m", "lastTransitionTime": at}
            for kind, holds in conditions.items()
        ]
        assigned = [{"name": "spot", "count": 2, "flavors": {"cpu": "default"}, "resourceUsage": {"cpu": "1"}}]
        admitted = {"admission": {"clusterQueue": "all", "podSetAssignments": assigned}} if admission else {}
        new = workload | {"status": {"conditions": said} | admitted}
        await self.setup.direct.replace(WORKLOADS, new, subresource="status")
        async with asyncio.timeout(20):
            while True:
                [seen] = await self.workloads()
                if (seen.admitted, seen.evicted) == (conditions["Admitted"], conditions.get("Evicted", False)):
                    return seen
                await asyncio.sleep(0.01)

    async def read(self) -> Manifest:
        found = await self.setup.direct.get(WORKLOADS, "gpt-c1", namespace=self.setup.namespace)
        assert found is not None
        return found

    async def condition(self, kind: str) -> tuple[str, str]:
        [found] = [each for each in (await self.read())["status"]["conditions"] if each["type"] == kind]
        return found["status"], found["reason"]


@pytest.fixture
async def job(setup: Setup) -> Job:
    meta = {"name": "gpt", "labels": {LABEL_QUEUE: "team-a"}}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": MINIMAL}
    if isinstance(setup, RealSetup):
        setup.kubectl.create(manifest, setup.namespace)
    else:
        setup.direct.put_job(manifest | {"metadata": meta | {"namespace": setup.namespace}})
    found = await setup.direct.get(JOBS, "gpt", namespace=setup.namespace)
    assert found is not None
    return Job(setup, job_view(found))


async def test_a_workload_is_seen_at_once_as_it_was_made_and_made_once(job: Job) -> None:
    workload = await job.created()
    assert (workload.part, workload.content, workload.nodes) == (Part.MINIMUM, "c1", MINIMUM)
    assert (workload.reserved, workload.admitted, workload.evicted, workload.active) == (False, False, False, True)
    assert await job.created() == workload
    made = await job.read()
    assert made["spec"]["queueName"] == "team-a"
    assert made["metadata"]["ownerReferences"][0]["uid"] == job.view.uid
    assert not made["metadata"].get("finalizers"), "with Kueue's, it would keep its quota after its job"


async def test_what_kueue_evicts_is_released_and_keeps_its_place(job: Job) -> None:
    await job.created()
    admitted = await job.say(True, QuotaReserved=True, Admitted=True)
    assert (admitted.grants, admitted.ready) == (True, False)
    await job.act(ReadyWorkload(name="gpt-c1", uid=admitted.uid))
    assert (await job.workloads())[0].ready
    evicted = await job.say(True, QuotaReserved=True, Admitted=True, Evicted=True)
    assert (evicted.reserved, evicted.grants, evicted.reason, evicted.message) == (True, False, "Preempted", "m")
    await job.act(ReleaseWorkload(name="gpt-c1", uid=evicted.uid))
    [released] = await job.workloads()
    assert (released.uid, released.reserved, released.admitted) == (evicted.uid, False, False)
    assert "admission" not in (await job.read())["status"]
    assert await job.condition("Requeued") == ("True", "Preempted")
    assert await job.condition("Evicted") == ("True", "Preempted"), "Kueue takes it back when it admits it again"
    assert await job.condition("PodsReady") == ("False", "WaitForStart")
    await job.act(ReleaseWorkload(name="gpt-c1", uid="another"))


async def test_what_is_not_evicted_is_not_released(job: Job) -> None:
    await job.created()
    admitted = await job.say(True, QuotaReserved=True, Admitted=True)
    await job.act(ReleaseWorkload(name="gpt-c1", uid=admitted.uid))
    assert (await job.workloads())[0].grants


@pytest.mark.parametrize("succeeded", [True, False])
async def test_a_finished_workload_says_how_its_job_ended(job: Job, succeeded: bool) -> None:
    workload = await job.created()
    await job.act(Finish(name="gpt-c1", uid=workload.uid, succeeded=succeeded, message="x" * 5000))
    assert (await job.workloads())[0].finished
    assert await job.condition("Finished") == ("True", "Succeeded" if succeeded else "Failed")


async def test_only_this_workload_is_deleted(job: Job) -> None:
    workload = await job.created()
    await job.act(DeleteWorkload(name="gpt-c1", uid="another"))
    assert await job.workloads() == (workload,)
    await job.act(DeleteWorkload(name="gpt-c1", uid=workload.uid))
    assert await job.workloads() == ()
    await job.act(DeleteWorkload(name="gpt-c1", uid=workload.uid))


async def test_a_refused_workload_is_trouble_until_it_is_accepted(job: Job) -> None:
    job.minimum = CreateWorkload(name="Not A Name!", part=Part.MINIMUM, content="c1", nodes=MINIMUM)
    if not isinstance(job.setup, RealSetup):
        return  # it checks no names
    await job.act(job.minimum)
    queue = await job.queues.observe(job.view)
    assert queue is not None
    assert queue.trouble is not None
    assert "Not A Name!" in queue.trouble.message
