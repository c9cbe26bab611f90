"""The job's cost and goodput.

The cost is compared with that of on-demand nodes alone. Goodput is the share of time with training.
"""

from __future__ import annotations

from spottrain_api.v1alpha1.spending import CostStatus
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.costs import accounting_time, cost_now
from spottrain_operator.core.facts.members import says_nothing
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.policies.time_spent import spend_on_wait
from spottrain_operator.core.timing import seconds_between


def account(situation: Situation, draft: Draft, *, at_once: bool = False) -> Draft:
    """Charge the nodes that the job's pods hold, and update the goodput.

    The charge is for the time since the last record.
    """
    status = draft.status
    if not (at_once or draft.records):
        return draft
    _, now = accounting_time(situation)
    draft = spend_on_wait(situation, draft.update(accounted_at=now, **_costs(situation, status)))
    return draft.update(**_goodput(draft.status, situation))


def charge_finished(situation: Situation, draft: Draft) -> Draft:
    """Charge the nodes of a finished job until its pods are gone."""
    if not (draft.records and (situation.held or situation.given_back)):
        return draft
    _, now = accounting_time(situation)
    return draft.update(accounted_at=now, **_costs(situation, draft.status))


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


def _costs(situation: Situation, status: TrainingJobStatus) -> dict[str, object]:
    cost = cost_now(situation)
    if cost is None:
        return {}
    # Without a step, nothing was bought for less.
    return {"cost": cost.model_copy(update={"display": _display(cost, bought=status.progress.step > 0)})}


def _display(cost: CostStatus, *, bought: bool) -> str:
    """ "1.23 USD (saved 61%)", or "1.23 USD (saved 61%; list prices of 2025-12-01)" """
    remarks = []
    if bought and cost.on_demand_only > cost.total:
        remarks.append(f"saved {1 - cost.total / cost.on_demand_only:.0%}")
    if cost.list_prices_of is not None:
        remarks.append(f"list prices of {cost.list_prices_of.isoformat()}")
    total = f"{cost.total:.2f} {cost.currency}"
    return f"{total} ({'; '.join(remarks)})" if remarks else total
