"""The job's cost and goodput.

The cost is compared with that of on-demand nodes alone. Goodput is the share of time with training.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.capacity import Capacity
from spottrain_api.v1alpha1.status import CostStatus, TrainingJobStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import says_nothing
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.policies.time_spent import spend_on_wait
from spottrain_operator.core.timing import seconds_between

_SECONDS_PER_HOUR = 3600.0


def account(situation: Situation, draft: Draft, *, at_once: bool = False) -> Draft:
    """Charge the nodes that the job's pods hold, and update the goodput.

    The charge is for the time since the last record.
    """
    status = draft.status
    if not (at_once or draft.records):
        return draft
    before = status.accounted_at or situation.now
    now = max(situation.now, before)  # an operator with another clock has charged up to `before`
    draft = spend_on_wait(situation, draft.update(accounted_at=now, **_costs(situation, status, before, now)))
    return draft.update(**_goodput(draft.status, situation))


def _goodput(status: TrainingJobStatus, situation: Situation) -> dict[str, object]:
    time = status.time
    if status.start_time is None or time is None:
        return {}
    unreported, running = time.unreported_seconds, status.running
    if running is not None and says_nothing(situation, running):  # its time is added when it ends
        unreported += max(0.0, seconds_between(time.until, situation.now))
    if unreported > 0 and time.productive_seconds == 0:
        return {"goodput": None, "goodput_display": None}
    elapsed = seconds_between(status.start_time, situation.now) - unreported
    if elapsed <= 0:
        return {}
    share = min(1.0, time.productive_seconds / elapsed)
    return {"goodput": round(share, 4), "goodput_display": f"{share:.1%}"}


def _costs(situation: Situation, status: TrainingJobStatus, since: datetime, now: datetime) -> dict[str, object]:
    capacity = situation.spec.capacity
    if all(price(capacity, each, None) is None for each in CapacityType):
        return {}
    held = [facts for facts in situation.pods.values() if _holds_node(facts)]
    on_demand_price = price(capacity, CapacityType.ON_DEMAND, None)
    prices = [price(capacity, facts.pod.capacity_type, facts.pod.pool) for facts in held]
    before = status.cost
    if before is None or before.currency != capacity.currency:  # amounts of two currencies don't add up
        before = CostStatus()
    hours = [_hours_held(facts, since, now) for facts in held]
    total = before.total + sum(each * (p or 0.0) for each, p in zip(hours, prices, strict=True))
    on_demand_only = before.on_demand_only + sum(hours) * (on_demand_price or 0.0)
    # Without a step, nothing was bought for less.
    compared = on_demand_only if status.progress.step > 0 else 0.0
    display = _display(total, compared, capacity.currency)
    cost = CostStatus(total=total, on_demand_only=on_demand_only, currency=capacity.currency, display=display)
    return {"cost": cost}


def _holds_node(facts: PodFacts) -> bool:
    """Whether the pod's node costs money.

    It does also while the image is pulled, and until the pod is gone.
    """
    return facts.pod.node is not None and not facts.ended and not facts.unreachable


def _hours_held(facts: PodFacts, since: datetime, now: datetime) -> float:
    """Hours since the last record in which the pod had its node."""
    return max(0.0, seconds_between(max(since, facts.pod.placed_at), now)) / _SECONDS_PER_HOUR


def price(capacity: Capacity, capacity_type: CapacityType, pool: str | None) -> float | None:
    """Price per hour of a node: that of the pool, or that of its capacity type.

    None: unknown.
    """
    of_type = [p for p in capacity.pools if p.capacity_type is capacity_type and p.price_per_hour is not None]
    own = next((p.price_per_hour for p in of_type if p.name == pool), None)
    if own is not None:
        return own
    general = capacity.on_demand if capacity_type is CapacityType.ON_DEMAND else capacity.spot
    if general.price_per_hour is not None:
        return general.price_per_hour
    return of_type[0].price_per_hour if of_type else None


def _display(total: float, on_demand_only: float, currency: str) -> str:
    """ "1.23 USD (saved 61%)" """
    if on_demand_only <= total or on_demand_only <= 0:
        return f"{total:.2f} {currency}"
    return f"{total:.2f} {currency} (saved {1 - total / on_demand_only:.0%})"
