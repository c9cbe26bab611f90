"""Why a job holds no nodes for now.

Its user has suspended it, its budget is spent, it waits for quota, or for a lower price.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spottrain_api.contract.causes import Cause
from spottrain_api.v1alpha1.budget import OnExceeded
from spottrain_operator.core.facts.costs import cost_now, rate
from spottrain_operator.core.facts.dear_spot import dear_spot
from spottrain_operator.core.facts.queue import (
    content_that_counts,
    granting,
    minimum_of,
    queue_of,
    waiting_sentence,
)
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import after

# Share of budget.maxCost at which the job is close to its end.
NEARLY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The job commits, ends its generation, and holds no nodes.

    Attributes:
        cause: Why its generation ends.
        why: The same as a clause.
        way_out: What its user can do to resume it, as a clause.
    """

    cause: Cause
    why: str
    way_out: str


def pause_of(situation: Situation) -> Pause | None:
    """Why the job pauses; None if it doesn't."""
    return own_pause(situation) or _without_quota(situation) or _until_cheaper(situation)


def _until_cheaper(situation: Situation) -> Pause | None:
    prices = dear_spot(situation)
    if prices is None:
        return None
    currency = situation.spec.capacity.currency
    why = (
        f"spot nodes cost {prices.now:.2f} {currency} an hour, after {prices.usual:.2f} so far, and there is time to "
        "wait for a lower price (capacity.finishBy)"
    )
    return Pause(cause=Cause.SPOT_IS_DEAR, why=why, way_out=f"{why}. To go on now, set an earlier time")


def _without_quota(situation: Situation) -> Pause | None:
    queue = queue_of(situation)
    if queue is None or granting(situation, queue):
        return None
    why = waiting_sentence(queue, minimum_of(queue, content_that_counts(situation, queue)))
    return Pause(cause=Cause.QUOTA_TAKEN, why=why, way_out=why)


def own_pause(situation: Situation) -> Pause | None:
    """Why the job asks for no nodes, whether or not there are any; None if it does."""
    if situation.spec.run_policy.suspend:
        return Pause(
            cause=Cause.SUSPENDED,
            why="runPolicy.suspend was set",
            way_out="set runPolicy.suspend to false to go on",
        )
    budget = situation.spec.budget
    if budget is None or budget.on_exceeded is not OnExceeded.SUSPEND or spent_share(situation) < 1:
        return None
    return Pause(
        cause=Cause.BUDGET_SPENT,
        why=f"the job has cost {cost_sentence(situation)}",
        way_out=f"the budget of {money(situation)} is spent. Raise budget.maxCost above status.cost.total to go on",
    )


def money(situation: Situation) -> str:
    """budget.maxCost with its currency."""
    budget = situation.spec.budget
    return f"{budget.max_cost:.2f} {situation.spec.capacity.currency}" if budget is not None else ""


def cost_sentence(situation: Situation) -> str:
    """What the job has cost, of how much: "8.01 of 10.00 USD (budget.maxCost)"."""
    cost = cost_now(situation)
    return f"{cost.total if cost is not None else 0:.2f} of {money(situation)} (budget.maxCost)"


def spent_share(situation: Situation) -> float:
    """Which share of the budget the job has cost; 0 without a budget."""
    budget = situation.spec.budget
    cost = cost_now(situation) if budget is not None else None
    return cost.total / budget.max_cost if budget is not None and cost is not None else 0.0


def next_share_at(situation: Situation) -> datetime | None:
    """When the next of the two shares of the budget is spent, with the nodes that the job holds now."""
    budget = situation.spec.budget
    if budget is None:
        return None
    cost, paid = cost_now(situation), rate(situation)
    if cost is None or paid <= 0:
        return None
    left = [share * budget.max_cost - cost.total for share in (NEARLY, 1.0)]
    return min((after(situation.now, each / paid) for each in left if each > 0), default=None)
