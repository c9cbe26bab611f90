"""The course of a job in its ConfigMap.

The tests show what is kept or reset, and what a failed write costs.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from memory_cluster import MemoryCluster
from spottrain_api.history import HISTORY_KEY, history_name
from spottrain_api.v1alpha1 import Phase, ProgressStatus, TrainingJobStatus
from spottrain_operator.cluster.client import ClusterError, JobKey, Manifest
from spottrain_operator.cluster.history import HistoryKeeper

KEY = JobKey(namespace="team", name="gpt")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Unreachable(MemoryCluster):
    down = False

    async def write_config_map(self, config_map: Manifest) -> Manifest:
        if self.down:
            raise ClusterError("connection refused")
        return await super().write_config_map(config_map)


def job(uid: str = "u1") -> Manifest:
    return {"metadata": {"namespace": KEY.namespace, "name": KEY.name, "uid": uid}}


async def keep(keeper: HistoryKeeper, step: int, *, uid: str = "u1", phase: Phase = Phase.RUNNING) -> None:
    """A point for each step, a minute apart: each is written."""
    status = TrainingJobStatus(phase=phase, progress=ProgressStatus(step=step))
    await keeper.keep(job(uid), status, NOW + timedelta(minutes=step))


def steps(cluster: MemoryCluster) -> list[int]:
    data = cluster.config_maps[KEY.namespace, history_name(KEY.name)]["data"][HISTORY_KEY]
    return [int(row.split(",")[1]) for row in data.splitlines()]


async def test_a_new_operator_goes_on_with_what_the_one_before_kept() -> None:
    cluster = MemoryCluster()
    await keep(HistoryKeeper(cluster), 1)
    await keep(HistoryKeeper(cluster), 2)
    assert steps(cluster) == [1, 2]


async def test_a_job_of_the_same_name_begins_its_own() -> None:
    cluster = MemoryCluster()
    await keep(HistoryKeeper(cluster), 1)
    await keep(HistoryKeeper(cluster), 2, uid="u2")
    assert steps(cluster) == [2]


@pytest.mark.parametrize("row", ["1,2,3", "now,1,2.0,3.0,1,1,1,0,Running"], ids=["too few cells", "no number"])
async def test_a_damaged_one_begins_anew(row: str) -> None:
    cluster = MemoryCluster()
    await keep(HistoryKeeper(cluster), 1)
    cluster.config_maps[KEY.namespace, history_name(KEY.name)]["data"][HISTORY_KEY] = f"{row}\n"
    await keep(HistoryKeeper(cluster), 2)
    assert steps(cluster) == [2]


async def test_points_that_could_not_be_written_are_written_with_the_next() -> None:
    cluster = Unreachable()
    keeper = HistoryKeeper(cluster)
    await keep(keeper, 1)
    cluster.down = True
    await keep(keeper, 2)
    cluster.down = False
    await keep(keeper, 3)
    assert steps(cluster) == [1, 2, 3]


async def test_what_is_forgotten_is_read_again() -> None:
    cluster = MemoryCluster()
    keeper = HistoryKeeper(cluster)
    await keep(keeper, 1)
    cluster.config_maps.clear()
    keeper.forget(KEY)
    await keep(keeper, 2)
    assert steps(cluster) == [2]
