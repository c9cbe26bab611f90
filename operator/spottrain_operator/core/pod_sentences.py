"""Sentences on a pod that does not train yet, or that has ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from spottrain_api.contract import TRAINER_CONTAINER, WaitingReason
from spottrain_api.wording import clause, counted, listed, time_of_day
from spottrain_operator.core.model import FAILED_STARTS, PodView
from spottrain_operator.core.situation import PodFacts, Situation
from spottrain_operator.core.timing import STUCK_START, after

# Words of Python, and of container runtimes, on an image without the agent or without Python.
_NO_AGENT = re.compile(r"""No module named '?spottrain|"python": executable|executable (?:file )?["`]python""")
_AGENTS_ADVICE = (
    "The image lacks spottrain's agent: build it on the spottrain-trainer image, or install "
    "spottrain there, with its extra 'trainer'"
)


def why_it_waits(situation: Situation, pod: PodView) -> str:
    """Why a container of `pod` can't start, in its kubelet's words.

    And how to see its log, if it has one.
    """
    said = f"{pod.waiting_reason}: {pod.waiting_message or 'no further message'}"
    has_log = pod.waiting_reason == WaitingReason.CRASH_LOOP_BACK_OFF and pod.exit_reason not in FAILED_STARTS
    return f"{said}. {_log_sentence(situation, pod)}" if has_log else f"{said}{_advice(pod, said)}"


def start_sentence(situation: Situation, pod: PodView) -> str:
    """The same, as a sentence of its own."""
    return f"pod {pod.name} can't start: {why_it_waits(situation, pod)}"


def ended_sentence(situation: Situation, pod: PodView) -> str:
    """Why a container of a finished pod ended, for the user."""
    if pod.exit_reason in FAILED_STARTS:
        return start_sentence(situation, pod)
    if pod.kubelet_reason is not None or pod.exit_code is None:
        said = ": ".join(part for part in (pod.kubelet_reason, pod.kubelet_message) if part)
        return f"the kubelet of node {pod.node} ended pod {pod.name}: {clause(said or 'it says no reason')}"
    beside = f"container {pod.container} of " if pod.container != TRAINER_CONTAINER else ""
    if pod.exit_reason == "OOMKilled":
        return f"{beside}pod {pod.name} ran out of memory (OOMKilled); raise its resources.limits.memory"
    how = f"exit code {pod.exit_code} ({pod.exit_reason or 'error'})"
    last = f": {clause(pod.exit_message)}" if pod.exit_message else ""
    return f"{beside or 'the container of '}pod {pod.name} ended with {how}{last}{_advice(pod, last)}"


def _advice(pod: PodView, said: str) -> str:
    """What to do about a trainer whose image lacks the agent; empty for any other."""
    return f". {_AGENTS_ADVICE}" if pod.container == TRAINER_CONTAINER and _NO_AGENT.search(said) else ""


def ended_early_sentence(situation: Situation, pods: Sequence[PodView]) -> str:
    """How many pods ended before they could train, and why the last one did.

    And how to see its log, if it has one.
    """
    last = pods[-1]
    they = "it" if len(pods) == 1 else "they"
    why = ended_sentence(situation, last)
    said = f"{counted(len(pods), 'pod')} ended before {they} could train; the last: {why}"
    has_log = last.exit_code is not None and last.exit_reason not in FAILED_STARTS
    return f"{said}. {_log_sentence(situation, last)}" if has_log else said


def refused_reports_sentence(situation: Situation) -> str:
    """Whose newest report was refused, and what follows from that.

    Empty if all were taken.
    """
    refused = [facts for facts in situation.pods.values() if facts.refused and not facts.finished]
    if not refused:
        return ""
    names = listed([facts.pod.name for facts in refused])
    return (
        f"The operator refuses what {names} {'reports' if len(refused) == 1 else 'report'} ({refused[0].refused}). "
        "Ranks there train on, but nothing newer is known of them, and runPolicy.hangTimeoutSeconds counts from the "
        "last report that was taken. Use an operator and a trainer image of the same version. If they are, this is a "
        "bug: report it with the operator's log"
    )


def waits_in_vain_sentence(situation: Situation, leaving: frozenset[str]) -> str:
    """Why a pod that holds a place can't train, and when another node is tried.

    Of several, it is the first. Empty if there is none, except those that are deleted now.
    """
    for uid, facts in situation.pods.items():
        if facts.waits_in_vain and uid not in leaving:
            pod = facts.pod
            until = time_of_day(after(pod.placed_at, STUCK_START), situation.now)
            why = facts.doom.message if facts.doom is not None else f"node {pod.node} is not ready"
            return f"pod {pod.name} can't train, and is replaced at {until}: {why}"
    return ""


def what_they_do(situation: Situation, placed: Sequence[PodFacts]) -> str:
    """Count what pods on nodes do before they are ready.

    The first that can't start is quoted. If there is none, the first that runs an init container is named.
    """
    pods = sorted((facts.pod for facts in placed), key=lambda pod: pod.sequence)
    stuck = next((pod for pod in pods if pod.waiting_message), None)
    named = stuck or next((pod for pod in pods if pod.initializing_since is not None), None)
    doing = Counter(_what_it_does(f) for f in placed if not f.pod.waiting_message and f.pod is not named)
    said = [f"{counted(number, 'pod')} {what}" for what, number in sorted(doing.items())]
    if stuck is not None:
        said.append(f"{stuck.name}: {why_it_waits(situation, stuck)}")
    elif named is not None and named.initializing_since is not None:
        since = time_of_day(named.initializing_since, situation.now)
        runs = f"its init container {named.container} has run since {since}"
        said.append(f"{named.name}: {runs}. {_log_sentence(situation, named)}")
    return "; ".join(said)


def _what_it_does(facts: PodFacts) -> str:
    if facts.pod.initializing_since is not None:
        return "in an init container"
    if not facts.pod.ready:
        return "creating the container"
    if facts.report is None:
        return "not heard yet"
    return "still in the last generation" if facts.report.warm else "loading torch"


def _log_sentence(situation: Situation, pod: PodView) -> str:
    namespace = situation.observed.job.namespace
    return f"See its log (kubectl logs -n {namespace} {pod.name} -c {pod.container})"
