"""NoticesHeard: whether somebody hears the notices of the members' spot nodes.

A node that nobody watches is lost without notice, and nothing else shows it before. No generation ends for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from spottrain_api.contract.conditions import ConditionReason, ConditionType, EventReason
from spottrain_api.contract.notices import WatchState
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.facts.watching import SpotWatch, spot_watches
from spottrain_runtime.wording import clause, counted, listed, one_line

_MISSING_ADVICE = (
    "Check that the chart's watcher runs there (kubectl get pods -A -l app.kubernetes.io/component=watcher -o wide), "
    "that its affinity and the value spotLabels name the labels of these nodes, and that nothing blocks its port"
)
_BLIND_ADVICE = (
    "Read the watcher's log, and check that its pod is on the host network and may reach that address; "
    "SPOTTRAIN_PROVIDER in the chart's value watcher.env names another cloud"
)
_NO_CLOUD = (
    "knows no cloud, and hears only Kubernetes (taints, evictions, and the shutdown and deletion of the node). "
    "In EC2, Compute Engine or Azure, name the cloud as SPOTTRAIN_PROVIDER in the chart's value watcher.env. "
    "Elsewhere nodes may go without a notice: a short checkpoint.interval or checkpoint.peerReplicas limits the cost"
)


def handle_watchers(situation: Situation, draft: Draft) -> Draft:
    """Set NoticesHeard.

    It stays as it was between generations, while a watcher may be restarting, and while a cloud may take its time for
    the first answer.
    """
    known, now = draft.status.condition(ConditionType.NOTICES_HEARD), situation.now
    if draft.finished and known is not None:
        message = "The job is over, and no node of it can be taken"
        return draft.condition(ConditionType.NOTICES_HEARD, True, ConditionReason.FINISHED, message, now)
    watches = spot_watches(draft.running, situation.observed.reports, situation.timing)
    if draft.running is None or (known is None and not watches):
        return draft
    unheard = [each for each in watches if each.unheard]
    if unheard:
        return _unheard(draft, unheard, situation)
    if not all(each.settled for each in watches):
        return draft
    reason, message = _heard(watches)
    return draft.condition(ConditionType.NOTICES_HEARD, True, reason, message, now)


def _heard(watches: Sequence[SpotWatch]) -> tuple[ConditionReason, str]:
    """Reason and message if somebody watches all nodes.

    The watcher may know no cloud on some of them. That is no alarm: it never ends where it is normal.
    """
    no_cloud = sorted({each.node for each in watches if not each.watch.hears_cloud})
    if not no_cloud:
        return ConditionReason.HEARD, "The notices of all members on spot nodes are heard"
    return ConditionReason.KUBERNETES_ONLY, f"On {listed(no_cloud)} the watcher {_NO_CLOUD}"


def _unheard(draft: Draft, unheard: list[SpotWatch], situation: Situation) -> Draft:
    """False with the nodes. An event reports the start, and a new reason.

    The words of a connection's error may differ each time. They alone don't change the condition.
    """
    reason, message = _sentence(unheard)
    known = draft.status.condition(ConditionType.NOTICES_HEARD)
    same = known is not None and known.status == "False" and known.reason == reason
    if known is not None and same and known.message.partition(":")[0] == message.partition(":")[0]:
        return draft
    if not same:
        draft = draft.record(reason, message, warning=True)
    return draft.condition(ConditionType.NOTICES_HEARD, False, reason, message, situation.now)


def _sentence(unheard: list[SpotWatch]) -> tuple[StrEnum, str]:
    """Reason and message. The part before the first colon names the nodes."""
    missing = [each for each in unheard if each.watch.state is WatchState.MISSING]
    first, *_ = found = missing or unheard
    names = listed(sorted({each.node for each in found}))
    num_others = len(unheard) - len(found)
    also = f". On {counted(num_others, 'other node')} the watcher is blind" if num_others else ""
    cost = "a preemption there may come without notice"
    said = clause(one_line(first.watch.trouble or "no reason was given"))
    if missing:
        return EventReason.WATCHER_MISSING, f"No watcher answers on {names}: {cost} ({said}){also}. {_MISSING_ADVICE}"
    return EventReason.WATCHER_BLIND, f"The watcher on {names} is blind: {cost} ({said}). {_BLIND_ADVICE}"
