"""The state of each member of the newest generation, from reports.

Reports may be late, old, missing or repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from spottrain_api.contract.assignments import AgentPhase, AgentReport, Member
from spottrain_api.contract.reports import Failure, FailureReason, Progress, TrainerPhase
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, Phase, TrainingJobStatus
from spottrain_operator.core.facts.situation import BUSY, PodFacts, Situation
from spottrain_operator.core.model import PodView
from spottrain_operator.core.timing import Timing, seconds_between
from spottrain_operator.core.words.pods import ended_sentence

# Exit codes of containers that were killed from outside (SIGKILL, SIGTERM), or that left when asked to.
_KILLED = frozenset({None, 0, 137, 143})
# Reasons of containers that the kubelet found dead, after its node rebooted or its container runtime was restarted.
# Their exit codes are made up: containerd's is 255, the kubelet's own 137, older ones' 128.
_FOUND_DEAD = frozenset({"Unknown", "ContainerStatusUnknown"})


class MemberState(StrEnum):
    """State of a member.

    - AWAITED: it has not reported yet that it runs the generation.
    - RELEASED: it never ran the generation, and no longer will.
    - BROKEN: its agent or container ended by itself.
    - LOST: its pod or node is gone, or has been silent for too long.
    """

    AWAITED = "awaited"
    RUNNING = "running"
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    RELEASED = "released"
    BROKEN = "broken"
    LOST = "lost"


STILL_IN = frozenset({MemberState.AWAITED, MemberState.RUNNING})
# States that break a generation up: the other ranks can't continue without this member.
BREAKING = frozenset(set(MemberState) - STILL_IN - {MemberState.SUCCEEDED})

_ENDED_AS = {
    AgentPhase.DRAINED: MemberState.DRAINED,
    AgentPhase.SUCCEEDED: MemberState.SUCCEEDED,
    AgentPhase.FAILED: MemberState.FAILED,
    AgentPhase.STOPPED: MemberState.STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """A member of a generation and its state.

    Attributes:
        generation: Number of the generation.
        message: What explains LOST or BROKEN; empty for other states.
    """

    member: Member
    generation: int
    state: MemberState
    message: str = ""
    report: AgentReport | None = None
    facts: PodFacts | None = None

    @property
    def failure(self) -> Failure | None:
        """The failure that its agent reported."""
        return self.report.failure if self.report is not None and self.state is MemberState.FAILED else None

    @property
    def lost_device(self) -> bool:
        """Whether it is lost because a device of its node failed. Its agent goes on reporting."""
        failure = self.report.failure if self.report is not None and self.state is MemberState.LOST else None
        return failure is not None and failure.reason is FailureReason.DEVICE_FAILED

    @property
    def progress(self) -> Progress | None:
        """The newest progress of its ranks in this generation."""
        report = self.report
        if report is None or report.progress is None or report.progress.generation != self.generation:
            return None
        return report.progress

    @property
    def training(self) -> bool:
        """Whether its ranks are past their start, so that they may have made steps."""
        progress = self.progress
        return progress is not None and progress.phase is not TrainerPhase.STARTING

    @property
    def at_its_end(self) -> bool:
        """Whether its ranks have left the loop.

        They save for the last time, or have done so.
        """
        progress = self.progress
        return progress is not None and progress.phase in (TrainerPhase.SAVING, TrainerPhase.DONE)

    @property
    def is_done(self) -> bool:
        """Whether its ranks have left their session.

        Their script may go on for as long as it takes.
        """
        progress = self.progress
        return progress is not None and progress.phase is TrainerPhase.DONE

    @property
    def has_steps_left(self) -> bool:
        """Whether steps remain after its newest one; false for a script without the library."""
        progress = self.progress
        return progress is not None and (progress.total_steps is None or progress.step < progress.total_steps)

    @property
    def left_early(self) -> bool:
        """Whether it has succeeded before the last step."""
        return self.state is MemberState.SUCCEEDED and self.has_steps_left


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """What the members of a generation do as a whole.

    Some have ended, some still make steps, or all that made steps have stopped making them.
    """

    ended: bool
    stepping: bool
    stuck: bool


def members_of(situation: Situation, generation: GenerationStatus) -> tuple[MemberFacts, ...]:
    """The members of `generation` in the order of their ranks.

    It must be the newest generation.
    """
    # The answer depends on nothing else of the generation.
    key = ("members", generation.number, generation.state, generation.requested_at, generation.first_step_at)
    return situation.once(key, lambda: _judge(situation, generation))


def _judge(situation: Situation, generation: GenerationStatus) -> tuple[MemberFacts, ...]:
    alone = tuple(_by_itself(situation, generation, member) for member in generation.members)
    others = _Others(
        ended=generation.state is GenerationState.STOPPING or any(m.state in BREAKING for m in alone),
        stepping=any(_steps(m, situation.timing) for m in alone),
        stuck=_stuck(alone, situation.timing),
    )
    return tuple(_without_patience(situation, generation, m, others=others) for m in alone)


def _by_itself(situation: Situation, generation: GenerationStatus, member: Member) -> MemberFacts:
    """The state of `member`, if its silence doesn't count."""
    facts = situation.pods.get(member.pod_uid)
    view = situation.observed.reports.get(member.pod_uid)
    report = view.report if view is not None else None
    ended = _ended(report, generation)  # also if the pod is gone since then
    state, message = (ended, "") if ended is not None else _of_pod(situation, generation, member, facts)
    if state is MemberState.FAILED and (why := _lost_device(situation, member, report)):
        state, message = MemberState.LOST, why
    return MemberFacts(
        member=member, generation=generation.number, state=state, message=message, report=report, facts=facts
    )


