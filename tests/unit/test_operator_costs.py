"""The records of what jobs cost: when they are written, and that they outlive the jobs."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from operator_world import CrashingCluster, World
from operator_world import job as new_job
from spottrain_api.cost_record import DAYS_KEPT, record_name
from spottrain_api.v1alpha1.spending import CostStatus, DayCost, PoolCost
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import COSTS
from spottrain_operator.objects.costs import OVER_SECONDS, WRITE_SECONDS, CostKeeper, Spending
from world.cluster import MemoryCluster
from world.faults import WRITES, Fault

KEY = JobKey(namespace="team", name="gpt")
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TODAY = NOW.date()
PRICES = {"onDemand": {"min": 1, "pricePerHour": 3600.0}, "spot": {"max": 2, "pricePerHour": 360.0}}


def status(total: float, day: date = TODAY, **changes: Any) -> TrainingJobStatus:
    pools = (PoolCost(capacity_type="spot", total=total, on_demand_only=3 * total),)
    return TrainingJobStatus(cost=CostStatus(days=(DayCost(day=day, pools=pools),)), **changes)


class Operator:
    """One process that keeps the cost of one job."""

    def __init__(self, cluster: MemoryCluster, uid: str = "u1") -> None:
        self._keeper, self._uid = CostKeeper(cluster), uid
        self._spending = Spending()

    async def keep(self, found: TrainingJobStatus, seconds: float = 0.0) -> None:
        await self._keeper.keep(KEY, self._uid, self._spending, found, NOW + timedelta(seconds=seconds))

    async def close(self) -> None:
        await self._keeper.write(KEY, self._uid, self._spending, NOW)


def recorded(cluster: MemoryCluster, uid: str = "u1") -> list[tuple[str, float]]:
    """Days and their cost."""
    found = cluster.costs.get((KEY.namespace, record_name(KEY.name, uid)))
    return [(each["day"], sum(pool["total"] for pool in each["pools"])) for each in found["days"]] if found else []


async def test_a_job_that_runs_is_recorded_now_and_then() -> None:
    cluster = MemoryCluster()
    operator = Operator(cluster)
    for second in range(0, int(WRITE_SECONDS), 60):
        await operator.keep(status(second), second)
    assert recorded(cluster) == []
    await operator.keep(status(7), WRITE_SECONDS)
    await operator.keep(status(8), WRITE_SECONDS + 60)
    assert recorded(cluster) == [("2026-03-01", 7.0)]


async def test_the_end_of_a_job_and_its_deletion_are_recorded_at_once() -> None:
    cluster = MemoryCluster()
    ended, deleted = Operator(cluster), Operator(cluster, "u2")
    await ended.keep(status(1))
    await ended.keep(status(2, completion_time=NOW))
    await deleted.keep(status(3))
    await deleted.close()
    assert recorded(cluster) == [("2026-03-01", 2.0)]
    assert recorded(cluster, "u2") == [("2026-03-01", 3.0)]


async def test_a_new_operator_adds_days_and_counts_none_twice() -> None:
    cluster = MemoryCluster()
    for day, total in ((1, 5.0), (1, 6.0), (2, 1.0)):
        operator = Operator(cluster)
        await operator.keep(status(total, date(2026, 3, day)))
        await operator.close()
    assert recorded(cluster) == [("2026-03-01", 6.0), ("2026-03-02", 1.0)]


async def test_a_new_operator_writes_nothing_for_jobs_that_are_long_over() -> None:
    cluster = MemoryCluster()
    await Operator(cluster).keep(status(1, completion_time=NOW), OVER_SECONDS + 1)
    assert cluster.num_reads[COSTS] == 0


async def test_a_job_without_a_cost_has_no_record() -> None:
    cluster = MemoryCluster()
    operator = Operator(cluster)
    await operator.keep(TrainingJobStatus(completion_time=NOW))
    await operator.close()
    assert cluster.costs == {}


async def test_a_record_that_could_not_be_written_is_written_later(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    operator = Operator(cluster)
    cluster.before.append(Fault(error=ClusterError("connection refused"), verbs=WRITES, resource=COSTS))
    await operator.keep(status(1, completion_time=NOW))
    assert "what team/gpt cost was not recorded; the operator retries: connection refused" in caplog.text
    cluster.before.clear()
    await operator.keep(status(1, completion_time=NOW), 60)
    assert recorded(cluster) == [("2026-03-01", 1.0)]


async def test_records_of_long_ago_make_way_for_a_new_one() -> None:
    cluster = MemoryCluster()
    for uid, age in (("old", DAYS_KEPT + 1), ("kept", DAYS_KEPT)):
        operator = Operator(cluster, uid)
        await operator.keep(status(1, NOW.date() - timedelta(days=age)))
        await operator.close()
    operator = Operator(cluster, "new")
    await operator.keep(status(1))
    await operator.close()
    assert sorted(name for _, name in cluster.costs) == ["gpt-kept", "gpt-new"]


async def test_what_a_job_cost_is_known_after_its_deletion() -> None:
    cluster = CrashingCluster()
    cluster.put_job(new_job(capacity=PRICES))
    world = World(cluster)
    await world.until_finished()
    total = world.status["cost"]["total"]
    cluster.jobs.clear()
    await world.turn()
    [record] = cluster.costs.values()
    assert record["job"] == "gpt"
    assert total > 0
    assert sum(pool["total"] for day in record["days"] for pool in day["pools"]) == pytest.approx(total)


async def test_what_a_job_cost_that_is_deleted_while_it_runs_is_known() -> None:
    cluster = CrashingCluster()
    cluster.put_job(new_job(capacity=PRICES))
    world = World(cluster)
    await world.until_running()
    assert cluster.costs == {}
    total = world.status["cost"]["total"]
    cluster.jobs.clear()
    await world.turn()
    [record] = cluster.costs.values()
    assert sum(pool["total"] for day in record["days"] for pool in day["pools"]) == pytest.approx(total)
