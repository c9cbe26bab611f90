"""The situation at one moment.

It has each pod with its node, its agent's report and its prospects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from spottrain_api.contract.assignments import AgentPhase, AgentReport
from spottrain_api.contract.reports import FailureReason
from spottrain_api.settings.training import TrainingSettings
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.notices import NodeLoss, coming_loss_of, is_hinted
from spottrain_operator.core.model import HeldNode, NodeView, Observed, PodView, Refusal
from spottrain_operator.core.timing import Timing, after, seconds_between

_T = TypeVar("_T")

BUSY = frozenset({AgentPhase.STARTING, AgentPhase.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod, and what follows from the observation.

    Attributes:
        refused: Why a report was refused that is newer than `report`; empty if none was.
        report_age: Seconds since the report came, by the operator's clock.
        silence: Seconds without a report, by the operator's clock.
        coming_loss: Why and when the pod will be gone, if that was announced.
        current: Whether it is from the current template, or as good as one that is.
    """

    pod: PodView
    node: NodeView | None
    report: AgentReport | None
    refused: str
    received_at: datetime | None
    made_at: datetime | None
    last_contact: datetime | None
    report_age: float
    silence: float
    coming_loss: NodeLoss | None
    current: bool
    timing: Timing

    @property
    def finished(self) -> bool:
        """Its trainer has ended, or its kubelet has ended the pod."""
        return self.pod.phase in ("Succeeded", "Failed")

    @property
    def ended(self) -> bool:
        """All its containers have ended, so that its node has room for another pod."""
        return self.finished and not self.pod.lingers

    @property
    def node_lost(self) -> bool:
        """Kubernetes reports that the node is gone or doesn't answer."""
        return self.pod.node is not None and (self.node is None or not self.node.ready)

    @property
    def unreachable(self) -> bool:
        """The node is lost, and no fresh report of the agent contradicts that."""
        return self.node_lost and self.silence > self.timing.silent_on_lost_node

    @property
    def heard(self) -> bool:
        """The agent has reported lately."""
        return self.received_at is not None and self.silence <= self.timing.candidate_report_age

    @property
    def step_age(self) -> float | None:
        """Seconds since the newest step, as far as is known.

        An agent reports at once that steps no longer come, unless its reports are refused.
        """
        report = self.report
        if report is None or report.step_age_seconds is None:
            return None
        return report.step_age_seconds + max(0.0, self.report_age if report.stalled or self.refused else self.silence)

    @property
    def device_failed(self) -> bool:
        """Its agent reports that a GPU of its node fails."""
        failure = self.report.failure if self.report is not None else None
        return failure is not None and failure.reason is FailureReason.DEVICE_FAILED

    @property
    def usable(self) -> bool:
        """It can be in the next generation, now or soon."""
        pod = self.pod
        gone = pod.deleting or self.finished or self.unreachable or self.device_failed
        return self.current and self.coming_loss is None and not gone

    @property
    def at_risk(self) -> bool:
        """The cloud recommends to leave its node. The node may be taken, or not."""
        return self.usable and is_hinted(self.node)

    @property
    def candidate(self) -> bool:
        """It can be in a generation that starts now: up, heard, warm and free."""
        report = self.report
        return (
            self.usable
            and self.heard
            and self.pod.ready
            and self.pod.ip is not None
            and report is not None
            and report.warm
            and report.phase not in BUSY
        )

    @property
    def node_was_lost(self) -> bool:
        """The node was down before the pod came, and its agent was never heard."""
        since = self.node.unready_since if self.node is not None else None
        return since is not None and since < self.pod.placed_at and self.report is None

    @property
    def waits_in_vain(self) -> bool:
        """It was placed on a node that was down, or whose loss was announced.

        Its replacement could land there again, and so on without end. So it is replaced after `stuck_start`.
        """
        was_announced = self.coming_loss is not None and self.coming_loss.before_pod
        return (was_announced or self.node_was_lost) and self.current and not (self.pod.deleting or self.finished)

    @property
    def holds_place(self) -> bool:
        """No other pod is needed in its place."""
        return self.usable or self.waits_in_vain