def _lost_device(situation: Situation, member: Member, report: AgentReport | None) -> str:
    """Why its node's device is lost to the job; empty if it isn't, or if the job has never trained."""
    failure, status = report.failure if report is not None else None, situation.observed.job.status
    if failure is None or failure.reason is not FailureReason.DEVICE_FAILED or not has_trained(status):
        return ""
    return f"a device of node {member.node} failed in pod {member.pod}: {failure.message}"


def has_trained(status: TrainingJobStatus) -> bool:
    """Whether the job has made a step."""
    return status.commit is not None or status.progress.step > 0


def _of_pod(
    situation: Situation, generation: GenerationStatus, member: Member, facts: PodFacts | None
) -> tuple[MemberState, str]:
    """The state of a member whose agent has not reported its end."""
    if facts is None:
        return MemberState.LOST, f"pod {member.pod} is gone"
    if facts.finished:
        return _finished(situation, facts)
    if facts.unreachable:
        return MemberState.LOST, f"node {member.node} with pod {member.pod} is gone or not ready"
    return _alive(generation, facts)


def _ended(report: AgentReport | None, generation: GenerationStatus) -> MemberState | None:
    if report is None or report.generation != generation.number:
        return None
    return _ENDED_AS.get(report.phase)


def _finished(situation: Situation, facts: PodFacts) -> tuple[MemberState, str]:
    pod = facts.pod
    if killed(pod) or facts.node_lost or facts.coming_loss is not None:
        why = pod.disruption or pod.kubelet_reason or pod.exit_reason or "killed"
        return MemberState.LOST, f"pod {pod.name} was ended ({why})"
    return MemberState.BROKEN, ended_sentence(situation.observed.job.namespace, pod)


def killed(pod: PodView) -> bool:
    """Whether a finished pod was ended from outside rather than by its own program."""
    if pod.disruption is not None or pod.kubelet_reason is not None:
        return not pod.exceeded_limits
    if pod.exit_reason in _FOUND_DEAD:
        return True
    return pod.exit_code in _KILLED and pod.exit_reason != "OOMKilled"


def _alive(generation: GenerationStatus, facts: PodFacts) -> tuple[MemberState, str]:
    report, made_at, pod, timing = facts.report, facts.made_at, facts.pod, facts.timing
    if report is None or made_at is None:
        return MemberState.AWAITED, ""
    if report.generation == generation.number and report.phase in BUSY:
        starts = report.phase is AgentPhase.STARTING
        if starts and _between(generation.first_step_at, made_at) > timing.restarted:
            return MemberState.BROKEN, f"the agent of pod {pod.name} restarted"
        return MemberState.RUNNING, ""
    if generation.state is not GenerationState.ACTIVE:
        released = _between(generation.requested_at, made_at) > timing.in_flight and report.phase not in BUSY
        return (MemberState.RELEASED if released else MemberState.AWAITED), ""
    if _between(generation.started_at, made_at) > timing.take_up:
        return MemberState.BROKEN, f"the agent of pod {pod.name} doesn't take its assignment"
    return MemberState.AWAITED, ""


def _between(moment: datetime | None, until: datetime) -> float:
    """Seconds from `moment` to `until`, such as when a report was made.

    Negative if `moment` is later, or never was.
    """
    return -1.0 if moment is None else seconds_between(moment, until)


def _steps(m: MemberFacts, timing: Timing) -> bool:
    """Whether it is heard, and its newest step is recent."""
    if m.state is not MemberState.RUNNING or not m.training or m.facts is None or not m.facts.heard:
        return False
    age, usual = m.facts.step_age, m.progress.step_seconds if m.progress is not None else None
    return age is not None and age < max(timing.stepping, timing.stuck_steps * (usual or 0.0))


