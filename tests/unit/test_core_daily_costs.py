"""What nodes cost on each day, as the status keeps it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest

from scene import NOW, Scene, commit, pod, training_job, waiting_job
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.cost_record import MAX_POOLS, add_pools, merge_days, record_name
from spottrain_api.v1alpha1.spending import CostStatus, DayCost, PoolCost
from spottrain_api.v1alpha1.status import Phase, ProgressStatus, Transition
from spottrain_operator.core.facts.daily_costs import DAYS_IN_STATUS, Charge, add_charges, parts_by_day

PRICES = {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)


def paid(day: int, total: float = 1.0, pool: str = "", kind: str = "spot") -> Charge:
    cost = PoolCost(capacity_type=kind, pool=pool, total=total, on_demand_only=3 * total)
    return Charge(day=date(2026, 3, day), cost=cost)


def amounts(days: tuple[DayCost, ...]) -> list[tuple[int, str, float]]:
    return [(each.day.day, each.currency, round(sum(pool.total for pool in each.pools), 6)) for each in days]


def charged(scene: Scene, since: datetime, seconds: float) -> CostStatus:
    """The cost of a job of two on-demand and two spot nodes so long after the last record."""
    scene = scene.status(accounted_at=since, cost=None)
    for sequence in range(1, 5):
        scene = scene.pod(sequence, scheduled_at=since - timedelta(hours=1))
    cost = replace(scene, now=since + timedelta(seconds=seconds)).plan().status.cost
    assert cost is not None
    return cost


def test_a_day_ends_at_midnight_in_utc() -> None:
    before = MIDNIGHT.astimezone() - timedelta(hours=1)
    parts = list(parts_by_day(before, before + timedelta(hours=26)))
    assert parts == [(date(2026, 3, 1), 3600.0), (date(2026, 3, 2), 86400.0), (date(2026, 3, 3), 3600.0)]
    assert list(parts_by_day(MIDNIGHT, MIDNIGHT)) == []


def test_the_days_of_a_job_add_up_to_its_cost() -> None:
    cost = charged(training_job(capacity=PRICES), MIDNIGHT - timedelta(minutes=30), 3600.0)
    assert amounts(cost.days) == [(1, "USD", 4.0), (2, "USD", 4.0)]
    assert cost.total == pytest.approx(8.0)
    assert cost.on_demand_only == pytest.approx(12.0)
    alone = {each.capacity_type: each.on_demand_only for each in cost.days[1].pools}
    assert alone == pytest.approx({"on-demand": 3.0, "spot": 3.0})


def test_a_second_record_of_a_day_adds_to_it() -> None:
    scene = training_job(capacity=PRICES).status(accounted_at=NOW, cost=None)
    once = scene.later(60).decided()
    twice = once.later(60).plan().status.cost
    assert twice is not None
    [day] = twice.days
    assert sum(each.total for each in day.pools) == pytest.approx(twice.total)
    first = once.observed.job.status.cost
    assert first is not None
    assert twice.total == pytest.approx(2 * first.total)


def seldom_recorded() -> Scene:
    """Two on-demand and two spot nodes train since long ago, and everything was just recorded."""
    scene = training_job(capacity=PRICES).status(accounted_at=NOW, cost=None)
    for sequence in range(1, 5):
        scene = scene.pod(sequence, scheduled_at=NOW - timedelta(hours=1))
    timing = replace(scene.observed.timing, record_interval=3600.0)
    return replace(scene, observed=replace(scene.observed, timing=timing)).decided()


def causes(scene: Scene) -> dict[str, float]:
    """What half an hour from now will have cost, by cause."""
    timing = replace(scene.observed.timing, record_interval=1800.0)
    scene = replace(scene, observed=replace(scene.observed, timing=timing)).status(accounted_at=NOW, cost=None)
    for sequence in (each.sequence for each in scene.observed.pods):
        scene = scene.pod(sequence, scheduled_at=NOW - timedelta(hours=1))
    cost = scene.later(1800).plan().status.cost
    assert cost is not None
    assert sum(each.total for each in cost.causes) == pytest.approx(cost.total)
    assert sum(each.on_demand_only for each in cost.causes) == pytest.approx(cost.on_demand_only)
    assert cost.causes == cost.days[0].causes
    return {each.cause: round(each.total, 6) for each in cost.causes}


STAND_INS = {"onDemand": {"min": 1, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        (training_job(capacity=PRICES), {"Training": 4.0}),
        (training_job(capacity=PRICES).status(phase=Phase.STARTING), {"Start": 4.0}),
        (training_job(capacity=PRICES).status(phase=Phase.DRAINING), {"Start": 4.0}),
        (
            training_job(capacity=PRICES).with_pod(pod(5, capacity_type=CapacityType.SPOT)),
            {"Training": 4, "Idle": 0.5},
        ),
        (training_job(capacity=STAND_INS), {"Training": 3.0, "Fallback": 1.0}),
        (waiting_job(4, capacity=PRICES), {"Start": 4.0}),
        (waiting_job(4, capacity=PRICES, nodes={"min": 5, "max": 5}), {"Capacity": 4.0}),
        (waiting_job(4, capacity=PRICES).status(phase=Phase.SUSPENDED), {"Idle": 4.0}),
    ],
    ids=["trains", "starts", "drains", "one waits", "one stands in", "first start", "too few", "suspended"],
)
def test_each_node_costs_money_for_what_it_did(scene: Scene, expected: dict[str, float]) -> None:
    assert causes(scene) == expected


def test_steps_that_are_made_again_cost_money_again() -> None:
    """The job had made 80 steps before a loss, and has made 50 of them now."""
    lost = Transition(generation=0, reason="NodeLost", at=NOW, last_step=80, world_size_before=4)
    progress = ProgressStatus(step=50, last_step_at=NOW)
    assert causes(training_job(capacity=PRICES).status(transitions=(lost,), progress=progress)) == {"Redone": 4.0}
    past = ProgressStatus(step=80, last_step_at=NOW)
    assert causes(training_job(capacity=PRICES).status(transitions=(lost,), progress=past)) == {"Training": 4.0}


def test_a_node_that_is_gone_is_paid_for_up_to_the_pass_that_sees_it() -> None:
    gone = seldom_recorded().later(360).without_pod(4)
    cost = gone.plan().status.cost
    assert cost is not None
    assert cost.total == pytest.approx(0.1 * (3 + 3 + 1 + 1))
    later = gone.decided().later(360).without_pod(3).plan().status.cost
    assert later is not None
    assert later.total == pytest.approx(cost.total + 0.1 * (3 + 3 + 1))


def test_a_lost_node_is_paid_for_until_kubernetes_shows_that_it_is_gone() -> None:
    lost = seldom_recorded().forgets(4).later(360).node(4, ready=False)
    cost = lost.plan().status.cost
    assert cost is not None
    assert cost.total == pytest.approx(0.1 * (3 + 3 + 1 + 1))


def test_the_nodes_of_a_finished_job_are_paid_for_until_its_pods_are_gone() -> None:
    done = seldom_recorded().all_say(phase=AgentPhase.SUCCEEDED, commit=commit(1, 1000)).later(10).decided()
    assert done.observed.job.status.phase is Phase.SUCCEEDED
    leaving = done.later(360).pod(1, phase="Succeeded", exit_code=0)
    cost = leaving.plan().status.cost
    assert cost is not None
    assert cost.total == pytest.approx(370 / 3600 * (3 + 3 + 1 + 1))
    left = leaving.decided().without_pod(2).without_pod(3).without_pod(4)
    assert left.decided().later(7200).plan().status == left.decided().observed.job.status


def test_a_new_currency_leaves_the_days_as_they_are() -> None:
    days = add_charges((), [paid(1)], "EUR")
    before = CostStatus(total=5, currency="EUR", days=days)
    cost = training_job(capacity=PRICES).status(accounted_at=NOW, cost=before).later(60).plan().status.cost
    assert cost is not None
    assert cost.total < 1
    assert {each.currency for each in cost.days} == {"EUR", "USD"}


def test_the_status_keeps_the_newest_days() -> None:
    days: tuple[DayCost, ...] = ()
    for day in range(1, 12):
        days = add_charges(days, [paid(day)], "USD")
    assert [each.day.day for each in days] == list(range(12 - DAYS_IN_STATUS, 12))


def test_what_is_written_twice_counts_once() -> None:
    first = add_charges((), [paid(1), paid(2)], "USD")
    newer = add_charges(first, [paid(2, 0.5), paid(3)], "USD")
    record = merge_days(merge_days(first, newer), newer)
    assert amounts(record) == [(1, "USD", 1.0), (2, "USD", 1.5), (3, "USD", 1.0)]
    assert amounts(merge_days(record, (), keep=2)) == [(2, "USD", 1.5), (3, "USD", 1.0)]


def test_pools_of_a_day_do_not_add_up_without_end() -> None:
    """As each edit of a job may name new ones."""
    pools: tuple[PoolCost, ...] = ()
    for number in range(2 * MAX_POOLS):
        pools = add_pools(pools, [paid(1, pool=f"pool-{number}").cost])
    assert len(pools) == MAX_POOLS + 1
    assert sum(each.total for each in pools) == 2 * MAX_POOLS
    assert pools[0].pool == ""


def test_two_jobs_of_a_name_have_records_of_their_own() -> None:
    assert record_name("gpt", "5a1e4f0c-9d2b-4c3a") != record_name("gpt", "77aa4f0c-9d2b-4c3a")
    assert len(record_name("j" * 50, "5a1e4f0c-9d2b-4c3a-8f00-aaaaaaaaaaaa")) <= 64
