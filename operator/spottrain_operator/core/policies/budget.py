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

_LESS = frozenset({ConditionReason.MONEY_LEFT, ConditionReason.NO_BUDGET})


def watch_budget(situation: Situation, draft: Draft) -> Draft:
    """WithinBudget: set once 80 % of the budget is spent, and False once all of it is.

    An event reports each of the two. The messages have no amount that changes all the time.
    """
    share = spent_share(situation)
    if share >= 1:
        return _spent(situation, draft)
    if share >= NEARLY:
        return _nearly_spent(situation, draft)
    known, now = draft.status.condition(ConditionType.WITHIN_BUDGET), situation.now
    if known is None:
        return draft
    if situation.spec.budget is None:
        message = "The job has no budget"
        return draft.condition(ConditionType.WITHIN_BUDGET, True, ConditionReason.NO_BUDGET, message, now)
    message = f"The job has cost less than {NEARLY:.0%} of {money(situation)} (budget.maxCost)"
    return draft.condition(ConditionType.WITHIN_BUDGET, True, ConditionReason.MONEY_LEFT, message, now)


def _nearly_spent(situation: Situation, draft: Draft) -> Draft:
    known = draft.status.condition(ConditionType.WITHIN_BUDGET)
    then = "the job commits and holds no nodes until it is raised" if _suspends(situation) else "the job trains on"
    message = f"The job has cost {NEARLY:.0%} of {money(situation)} (budget.maxCost). Once all of it is spent, {then}"
    if known is None or known.reason in _LESS:
        draft = draft.record(EventReason.BUDGET_NEARLY_SPENT, message, warning=True)
    return draft.condition(ConditionType.WITHIN_BUDGET, True, EventReason.BUDGET_NEARLY_SPENT, message, situation.now)


def _spent(situation: Situation, draft: Draft) -> Draft:
    known = draft.status.condition(ConditionType.WITHIN_BUDGET)
    then = "It trains on (budget.onExceeded: Warn)"
    if _suspends(situation):
        then = "It holds no nodes until budget.maxCost is raised"
    if (known is None or known.status == "True") and not _ends_for_it(situation, draft):
        said = f"The job has cost {cost_sentence(situation)}. {then}"
        draft = draft.record(Cause.BUDGET_SPENT, said, warning=True)
    message = f"The job has cost all of {money(situation)} (budget.maxCost). {then}"
    return draft.condition(ConditionType.WITHIN_BUDGET, False, Cause.BUDGET_SPENT, message, situation.now)


def _suspends(situation: Situation) -> bool:
    budget = situation.spec.budget
    return budget is not None and budget.on_exceeded is OnExceeded.SUSPEND


def _ends_for_it(situation: Situation, draft: Draft) -> bool:
    """Whether the event of the generation's end says the same already."""
    pause, running = pause_of(situation), draft.running
    return running is not None and pause is not None and running.reason == pause.cause
