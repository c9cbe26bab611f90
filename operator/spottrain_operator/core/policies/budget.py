"""Says how much of the job's budget is spent.

The pause that may follow is one of `facts.pauses`.
"""

from __future__ import annotations

from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_api.v1alpha1.budget import OnExceeded
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.pauses import NEARLY, cost_sentence, money, pause_of, spent_share
from spottrain_operator.core.facts.situation import Situation


def watch_budget(situation: Situation, draft: Draft) -> Draft:
    """WithinBudget: set once 80 % of the budget is spent, and False once all of it is.

    An event reports each of the two. The messages have no amount that changes all the time.
    """
    budget, share, now = situation.spec.budget, spent_share(situation), situation.now
    kind, known = ConditionType.WITHIN_BUDGET, draft.status.condition(ConditionType.WITHIN_BUDGET)
    if budget is None or share < NEARLY:
        if known is None:
            return draft
        if budget is None:
            return draft.condition(kind, True, ConditionReason.NO_BUDGET, "The job has no budget", now)
        message = f"The job has cost less than {NEARLY:.0%} of {money(situation)} (budget.maxCost)"
        return draft.condition(kind, True, ConditionReason.MONEY_LEFT, message, now)
    suspends = budget.on_exceeded is OnExceeded.SUSPEND
    if share < 1:
        reason, is_news = EventReason.BUDGET_NEARLY_SPENT, known is None or known.reason in _LESS
        then = "the job commits and holds no nodes until it is raised" if suspends else "the job trains on"
        message = (
            f"The job has cost {NEARLY:.0%} of {money(situation)} (budget.maxCost). Once all of it is spent, {then}"
        )
        draft = draft.record(reason, message, warning=True) if is_news else draft
        return draft.condition(kind, True, reason, message, now)
    then = (
        "It holds no nodes until budget.maxCost is raised" if suspends else "It trains on (budget.onExceeded: Warn)"
    )
    message = f"The job has cost all of {money(situation)} (budget.maxCost). {then}"
    is_news = known is None or known.status == "True"
    if is_news and not (suspends and _ends_for_it(situation, draft)):
        draft = draft.record(Cause.BUDGET_SPENT, f"The job has cost {cost_sentence(situation)}. {then}", warning=True)
    return draft.condition(kind, False, Cause.BUDGET_SPENT, message, now)


_LESS = frozenset({ConditionReason.MONEY_LEFT, ConditionReason.NO_BUDGET})


def _ends_for_it(situation: Situation, draft: Draft) -> bool:
    """Whether the event of the generation's end says the same already."""
    pause, running = pause_of(situation), draft.running
    return running is not None and pause is not None and running.reason == pause.cause
