"""Which of the operator's pods the Service finds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from spottrain_api.contract.names import LABEL_LEADER
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.leader_label import LeaderLabel
from spottrain_operator.kube.resources import PODS
from world.cluster import MemoryCluster
from world.faults import Fault

OURS = {"app": "spottrain"}


@pytest.fixture
async def cluster() -> MemoryCluster:
    """Three pods of the operator, of which c led, and one of somebody else."""
    cluster = MemoryCluster()
    leads = {LABEL_LEADER: "true"}
    for name, labels in {"a": OURS, "b": OURS, "c": OURS | leads, "other": leads}.items():
        await cluster.create(PODS, {"metadata": {"namespace": "system", "name": name, "labels": labels}})
    return cluster


def label(cluster: MemoryCluster, pod: str, labels: Mapping[str, str] = OURS) -> LeaderLabel:
    return LeaderLabel(cluster, namespace="system", pod=pod, labels=labels, look_seconds=0.001)


def found(cluster: MemoryCluster) -> list[str]:
    """The operator's pods that have the label."""
    pods = {name: pod["metadata"]["labels"] for (_, name), pod in cluster.pods.items()}
    return [name for name, labels in pods.items() if labels.get("app") and labels.get(LABEL_LEADER) == "true"]


async def until(cluster: MemoryCluster, names: list[str]) -> None:
    async with asyncio.timeout(5):
        while found(cluster) != names:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


async def test_the_service_finds_the_new_leader_and_not_the_one_before(cluster: MemoryCluster) -> None:
    keeping = asyncio.create_task(label(cluster, "a").keep())
    await until(cluster, ["a"])
    assert cluster.pods["system", "other"]["metadata"]["labels"] == {LABEL_LEADER: "true"}
    cluster.pods["system", "b"]["metadata"]["labels"][LABEL_LEADER] = "true"
    await until(cluster, ["a"])
    del cluster.pods["system", "a"]["metadata"]["labels"][LABEL_LEADER]
    await until(cluster, ["a"])
    keeping.cancel()


async def test_a_container_that_starts_again_leads_no_more(cluster: MemoryCluster) -> None:
    await label(cluster, "a").drop()
    assert found(cluster) == ["c"]
    await label(cluster, "c").drop()
    assert found(cluster) == []


async def test_a_failed_write_is_repeated(cluster: MemoryCluster) -> None:
    cluster.before.append(Fault(error=ClusterError("connection refused"), verbs=("patch",), resource=PODS))
    keeping = asyncio.create_task(label(cluster, "a").keep())
    _, pending = await asyncio.wait({keeping}, timeout=0.05)
    assert pending
    assert found(cluster) == ["c"]
    cluster.before.clear()
    await until(cluster, ["a"])
    keeping.cancel()


async def test_an_operator_outside_of_the_cluster_labels_nothing(cluster: MemoryCluster) -> None:
    outside = label(cluster, "c", {})
    await outside.drop()
    keeping = asyncio.create_task(outside.keep())
    _, pending = await asyncio.wait({keeping}, timeout=0.05)
    assert pending
    assert found(cluster) == ["c"]
    keeping.cancel()
