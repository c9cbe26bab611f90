"""Sentences on a pod that does not train yet, or that has ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from spottrain_api.contract.assignments import AgentReport
from spottrain_api.contract.conditions import WaitingReason
from spottrain_api.contract.names import TRAINER_CONTAINER
from spottrain_operator.core.model import FAILED_STARTS, PodView
from spottrain_runtime.wording import clause, counted, listed, time_of_day

# Words of Python, and of container runtimes, on an image without the agent or without Python.
_NO_AGENT = re.compile(r"""No module named '?spottrain|"python": executable|executable (?:file )?["`]python""")
_AGENTS_ADVICE = (
    "The image lacks spottrain's agent: build it on the spottrain-trainer image, or install "
    "spottrain there, with its extra 'trainer'"
)


def why_it_waits(namespace: str, pod: PodView) -> str:
    """Why a container of `pod` can't start, in its kubelet's words, and how to see its log, if it has one."""
    said = f"{pod.waiting_reason}: {pod.waiting_message or 'no further message'}"
    has_log = pod.waiting_reason == WaitingReason.CRASH_LOOP_BACK_OFF and pod.exit_reason not in FAILED_STARTS
    return f"{said}. {_log_sentence(namespace, pod)}" if has_log else f"{said}{_advice(pod, said)}"


def start_sentence(namespace: str, pod: PodView) -> str:
    """The same, as a sentence of its own."""
    return f"pod {pod.name} can't start: {why_it_waits(namespace, pod)}"


def ended_sentence(namespace: str, pod: PodView) -> str:
    """Why a container of a finished pod ended, for the user."""
    if pod.exit_reason in FAILED_STARTS:
        return start_sentence(namespace, pod)
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


def ended_early_sentence(namespace: str, pods: Sequence[PodView]) -> str:
    """How many pods ended before they could train, why the last one did, and how to see its log, if it has one."""
    last = pods[-1]
    they = "it" if len(pods) == 1 else "they"
    why = ended_sentence(namespace, last)
    said = f"{counted(len(pods), 'pod')} ended before {they} could train; the last: {why}"
    has_log = last.exit_code is not None and last.exit_reason not in FAILED_STARTS
    return f"{said}. {_log_sentence(namespace, last)}" if has_log else said


def refused_reports_sentence(pods: Sequence[PodView], why: str) -> str:
    """Of which pods the newest report was refused, and what follows from that."""
    return (
        f"The operator refuses what {listed([pod.name for pod in pods])} {'reports' if len(pods) == 1 else 'report'} "
        f"({why}). "
        "Ranks there train on, but nothing newer is known of them, and runPolicy.hangTimeoutSeconds counts from the "
        "last report that was taken. Use an operator and a trainer image of the same version. If they are, this is a "
        "bug: report it with the operator's log"
    )


def waits_in_vain_sentence(pod: PodView, loss: str, *, until: str) -> str:
    """Why a pod that holds a place can't train, and when another node is tried.

    Args:
        pod: A pod on a node.
        loss: The sentence that announced the loss of the node. Empty if the node is only down.
        until: The time of day when another node is tried.
    """
    return f"pod {pod.name} can't train, and is replaced at {until}: {loss or f'node {pod.node} is not ready'}"


def what_they_do(namespace: str, placed: Iterable[tuple[PodView, AgentReport | None]], now: datetime) -> str:
    """Count what pods on nodes do before they are ready.

    The first that can't start is quoted. If there is none, the first that runs an init container is named.
    """
    placed = sorted(placed, key=lambda each: each[0].sequence)
    pods = [pod for pod, _ in placed]
    stuck = next((pod for pod in pods if pod.waiting_message), None)
    named = stuck or next((pod for pod in pods if pod.initializing_since is not None), None)
    doing = Counter(
        _what_it_does(pod, report) for pod, report in placed if not pod.waiting_message and pod is not named
    )
    said = [f"{counted(number, 'pod')} {what}" for what, number in sorted(doing.items())]
    if stuck is not None:
        said.append(f"{stuck.name}: {why_it_waits(namespace, stuck)}")
    elif named is not None and named.initializing_since is not None:
        since = time_of_day(named.initializing_since, now)
        runs = f"its init container {named.container} has run since {since}"
        said.append(f"{named.name}: {runs}. {_log_sentence(namespace, named)}")
    return "; ".join(said)


def _what_it_does(pod: PodView, report: AgentReport | None) -> str:
    if pod.initializing_since is not None:
        return "in an init container"
    if not pod.ready:
        return "creating the container"
    if report is None:
        return "not heard yet"
    return "still in the last generation" if report.warm else "loading torch"


def _log_sentence(namespace: str, pod: PodView) -> str:
    return f"See its log (kubectl logs -n {namespace} {pod.name} -c {pod.container})"