def _stuck(members: tuple[MemberFacts, ...], timing: Timing) -> bool:
    """Whether there was no step for several times its duration.

    Then ranks wait for a silent one. Those that have left their session wait for nobody.
    """
    ages = [
        (m.facts.step_age, m.progress.step_seconds)
        for m in members
        if m.state is MemberState.RUNNING
        and m.training
        and not m.is_done
        and m.facts is not None
        and m.facts.heard
        and m.facts.step_age is not None
        and m.progress is not None
        and m.progress.step_seconds is not None
    ]
    return bool(ages) and all(
        age > max(timing.silent_while_stuck, timing.stuck_steps * seconds) for age, seconds in ages
    )


def _patience(others: _Others, timing: Timing) -> float:
    """Seconds that a member may be silent before it counts as lost."""
    if others.ended:
        return timing.silent_while_others_ended
    if others.stuck:
        return timing.silent_while_stuck
    return math.inf if others.stepping else timing.silent_alone


def _without_patience(
    situation: Situation, generation: GenerationStatus, m: MemberFacts, *, others: _Others
) -> MemberFacts:
    """`m`, given up if it is silent for too long or doesn't stop.

    Only a member that is still in the generation is given up.
    """
    if m.state not in STILL_IN:
        return m
    silence = situation.silence(m.member.pod_uid, since=generation.started_at)
    heard_others = others.ended or situation.hears_someone_but(m.member.pod_uid)
    if silence > _patience(others, situation.timing) and heard_others and not situation.is_coming(m.member.pod_uid):
        message = f"pod {m.member.pod} on {m.member.node} no longer answers"
        return replace(m, state=MemberState.LOST, message=message)
    overdue = _between(generation.requested_at, situation.now) > situation.timing.stop_timeout
    # The time of a silent one counts from the operator's start.
    heard = m.facts is not None and m.facts.heard
    if generation.state is GenerationState.STOPPING and overdue and heard:
        return replace(m, state=MemberState.BROKEN, message=f"pod {m.member.pod} doesn't stop")
    return m


def leaving_sentence(members: tuple[MemberFacts, ...], until: datetime | None = None) -> str:
    """Which member ended with exit code 0, or left the loop, too early, and at which step; empty if none did.

    No rank makes a step without the others.

    Args:
        members: Of the newest generation.
        until: Time from which on members left because they were stopped. None: not stopped yet.
    """
    if until is not None:
        members = tuple(m for m in members if m.progress is None or m.progress.updated_at <= until)
    left, how = next((m for m in members if m.left_early), None), "ended with exit code 0"
    if left is None and any(m.progress is not None and not m.at_its_end for m in members):
        left, how = next((m for m in members if m.at_its_end and m.has_steps_left), None), "left its loop or session"
    if left is None or left.progress is None:
        return ""
    made = left.progress.first_step_at is not None
    total = f" of {left.progress.total_steps}" if left.progress.total_steps is not None else ""
    when = f"at step {left.progress.step}{total}" if made else "before the first step"
    return f"pod {left.member.pod} (node rank {left.member.node_rank}) {how} {when}"


def says_nothing(situation: Situation, generation: GenerationStatus) -> bool:
    """Whether its script runs without the library, so that nobody knows of its steps."""
    return _between(generation.started_at, situation.now) > situation.timing.says_nothing and is_unheard(
        situation, generation
    )


def is_unheard(situation: Situation, generation: GenerationStatus) -> bool:
    """Whether its script runs and has reported nothing yet.

    It may not use the library.
    """
    return generation.first_step_at is None and all(
        m.state is MemberState.RUNNING
        and m.progress is None
        and m.report is not None
        and m.report.phase is AgentPhase.RUNNING
        for m in members_of(situation, generation)
    )


def worked_unseen(situation: Situation, generation: GenerationStatus) -> bool:
    """Whether the generation ran a script without the library for a while.

    Then nobody knows whether it made steps.
    """
    members = members_of(situation, generation)
    # Reports go with their pods. If none is left, the phase tells the start of a script of the library. A drain or a
    # stop hides that: then a script without the library may have lost hours.
    ran = any(m.report is not None and m.report.generation == generation.number for m in members)
    return (
        _between(generation.started_at, generation.requested_at or situation.now) > situation.timing.says_nothing
        and generation.first_step_at is None
        and all(m.progress is None for m in members)
        and (ran or situation.observed.job.status.phase is not Phase.STARTING)
    )


def culprits(generation: GenerationStatus, members: tuple[MemberFacts, ...]) -> list[MemberFacts]:
    """Members that are gone, or will be soon, and so explain why others failed.

    A silence that started only after the others failed isn't the cause.
    """

    def silent_before(m: MemberFacts) -> bool:
        if m.facts is None or m.facts.unreachable or m.facts.finished or m.facts.last_contact is None:
            return True
        return _between(generation.requested_at, m.facts.last_contact) <= m.facts.timing.culprit_last_word

    return [
        m
        for m in members
        if (m.state is MemberState.LOST and (m.lost_device or silent_before(m)))
        or (m.facts is not None and m.facts.coming_loss is not None)
    ]
