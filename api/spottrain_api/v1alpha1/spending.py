"""What a job's time and money went into: a part of its status."""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from spottrain_api.settings.resource import StatusResource


class TimeStatus(StatusResource):
    """What the time since startTime went into, in seconds.

    The parts add up to the time from startTime to `until`.
    """

    until: Annotated[
        datetime,
        Field(
            description="Time up to which the parts are recorded: that of the newest step. While a generation starts "
            "or ends, what its time went into is not known yet."
        ),
    ]
    productive_seconds: Annotated[
        float,
        Field(
            description="Seconds of lasting steps. Steps that were redone count once. Those that a rollback undid "
            "count, too. All other parts are lost."
        ),
    ] = 0.0
    redone_seconds: Annotated[
        float,
        Field(
            description="Seconds of steps that were made again after a loss, as far as the operator had heard "
            "of them."
        ),
    ] = 0.0
    data_wait_seconds: Annotated[float, Field(description="Seconds that the slowest rank waited for data.")] = 0.0
    commit_stall_seconds: Annotated[
        float, Field(description="Seconds that saves kept the ranks from training. Drains count as restarts.")
    ] = 0.0
    start_up_seconds: Annotated[float, Field(description="Seconds of the job's start, up to its first step.")] = 0.0
    restart_seconds: Annotated[
        float,
        Field(
            description="Seconds from the last step of a generation to the first of the next: drain, commit, start "
            "and resume. Also those from the last step to the end of the job."
        ),
    ] = 0.0
    capacity_seconds: Annotated[
        float, Field(description="Seconds between generations in which fewer than nodes.min pods had a node.")
    ] = 0.0
    suspended_seconds: Annotated[float, Field(description="Seconds in which the job was suspended.")] = 0.0
    unreported_seconds: Annotated[
        float,
        Field(description="Seconds of generations whose script doesn't use the library. Nobody knows of its steps."),
    ] = 0.0


class PoolCost(StatusResource):
    """Money that nodes of one capacity type and pool have cost so far."""

    capacity_type: Annotated[str, Field(description="Capacity type of the nodes.")]
    pool: Annotated[
        str, Field(description="Name of their pool. Empty: the job has no pools, or no longer that one.")
    ] = ""
    total: Annotated[float, Field(description="Cost of these nodes so far, in the currency of the cost.")] = 0.0
    on_demand_only: Annotated[
        float,
        Field(description="Cost of as many on-demand nodes for the same time, in the currency of the cost."),
    ] = 0.0


class CostCause(StrEnum):
    """What a node cost money for.

    - Training: it made steps.
    - Redone: it made steps again that were lost.
    - Start: its generation started or ended: pulls, drain, commit, resume.
    - Capacity: it waited, as the job had fewer than nodes.min nodes.
    - Idle: it was up for no generation: to join one, as a replacement, or until its pod had ended.
    - Fallback: what on-demand nodes cost more than the spot nodes for which they stood in.
    """

    TRAINING = "Training"
    REDONE = "Redone"
    START = "Start"
    CAPACITY = "Capacity"
    IDLE = "Idle"
    FALLBACK = "Fallback"


class CauseCost(StatusResource):
    """Money that nodes have cost for one cause."""

    cause: Annotated[
        str, Field(description="What for: Training, Redone, Start, Capacity, Idle, or Fallback for the higher price.")
    ]
    total: Annotated[float, Field(description="Cost for it so far, in the currency of the cost.")] = 0.0
    on_demand_only: Annotated[
        float, Field(description="Cost of as many on-demand nodes for the same time, in the currency of the cost.")
    ] = 0.0


class DayCost(StatusResource):
    """Money that nodes have cost on one day."""

    day: Annotated[date, Field(description="The day, in UTC.")]
    currency: Annotated[str, Field(description="ISO 4217 code of the currency.")] = "USD"
    pools: Annotated[
        tuple[PoolCost, ...], Field(description="The parts of that day's cost, by capacity type and pool.")
    ] = ()
    causes: Annotated[
        tuple[CauseCost, ...], Field(description="The same cost by cause. What older versions recorded has none.")
    ] = ()
    list_prices_of: Annotated[
        date | None, Field(description="Date of the list prices in it, as the job gave no prices.")
    ] = None


class CostStatus(StatusResource):
    """Money that the job's nodes have cost so far, in `currency`."""

    total: Annotated[float, Field(description="Cost of all nodes so far, in currency.")] = 0.0
    on_demand_only: Annotated[
        float,
        Field(description="Cost of as many on-demand nodes for the same time, in currency."),
    ] = 0.0
    currency: Annotated[str, Field(description="ISO 4217 code of the currency, from capacity.currency.")] = "USD"
    display: Annotated[str, Field(description="Cost and what spot saved, as `kubectl get` shows them.")] = ""
    pools: Annotated[
        tuple[PoolCost, ...], Field(description="The parts of the total, by capacity type and pool.")
    ] = ()
    causes: Annotated[
        tuple[CauseCost, ...], Field(description="The total by cause. What older versions recorded has none.")
    ] = ()
    days: Annotated[
        tuple[DayCost, ...],
        Field(
            description="Cost of the newest days that had one, oldest first. The job's TrainingJobCost has the older "
            "ones, too."
        ),
    ] = ()
    list_prices_of: Annotated[
        date | None,
        Field(
            description="Date of the list prices in it, as the job gives no prices. They are those of one region, "
            "and not of a bill: set capacity.onDemand.pricePerHour and capacity.spot.pricePerHour."
        ),
    ] = None
