"""The cloud: what is announced, what goes when, and what is recorded.

The machines only take notes.
"""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spottrain_local.cloud import Cloud, Instance
from spottrain_local.cluster import Cluster
from spottrain_local.control_api import serve_control_api
from spottrain_local.layout import ClusterLayout, LocalClusterError
from spottrain_local.metadata.interruption import Interruption
from spottrain_local.shapes import Provider
from spottrain_local.spec import ClusterSpec, NodePool

POOLS = ClusterSpec(
    nodes=[NodePool(name="spot", count=2, capacity_type="spot"), NodePool(name="on-demand")]
).pool_of_nodes()
CLOUDS: tuple[Provider, ...] = ("eks", "gke", "aks")


class NotedMachines:
    """`Machines` in memory."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self.announced: dict[str, Interruption] = {}
        self.forgotten: list[tuple[str, bool]] = []
        self.erased: list[str] = []
        self.changed = asyncio.Event()
        self.disk_is_full = False

    def _write(self) -> None:
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def start(self, instance: Instance) -> None:
        assert instance.node not in self.running, "started twice"
        self._write()
        self.running[instance.node] = instance.instance_id

    async def kill(self, node: str) -> None:
        self.running.pop(node, None)
        self.changed.set()

    def erase(self, node: str) -> None:
        assert node not in self.running, "erased while it runs"
        self.erased.append(node)

    def announce(self, node: str, interruption: Interruption | None) -> None:
        self.announced.pop(node, None)
        if interruption:
            self._write()
            self.announced[node] = interruption

    async def forget(self, node: str, *, with_pods: bool) -> None:
        await asyncio.sleep(0)
        self.forgotten.append((node, with_pods))
        self.changed.set()


@pytest.fixture
def machines() -> NotedMachines:
    return NotedMachines()


@pytest.fixture
async def cloud(machines: NotedMachines, tmp_path: Path) -> AsyncIterator[Cloud]:
    cloud = Cloud(POOLS, machines, tmp_path / "instances.json")
    cloud.start()
    yield cloud
    await cloud.stop()


async def test_all_nodes_start(cloud: Cloud, machines: NotedMachines) -> None:
    assert set(machines.running) == {"spot-0", "spot-1", "on-demand-0"}


async def test_a_preempted_node_goes_at_the_deadline(cloud: Cloud, machines: NotedMachines) -> None:
    cloud.preempt(["spot-0"], 0.05)
    assert "spot-0" in machines.running
    assert machines.announced["spot-0"].kind == "preempt"
    await asyncio.wait_for(machines.changed.wait(), 5)
    assert set(machines.running) == {"spot-1", "on-demand-0"}


async def test_what_was_not_announced_can_not_be_cancelled(cloud: Cloud, machines: NotedMachines) -> None:
    cloud.preempt(["spot-0"], 60)
    with pytest.raises(LocalClusterError, match="announced for the node spot-1, so there is nothing to cancel"):
        cloud.cancel(["spot-0", "spot-1"])
    assert set(machines.announced) == {"spot-0"}, "all or none"


async def test_a_cancelled_node_stays(cloud: Cloud, machines: NotedMachines) -> None:
    cloud.preempt(["spot-0", "spot-1"], 0.05)
    cloud.cancel(["spot-0"])
    await asyncio.wait_for(machines.changed.wait(), 5)
    assert set(machines.running) == {"spot-0", "on-demand-0"}
    assert "spot-0" not in machines.announced


async def test_a_rebalance_recommendation_takes_nothing(cloud: Cloud, machines: NotedMachines) -> None:
    cloud.preempt(["spot-0"], 0, kind="rebalance")
    cloud.preempt(["spot-0"], 0.0)  # the real notice may follow
    await asyncio.wait_for(machines.changed.wait(), 5)
    assert "spot-0" not in machines.running


async def test_a_restored_node_is_another_instance(cloud: Cloud, machines: NotedMachines) -> None:
    before = machines.running["spot-0"]
    await cloud.kill(["spot-0"])
    await cloud.restore(["spot-0"])
    assert machines.running["spot-0"] not in ("", before)
    assert machines.erased == ["spot-0"]
    assert machines.forgotten == [("spot-0", True)]


async def test_nodes_that_are_gone_are_restored_beside_one_that_is_not(cloud: Cloud, machines: NotedMachines) -> None:
    await cloud.kill(["spot-0"])
    cloud.preempt(["spot-1"], 60)
    with pytest.raises(LocalClusterError) as refused:
        await cloud.restore(["spot-1", "on-demand-0", "spot-0"])
    goes_at = machines.announced["spot-1"].deadline
    assert str(refused.value) == (
        f"The node spot-1 is not gone yet: it goes at {goes_at:%H:%M:%S} UTC. Restore it then,"
        " or let it stay: `spottrain local cancel spot-1`."
        " The node on-demand-0 is not gone, so there is nothing to restore. Started fresh instances: spot-0."
    )
    assert set(machines.running) == {"spot-0", "spot-1", "on-demand-0"}
    assert machines.erased == ["spot-0"]


async def test_restoring_twice_at_once_starts_one(cloud: Cloud, machines: NotedMachines) -> None:
    await cloud.kill(["spot-0"])
    outcomes = await asyncio.gather(cloud.restore(["spot-0"]), cloud.restore(["spot-0"]), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome] == [LocalClusterError]
    assert "spot-0" in machines.running


async def test_the_record_outlives_the_supervisor(tmp_path: Path) -> None:
    clock = [datetime(2026, 1, 1, tzinfo=UTC)]
    first = NotedMachines()
    cloud = Cloud(POOLS, first, tmp_path / "instances.json", lambda: clock[0])
    cloud.start()
    await cloud.kill(["on-demand-0"])
    cloud.preempt(["spot-0"], 60)
    cloud.preempt(["spot-1"], 600)
    await cloud.stop()

    clock[0] += timedelta(seconds=120)
    second = NotedMachines()
    again = Cloud(POOLS, second, tmp_path / "instances.json", lambda: clock[0])
    again.start()
    assert second.running == {"spot-1": first.running["spot-1"]}, "spot-0's deadline passed meanwhile"
    assert set(second.announced) == {"spot-1"}
    await asyncio.wait_for(second.changed.wait(), 5)
    await again.stop()
    assert {node for node, _ in second.forgotten} >= {"on-demand-0"}


async def test_nodes_go_though_their_state_can_not_be_written(machines: NotedMachines, tmp_path: Path) -> None:
    record = tmp_path / "state" / "instances.json"
    record.parent.mkdir()
    cloud = Cloud(POOLS, machines, record)
    cloud.start()
    cloud.preempt(["spot-0"], 0.05)
    shutil.rmtree(record.parent)
    await asyncio.wait_for(machines.changed.wait(), 5)
    await cloud.kill(["spot-1"])
    assert set(machines.running) == {"on-demand-0"}
    record.parent.mkdir()
    await cloud.kill(["on-demand-0"])
    await cloud.stop()
    assert {instance.state for instance in Cloud(POOLS, machines, record).instances()} == {"gone"}


async def test_a_node_that_could_not_be_started_is_restored_later(cloud: Cloud, machines: NotedMachines) -> None:
    await cloud.kill(["spot-0"])
    machines.disk_is_full = True
    with pytest.raises(OSError, match="No space left"):
        await cloud.restore(["spot-0"])
    machines.disk_is_full = False
    await cloud.restore(["spot-0"])
    assert "spot-0" in machines.running


async def test_a_full_disk_is_reported_in_a_sentence(
    cloud: Cloud, machines: NotedMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(layout=ClusterLayout(root=tmp_path))
    async with serve_control_api(cluster.layout.socket, cloud, lambda: {"nodes": []}, lambda: None):
        machines.disk_is_full = True
        with pytest.raises(LocalClusterError, match="No space left on device"):
            await asyncio.to_thread(cluster.preempt, ["spot-0"], notice_seconds=60)
        machines.disk_is_full = False
        await asyncio.to_thread(cluster.preempt, ["spot-0"], notice_seconds=60)
    assert set(machines.announced) == {"spot-0"}


@pytest.mark.parametrize(
    ("nodes", "seconds", "sentence"),
    [
        pytest.param(["spot-7"], 30, "There is no node 'spot-7'", id="unknown"),
        pytest.param(["on-demand-0"], 30, "clouds take back only spot nodes", id="on-demand"),
        pytest.param(["spot-0"], -1, "between 0 s and 24 h", id="negative notice"),
        pytest.param([], 30, "Name at least one node", id="no node"),
    ],
)
async def test_what_can_not_be_preempted(
    cloud: Cloud, machines: NotedMachines, nodes: list[str], seconds: float, sentence: str
) -> None:
    with pytest.raises(LocalClusterError, match=sentence):
        cloud.preempt(nodes, seconds)
    assert not machines.announced


async def test_a_cloud_announces_only_what_it_knows(machines: NotedMachines, tmp_path: Path) -> None:
    pools = ClusterSpec(
        nodes=[NodePool(name=name, provider=name, capacity_type="spot") for name in CLOUDS]
    ).pool_of_nodes()
    cloud = Cloud(pools, machines, tmp_path / "instances.json")
    cloud.start()
    for node in ("gke-0", "aks-0"):
        with pytest.raises(LocalClusterError) as refusal:
            cloud.preempt(["eks-0", node], 60, kind="rebalance")
        assert str(refusal.value) == (
            f"The node {node} is of {node[:3]}, which announces no rebalance. Use a node with the provider eks, or"
            " `--kind preempt or maintenance`."
        )
    assert not machines.announced, "all or none"
    cloud.preempt([f"{name}-0" for name in CLOUDS], 60, kind="maintenance")
    assert {each.kind for each in machines.announced.values()} == {"maintenance"}
    await cloud.stop()


async def test_one_wrong_name_changes_nothing(cloud: Cloud, machines: NotedMachines) -> None:
    with pytest.raises(LocalClusterError):
        await cloud.kill(["spot-0", "nonsense"])
    assert "spot-0" in machines.running


async def test_a_second_notice_is_refused(cloud: Cloud) -> None:
    cloud.preempt(["spot-0"], 60)
    with pytest.raises(LocalClusterError, match="already announced"):
        cloud.preempt(["spot-0"], 10)


async def test_what_is_gone_can_only_be_restored(cloud: Cloud) -> None:
    await cloud.kill(["spot-0"])
    with pytest.raises(LocalClusterError, match="gone already"):
        cloud.preempt(["spot-0"], 10)
    with pytest.raises(LocalClusterError, match="gone already"):
        await cloud.kill(["spot-0"])