@dataclass(frozen=True)
class Situation:
    """One job at the moment `now`."""

    observed: Observed
    now: datetime

    @property
    def spec(self) -> TrainingJobSpec:
        return self.observed.job.spec

    @property
    def timing(self) -> Timing:
        return self.observed.timing

    @cached_property
    def records(self) -> bool:
        """Whether to record what changes all the time, even if nothing else changes."""
        at = self.observed.job.status.accounted_at
        return at is None or self.next_record(at) <= self.now or bool(self.given_back)

    def next_record(self, newest: datetime) -> datetime:
        """When to record again after the record of `newest`.

        A new operator doesn't make up for records that were due before it listened, because it has heard nobody. Each
        job keeps its rhythm, or all would be due at once. A record of the future is that of an operator with another
        clock, and counts as one of the past.
        """
        interval = self.timing.record_interval
        num_missed = seconds_between(newest, self.observed.listening_since) // interval
        if newest <= self.now:
            num_missed = max(0.0, num_missed)
        return after(newest, (num_missed + 1) * interval)

    @cached_property
    def _derived(self) -> dict[object, Any]:
        return {}

    def once(self, key: object, derive: Callable[[], _T]) -> _T:
        """Derive a value once, as several policies ask for it.

        `key` names all of a plan that the value depends on.
        """
        if key not in self._derived:
            self._derived[key] = derive()
        value: _T = self._derived[key]
        return value

    @cached_property
    def pods(self) -> dict[str, PodFacts]:
        """By uid, in the order of their sequence."""
        ordered = sorted(self.observed.pods, key=lambda pod: pod.sequence)
        return {pod.uid: self._facts(pod) for pod in ordered}

    @cached_property
    def held(self) -> tuple[HeldNode, ...]:
        """The nodes that cost money: also while the image is pulled, and until the pod is gone."""
        return tuple(
            HeldNode(pod=f.pod, node=f.node)
            for f in self.pods.values()
            if f.pod.node is not None and not f.ended and not f.unreachable
        )

    @cached_property
    def given_back(self) -> tuple[HeldNode, ...]:
        """The nodes that the job held in the pass before, and holds no longer."""
        held = {each.pod.uid for each in self.held}
        return tuple(each for each in self.observed.held_before if each.pod.uid not in held)

    def _facts(self, pod: PodView) -> PodFacts:
        observed, now = self.observed, self.now
        view = observed.reports.get(pod.uid)
        node = observed.nodes.get(pod.node) if pod.node is not None else None
        report = view.report if view is not None else None
        # What announces the end of such a pod is the SIGTERM that its agent got.
        trusted = report if not pod.exceeded_limits else None
        return PodFacts(
            pod=pod,
            node=node,
            report=report,
            refused=observed.refused_reports.get(pod.uid, ""),
            received_at=view.received_at if view is not None else None,
            made_at=view.made_at if view is not None else None,
            last_contact=view.last_contact if view is not None else None,
            report_age=seconds_between(view.received_at, now) if view is not None else 0.0,
            silence=self.silence(pod.uid, since=pod.ready_since or pod.created_at),
            coming_loss=coming_loss_of(pod, node, trusted, now, self.timing, joined=pod.uid in self._joined),
            current=self.keeps_old_pods or self.is_of_template(pod),
            timing=self.timing,
        )

    @cached_property
    def _joined(self) -> frozenset[str]:
        """Uids of the members of the newest generation."""
        generation = self.observed.job.status.generation
        return frozenset(m.pod_uid for m in generation.members) if generation is not None else frozenset()

    @cached_property
    def refusal(self) -> Refusal | None:
        """Why no pod of the current spec can be created."""
        refusal, current = self.observed.refusal, self.observed.job.metadata_generation
        return refusal if refusal is not None and refusal.metadata_generation == current else None

    @cached_property
    def keeps_old_pods(self) -> bool:
        """Whether pods of another template are as good as those of the current one.

        They are if the current template isn't understood as a whole, or if Kubernetes has accepted no pod of it yet,
        unless the new pods need the old ones' share of a quota.
        """
        if self.observed.job.left_out:
            return True
        if any(self.is_of_template(pod) for pod in self.observed.pods):
            return False
        return self.refusal is None or not self.refusal.by_quota

    @property
    def tries_template(self) -> bool:
        """Whether it is open if Kubernetes accepts pods of the current template."""
        return self.keeps_old_pods and not self.observed.job.left_out

    def is_of_template(self, pod: PodView) -> bool:
        """The pod was made from the current template."""
        return pod.template_hash == self.observed.template_hash

    def silence(self, uid: str, *, since: datetime) -> float:
        """Seconds without a report from the agent of pod `uid`.

        Without any report, they count from `since` or the operator's start, whichever is later, less
        `operator_restart_grace`.
        """
        view = self.observed.reports.get(uid)
        if view is not None:
            return seconds_between(view.last_contact, self.now)
        listening = max(since, self.observed.listening_since)
        return seconds_between(listening, self.now) - self.timing.operator_restart_grace

    def is_coming(self, uid: str) -> bool:
        """Whether the agent has lost its relay, and may be on its way."""
        view = self.observed.reports.get(uid)
        return view is not None and view.comes_by is not None and self.now < view.comes_by

    def hears_someone_but(self, uid: str) -> bool:
        """Whether an agent other than that of pod `uid` gets through.

        Then a silence isn't the operator's or the network's fault.
        """
        return any(
            other != uid and facts.received_at is not None and facts.silence <= self.timing.silent_while_others_ended
            for other, facts in self.pods.items()
        )

    def candidates(self, kept: Iterable[str]) -> list[PodFacts]:
        """Those of `kept` that could start now.

        On-demand pods come first, as rank 0 should be lost last. Of the same type, the oldest comes first.
        """
        chosen = [facts for uid in kept if (facts := self.pods[uid]).candidate]
        return sorted(chosen, key=lambda facts: (facts.pod.capacity_type.value, facts.pod.sequence))

    @cached_property
    def run_hash(self) -> str:
        """Hash that changes if a generation would run differently.

        It covers the pod template and the ranks' settings. Defaults are left out, so that an operator with a new
        optional field doesn't drain all jobs.
        """
        return self.run_hash_on((self.observed.template_hash,))

    def run_hash_on(self, templates: Iterable[str]) -> str:
        """The same, for pods of these templates.

        If there are several templates, it matches none.
        """
        template = "-".join(sorted(set(templates)))
        settings = self.spec.model_dump_json(include=_SETTINGS_OF_RANKS, exclude_defaults=True)
        return f"{template}.{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


_SETTINGS_OF_RANKS = {"entrypoint", "processes_per_node", *TrainingSettings.model_fields}
