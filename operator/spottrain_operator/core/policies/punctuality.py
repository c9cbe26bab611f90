"""Says whether the job will finish by capacity.finishBy, and what it does for that."""

from __future__ import annotations

from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.deadline import Deadline, deadline_of, waits_for_spot
from spottrain_operator.core.facts.dear_spot import dear_spot
from spottrain_operator.core.facts.demand import demand
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import seconds_between


def watch_deadline(situation: Situation, draft: Draft) -> Draft:
    """OnTime: whether the job can still finish by then. `status.slackSeconds` says how much time it can lose.

    An event reports each change for the worse. The messages have no time that changes all the time.
    """
    by, deadline = situation.spec.capacity.finish_by, deadline_of(situation)
    if draft.records:
        slack = round(deadline.slack, 1) if deadline is not None else None
        draft = draft.update(slack_seconds=slack)
    if by is None:
        return _without_deadline(situation, draft)
    if seconds_between(by, situation.now) >= 0:
        return _passed(situation, draft)
    if demand(situation.spec).max_on_demand == 0:
        text = "The job may use no on-demand nodes if spot nodes are short. Raise capacity.onDemand.max"
        return _out_of_reach(situation, draft, text)
    if deadline is None:
        return draft
    if waits_for_spot(situation):
        return _waits(situation, draft)
    return _hurries(situation, draft, deadline)


def _waits(situation: Situation, draft: Draft) -> Draft:
    if dear_spot(situation) is not None:
        message = "There is time to wait for a lower price of spot nodes: the job holds no nodes (capacity.finishBy)"
        return draft.condition(ConditionType.ON_TIME, True, ConditionReason.SPOT_IS_DEAR, message, situation.now)
    message = (
        "There is time to wait for spot nodes: no on-demand nodes stand in for them until status.slackSeconds is "
        "used up (capacity.finishBy)"
    )
    return draft.condition(ConditionType.ON_TIME, True, ConditionReason.SLACK_LEFT, message, situation.now)


def _hurries(situation: Situation, draft: Draft, deadline: Deadline) -> Draft:
    if deadline.slack < 0:
        text = "The steps that are left take longer on all its nodes, which it uses at once. Raise nodes.max"
        return _out_of_reach(situation, draft, text)
    message = "There is no time left to wait for spot nodes: on-demand nodes stand in at once (capacity.finishBy)"
    if _is_news(draft, EventReason.NO_SLACK_LEFT):
        draft = draft.record(EventReason.NO_SLACK_LEFT, message)
    return draft.condition(ConditionType.ON_TIME, True, EventReason.NO_SLACK_LEFT, message, situation.now)


def _out_of_reach(situation: Situation, draft: Draft, text: str) -> Draft:
    message = f"The job may finish later than capacity.finishBy. {text}, or set a later time"
    if _is_news(draft, EventReason.DEADLINE_OUT_OF_REACH):
        draft = draft.record(EventReason.DEADLINE_OUT_OF_REACH, message, warning=True)
    return draft.condition(ConditionType.ON_TIME, False, EventReason.DEADLINE_OUT_OF_REACH, message, situation.now)


def _passed(situation: Situation, draft: Draft) -> Draft:
    message = (
        "capacity.finishBy is over, and the job goes on as one without a deadline. Set a later time, or remove it"
    )
    if _is_news(draft, EventReason.DEADLINE_PASSED):
        draft = draft.record(EventReason.DEADLINE_PASSED, message, warning=True)
    return draft.condition(ConditionType.ON_TIME, False, EventReason.DEADLINE_PASSED, message, situation.now)


def _without_deadline(situation: Situation, draft: Draft) -> Draft:
    if draft.status.condition(ConditionType.ON_TIME) is None:
        return draft
    message = "The job has no deadline"
    return draft.condition(ConditionType.ON_TIME, True, ConditionReason.NO_FINISH_BY, message, situation.now)


def _is_news(draft: Draft, reason: EventReason) -> bool:
    known = draft.status.condition(ConditionType.ON_TIME)
    return known is None or known.reason != reason
