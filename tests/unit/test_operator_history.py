"""The course of a job in its TrainingJobHistory.

The tests show what is kept or reset, and what a failed write costs.
"""

from __future__ import annotations

import copy
import gc
from datetime import UTC, datetime, timedelta

import pytest

from spottrain_api.history import HISTORY_FIELD, MAX_POINTS, HistoryPoint
from spottrain_api.v1alpha1.status import Phase, ProgressStatus, TrainingJobStatus
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import HISTORIES, Manifest
from spottrain_operator.objects.history import Course, HistoryKeeper
from world.cluster import MemoryCluster
from world.faults import WRITES, Fault

KEY = JobKey(namespace="team", name="gpt")
NOW = datetime(2026, 1, 1, 0, 0, 0, 600, tzinfo=UTC)


def unreachable() -> Fault:
    return Fault(error=ClusterError("connection refused"), verbs=WRITES, resource=HISTORIES)


def job(uid: str = "u1") -> Manifest:
    return {"metadata": {"namespace": KEY.namespace, "name": KEY.name, "uid": uid}}


class Keeper:
    """What an operator keeps of the job's course, and where it writes that."""

    def __init__(self, cluster: MemoryCluster, **options: float) -> None:
        self.histories = HistoryKeeper(cluster, **options)
        self.course = Course()


async def keep(
    keeper: Keeper,
    step: int,
    *,
    uid: str = "u1",
    phase: Phase = Phase.RUNNING,
    behind: timedelta = timedelta(),
) -> None:
    """Write a point for the step, a minute after that before. The clock is `behind`."""
    status = TrainingJobStatus(phase=phase, progress=ProgressStatus(step=step))
    await keeper.histories.keep(job(uid), keeper.course, status, NOW + timedelta(minutes=step) - behind)


def steps(cluster: MemoryCluster) -> list[int]:
    rows = cluster.histories[KEY.namespace, KEY.name][HISTORY_FIELD].splitlines()
    return [int(row.split(",")[1]) for row in rows]


def stored_times(cluster: MemoryCluster) -> list[float]:
    rows = cluster.histories[KEY.namespace, KEY.name][HISTORY_FIELD].splitlines()
    return [float(row.split(",")[0]) for row in rows]


async def test_a_new_operator_goes_on_with_what_the_one_before_kept() -> None:
    cluster = MemoryCluster()
    await keep(Keeper(cluster), 1)
    await keep(Keeper(cluster), 2)
    assert steps(cluster) == [1, 2]


async def test_a_job_of_the_same_name_begins_its_own_once_the_old_one_is_gone() -> None:
    cluster = MemoryCluster()
    await keep(Keeper(cluster), 1)
    keeper = Keeper(cluster)
    await keep(keeper, 2, uid="u2")
    assert steps(cluster) == [1]
    cluster.histories.clear()
    await keep(keeper, 3, uid="u2")
    assert steps(cluster) == [2, 3]


@pytest.mark.parametrize("owners", [[], [{"uid": "u1"}], [{"uid": "other", "controller": True}]])
async def test_one_that_is_not_the_jobs_is_neither_read_nor_changed(
    owners: list[Manifest], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = MemoryCluster()
    metadata = {"namespace": KEY.namespace, "name": KEY.name, "ownerReferences": owners}
    await cluster.create(HISTORIES, {"metadata": metadata, HISTORY_FIELD: "mine"})
    before = copy.deepcopy(cluster.histories)
    keeper = Keeper(cluster)
    await keep(keeper, 1)
    await keep(keeper, 2)
    assert cluster.histories == before
    assert "another TrainingJobHistory has its name; it is left alone" in caplog.text


@pytest.mark.parametrize(
    "row",
    ["1,2,3", "now,1,2.0,3.0,1,1,1,0,Running", "1,2,3\r4,5,6", f'"{"x" * 131_073}'],
    ids=["too few cells", "no number", "a lone carriage return", "too long a cell"],
)
async def test_a_damaged_one_begins_anew(row: str) -> None:
    cluster = MemoryCluster()
    await keep(Keeper(cluster), 1)
    cluster.histories[KEY.namespace, KEY.name][HISTORY_FIELD] = f"{row}\n"
    await keep(Keeper(cluster), 2)
    assert steps(cluster) == [2]


@pytest.mark.parametrize("takes_effect", [False, True], ids=["no effect", "the answer is lost"])
async def test_points_that_could_not_be_written_are_written_with_the_next(takes_effect: bool) -> None:
    cluster = MemoryCluster()
    keeper = Keeper(cluster)
    await keep(keeper, 1)
    hooks = cluster.after if takes_effect else cluster.before
    hooks.append(unreachable())
    await keep(keeper, 2)
    hooks.clear()
    await keep(keeper, 3)
    assert steps(cluster) == [1, 2, 3]


@pytest.mark.parametrize("lost", [(), (6, 7)], ids=["written", "answers are lost"])
async def test_a_leader_whose_clock_is_behind_keeps_what_is_stored(lost: tuple[int, ...]) -> None:
    cluster = MemoryCluster()
    before = Keeper(cluster)
    for step in range(1, 6):
        await keep(before, step)
    after = Keeper(cluster)
    for step in range(6, 12):
        cluster.after = [unreachable()] if step in lost else []
        await keep(after, step, behind=timedelta(minutes=3.5))
    assert steps(cluster) == list(range(1, 12))
    times = stored_times(cluster)
    assert times == sorted(times)


async def test_what_is_forgotten_is_read_again() -> None:
    cluster = MemoryCluster()
    keeper = Keeper(cluster)
    await keep(keeper, 1)
    cluster.histories.clear()
    keeper.course = Course()
    await keep(keeper, 2)
    assert steps(cluster) == [2]


async def test_what_is_written_is_no_longer_kept() -> None:
    before = num_points()
    keeper = Keeper(MemoryCluster(), write_seconds=600)
    for step in range(MAX_POINTS):
        await keep(keeper, step)
    assert num_points() - before <= 12


def num_points() -> int:
    gc.collect()
    return sum(type(each) is HistoryPoint for each in gc.get_objects())


async def test_a_long_history_is_thinned_out() -> None:
    cluster = MemoryCluster()
    keeper = Keeper(cluster, write_seconds=6000)
    for step in range(MAX_POINTS + 102):
        await keep(keeper, step)
    kept = steps(cluster)
    assert len(kept) <= MAX_POINTS
    assert kept[0] == 0
    assert kept[-500:] == list(range(MAX_POINTS + 101 - 500, MAX_POINTS + 101))
