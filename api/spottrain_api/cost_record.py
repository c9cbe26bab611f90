"""What a job cost, day by day.

The operator keeps it in a TrainingJobCost, which stays when the job is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from spottrain_api.settings.resource import StatusResource
from spottrain_api.v1alpha1.spending import CauseCost, CostCause, DayCost, PoolCost

COST_KIND = "TrainingJobCost"
COST_PLURAL = "trainingjobcosts"
# So many days of one job are kept, and a record is deleted once its newest day is older.
DAYS_KEPT = 100
# Pools of one day beyond these count as one without a name.
MAX_POOLS = 32
NOT_RECORDED = "not recorded"
# Sums of many amounts may differ by so much.
_NOTHING = 1e-6


class CostRecord(StatusResource):
    """What one job cost, day by day."""

    job: Annotated[str, Field(description="Name of the TrainingJob.")]
    uid: Annotated[str, Field(description="Its uid, as a later job may have the same name.")]
    days: Annotated[
        tuple[DayCost, ...],
        Field(max_length=DAYS_KEPT, description="Cost of each day that had one, oldest first."),
    ] = ()


def record_name(job: str, uid: str) -> str:
    """Name of a job's record: a job that is created anew under the same name has another."""
    return f"{job}-{uid[:13]}"


def add_pools(before: Iterable[PoolCost], charged: Iterable[PoolCost]) -> tuple[PoolCost, ...]:
    """The sums by capacity type and pool, in this order."""
    sums: defaultdict[tuple[str, str], list[PoolCost]] = defaultdict(list)
    known = {(each.capacity_type, each.pool) for each in before}
    for each in (*before, *charged):
        key = (each.capacity_type, each.pool)
        if key not in known and len(known) >= MAX_POOLS:
            key = (each.capacity_type, "")
        known.add(key)
        sums[key].append(each)
    return tuple(
        PoolCost(
            capacity_type=kind,
            pool=pool,
            total=sum(each.total for each in parts),
            on_demand_only=sum(each.on_demand_only for each in parts),
        )
        for (kind, pool), parts in sorted(sums.items())
    )


def add_causes(before: Iterable[CauseCost], charged: Iterable[CauseCost]) -> tuple[CauseCost, ...]:
    """The sums by cause, in the order of the causes."""
    sums: defaultdict[str, list[CauseCost]] = defaultdict(list)
    for each in (*before, *charged):
        sums[each.cause].append(each)
    known = [cause.value for cause in CostCause]
    return tuple(
        CauseCost(
            cause=cause,
            total=sum(each.total for each in sums[cause]),
            on_demand_only=sum(each.on_demand_only for each in sums[cause]),
        )
        for cause in (*known, *(each for each in sums if each not in known))
        if cause in sums
    )


def all_causes(causes: Iterable[CauseCost], pools: Iterable[PoolCost]) -> tuple[CauseCost, ...]:
    """The causes, which add up to the cost of the pools: what an older version recorded has none."""
    known, paid = tuple(causes), tuple(pools)
    rest = sum(each.total for each in paid) - sum(each.total for each in known)
    alone = sum(each.on_demand_only for each in paid) - sum(each.on_demand_only for each in known)
    if rest <= _NOTHING:
        return known
    return (*known, CauseCost(cause=NOT_RECORDED, total=rest, on_demand_only=max(0.0, alone)))


def merge_days(recorded: Iterable[DayCost], newer: Iterable[DayCost], keep: int = DAYS_KEPT) -> tuple[DayCost, ...]:
    """The newest days of both. Where both have a day, it is as `newer` says."""
    merged = {(each.day, each.currency): each for each in (*recorded, *newer)}
    return tuple(merged[key] for key in sorted(merged)[-keep:])
