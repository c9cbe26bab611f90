"""The least that a job could have cost, if its user had known the future.

A bound, not a schedule: parts of nodes and of hours can be bought, and nothing is lost to a change of nodes. No
operator costs less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.demand import demand
from spottrain_simulator.trace import HOUR
from spottrain_simulator.traced import Cloud


class Piece(NamedTuple):
    """Some nodes for some time, at a price per node and hour."""

    price: float
    node_hours: float


def least_cost(spec: TrainingJobSpec, cloud: Cloud, node_hours: float, start: float, end: float) -> float | None:
    """The least cost of so many node hours between two times; None if there are not as many to be had."""
    pieces = sorted(
        piece for begin, until in cloud.trace.slots(start, end) for piece in _pieces(spec, cloud, begin, until)
    )
    cost, missing = 0.0, node_hours
    for piece in pieces:
        taken = min(missing, piece.node_hours)
        cost, missing = cost + taken * piece.price, missing - taken
    return None if missing > 1e-6 * node_hours else cost


def _pieces(spec: TrainingJobSpec, cloud: Cloud, begin: float, until: float) -> Iterator[Piece]:
    """What can be bought while nothing changes, the cheapest first.

    The cost of a number of nodes need not grow evenly: below nodes.min there is none, and the on-demand floor comes
    first. The lower hull of the costs is what parts of an hour cost with the best numbers.
    """
    costs = [(0, 0.0), *_costs(spec, cloud, begin)]
    hours = (until - begin) / HOUR
    at = 0
    while at < len(costs) - 1:
        number, paid = costs[at]
        price, best = min(
            ((later - paid) / (count - number), index)
            for index, (count, later) in enumerate(costs[at + 1 :], start=at + 1)
        )
        yield Piece(price, (costs[best][0] - number) * hours)
        at = best


def _costs(spec: TrainingJobSpec, cloud: Cloud, time: float) -> Iterator[tuple[int, float]]:
    """What each number of nodes costs per hour that the job may train with, and that is to be had."""
    wanted = demand(spec)
    spot = _prices(spec, cloud, time, CapacityType.SPOT, spec.nodes.max if wanted.spot else 0)
    on_demand = _prices(spec, cloud, time, CapacityType.ON_DEMAND, wanted.max_on_demand)
    floor = on_demand[: spec.capacity.on_demand.floor(spec.nodes.max)]
    others = sorted([*on_demand[len(floor) :], *spot[: wanted.spot]])
    prices = [*floor, *others]
    for number in range(max(1, spec.nodes.min), min(spec.nodes.max, len(prices)) + 1):
        yield number, sum(prices[:number])


def _prices(spec: TrainingJobSpec, cloud: Cloud, time: float, kind: CapacityType, most: int) -> list[float]:
    """The prices of the nodes of a type that are to be had, the cheapest first."""
    pools = [pool.name for pool in spec.capacity.pools if pool.kind is kind] if spec.capacity.pools else [kind.value]
    prices: list[float] = []
    for pool in pools:
        num = int(min(most, cloud.nodes_at(pool, time)))
        prices += [cloud.price_at(pool, time)] * num
    return sorted(prices)[:most]
