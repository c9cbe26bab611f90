"""How many nodes of each type a job asks for."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.pools import pools_have


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How many pods of each type the job wants if nodes are free.

    Attributes:
        max_on_demand: The limit of on-demand.
    """

    on_demand: int
    spot: int
    max_on_demand: int

    @property
    def total(self) -> int:
        return self.on_demand + self.spot


def minimum_nodes(spec: TrainingJobSpec) -> dict[CapacityType, int]:
    """The nodes of each type without which the job can't train."""
    on_demand = min(demand(spec).on_demand, spec.nodes.min)
    return {CapacityType.ON_DEMAND: on_demand, CapacityType.SPOT: spec.nodes.min - on_demand}


def demand(spec: TrainingJobSpec, *, knows_pools: bool = True) -> Demand:
    """The on-demand floor and the spot surplus.

    A job without spot is an on-demand job. If its spot limit is below what nodes.min needs, on-demand nodes fill the
    rest. Of a type that none of the job's pools has, only the floor is asked for.
    """
    nodes, on_demand = spec.nodes, spec.capacity.on_demand
    limit = nodes.max if on_demand.max is None else min(on_demand.max, nodes.max)
    if knows_pools and not pools_have(spec, CapacityType.ON_DEMAND):
        limit = 0
    floor = on_demand.floor(nodes.max)
    spot = 0 if knows_pools and not pools_have(spec, CapacityType.SPOT) else nodes.max - floor
    if spec.capacity.spot.max is not None:
        spot = min(spot, spec.capacity.spot.max)
    wanted = limit if spot == 0 else nodes.min - spot
    return Demand(on_demand=max(floor, min(wanted, limit)), spot=spot, max_on_demand=max(floor, limit))
