"""A job that holds some nodes, and can't get as many as it needs, gives them back after a while.

Otherwise two jobs could each hold half of the nodes, or of a quota, for ever.
"""

from __future__ import annotations

from spottrain_api.contract.conditions import EventReason
from spottrain_api.v1alpha1.status import HoldOff
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.pauses import pause_of
from spottrain_operator.core.facts.places import places
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.model import PodView
from spottrain_operator.core.timing import after, growing_pause, seconds_between
from spottrain_operator.core.words.scheduling import lacks_more_than_nodes
from spottrain_runtime.wording import time_of_day

# The oldest of many jobs waits this many times as long as the youngest.
_MOST_TURNS = 8


def give_back(situation: Situation, draft: Draft) -> Draft:
    """Give the nodes back if no further one has come for long, and `nodes.min` is out of reach.

    The youngest of the jobs that wait does so first, and the others may start with its nodes. It asks again after a
    pause that grows with each time.
    """
    known, now = draft.status.hold_off, situation.now
    if draft.running is not None or pause_of(situation) is not None:
        return draft if known is None else draft.update(hold_off=None)
    if holds_off(situation, draft):
        return draft
    kept = _kept(situation, draft)
    placed, needed = [pod.placed_at for pod in kept if pod.node is not None], situation.spec.nodes.min
    if not _may_come_from_others(situation, kept):
        return draft
    if not 0 < len(placed) < needed or seconds_between(max(placed), now) < _patience(situation):
        return draft
    times = 1 + (known.times if known is not None else 0)
    timing = situation.timing
    until = after(now, growing_pause(times, first=timing.gang_pause, most=timing.gang_max_pause))
    waited = seconds_between(max(placed), now)
    text = (
        f"The job has {len(placed)} of at least {needed} nodes, and no other has come for {waited:.0f} s. "
        f"It gives them back for jobs that can start with them, and asks again at {time_of_day(until, now)}"
    )
    # Whatever was short before may be there then.
    draft = draft.update(hold_off=HoldOff(until=until, times=times), fallback_since=None, spot_pending_since=None)
    return draft.record(EventReason.NODES_GIVEN_BACK, text, warning=True)


def holds_off(situation: Situation, draft: Draft) -> bool:
    """Whether the job has given its nodes back, and asks for none yet."""
    hold_off = draft.status.hold_off
    return hold_off is not None and draft.running is None and situation.now < hold_off.until


def hold_off_sentence(situation: Situation, draft: Draft) -> str:
    """Why the job asks for no nodes, and until when."""
    hold_off = draft.status.hold_off
    if hold_off is None or not holds_off(situation, draft):
        return ""
    return (
        f"Waiting for nodes: fewer than nodes.min ({situation.spec.nodes.min}) came, and the job gave them back for "
        f"others. It asks again at {time_of_day(hold_off.until, situation.now)}. To start with fewer, lower nodes.min"
    )


def _kept(situation: Situation, draft: Draft) -> list[PodView]:
    """The pods that keep their place."""
    return [situation.pods[uid].pod for uid in places(situation, draft.status, leaving=draft.leaving).kept]


def _may_come_from_others(situation: Situation, kept: list[PodView]) -> bool:
    """Whether a pod waits for a node or for a quota's room. One that lacks something else needs somebody's help."""
    if situation.refusal is not None and situation.refusal.by_quota:
        return True
    return any(pod.unschedulable_since is not None and not lacks_more_than_nodes(pod) for pod in kept)


def _patience(situation: Situation) -> float:
    turns = 1 + situation.observed.num_younger_waiting
    return situation.timing.gang_patience * min(turns, _MOST_TURNS)
