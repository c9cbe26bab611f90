"""Failures that the job causes: which count, which don't, and when to give up."""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import EndReason, WaitingReason
from spottrain_api.contract.reports import FATAL_REASONS, Failure, FailureReason, Progress, is_aborted
from spottrain_api.v1alpha1.status import GenerationStatus, Phase
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.members import (
    STILL_IN,
    MemberFacts,
    MemberState,
    culprits,
    has_trained,
    killed,
    leaving_sentence,
    members_of,
    worked_unseen,
)
from spottrain_operator.core.facts.progress import newest_progress
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.facts.standstill import ALL_RANKS, standstill
from spottrain_operator.core.model import CANNOT_START, Refusal
from spottrain_operator.core.policies.ending import finish, request_end
from spottrain_operator.core.policies.transitions import open_transition
from spottrain_operator.core.timing import after, seconds_between
from spottrain_operator.core.words.pods import ended_early_sentence, start_sentence
from spottrain_runtime.wording import clause, counted

# Another member is their cause.
_OF_OTHERS = frozenset({FailureReason.LOST_PEER, FailureReason.RENDEZVOUS_FAILED})
UNEXPLAINED = ". No pod says why that one ended: see the logs of the others"
EARLIER_JOB = (
    "An earlier job has used the folder at checkpoint.uri, or it is a copy. This one resumes from its newest commit, "
    "or starts at step 0 if it committed nothing"
)


def handle_failures(situation: Situation, draft: Draft) -> Draft:
    """Stop the other ranks if some have failed, as they hang.

    The cause is judged once all have ended.
    """
    generation = draft.running
    if generation is None:
        return draft
    members = members_of(situation, generation)
    failed = [m for m in members if m.state in (MemberState.FAILED, MemberState.BROKEN)]
    if not failed:
        return draft
    guilty = culprits(generation, members)
    fatal = next((m.failure for m in failed if m.failure is not None and _is_fatal(m.failure)), None)
    if fatal is not None and not guilty and not missing_program(situation, draft):
        draft = open_transition(situation, draft, Cause.FAILURE, fatal.message)
        draft = draft.update(failures=draft.status.failures + 1)
        return finish(situation, draft, Phase.FAILED, fatal.reason, fatal.message)
    cause = Cause.NODE_LOST if guilty else Cause.FAILURE
    message = guilty[0].message if guilty and guilty[0].message else failure_message(generation, members)
    return request_end(situation, draft, members, cause, message, at_once=True)


def _is_fatal(failure: Failure) -> bool:
    """Whether a retry would fail in the same way. A device that fails in a job that has trained is a lost member."""
    return failure.reason in FATAL_REASONS or failure.reason is FailureReason.DEVICE_FAILED


def missing_program(situation: Situation, draft: Draft) -> str:
    """The sentence that the newest generation's program is missing.

    A job that has trained waits until it is edited. Empty for a new job, which fails instead.
    """
    generation, status = draft.status.generation, draft.status
    if generation is None or not has_trained(status):
        return ""
    failures = (m.failure for m in members_of(situation, generation))
    return next((f.message for f in failures if f is not None and f.reason is FailureReason.ENTRYPOINT_NOT_FOUND), "")


def failure_message(generation: GenerationStatus, members: tuple[MemberFacts, ...]) -> str:
    """The sentence that says most about why a generation failed.

    It starts with the pod and rank that it is about. A member that left early explains that the others lost it. If
    nothing is left of the cause, as of an agent that has restarted and stopped since, it is the first sentence.
    """
    if left := _leaving(members):
        return f"{left}; its peers lost it. {ALL_RANKS}"
    pod, failure = _first_failure(members)
    if failure is None or failure.reason in _OF_OTHERS:  # a pod that ended, or an agent that restarted
        said = next((m.message for m in members if m.message), "")
        if said or failure is None:
            return said or generation.message or "ranks failed without a reason; see the pods' logs"
    rank = f", rank {failure.rank}" if failure.rank is not None else ""
    message = failure.message
    if failure.reason is FailureReason.LOST_PEER and failure.fence is None and all(map(_has_ended, members)):
        message = clause(message) + UNEXPLAINED
    return f"pod {pod}{rank}: {message}"


def _has_ended(m: MemberFacts) -> bool:
    return m.state not in STILL_IN


def failure_traceback(members: tuple[MemberFacts, ...]) -> str:
    """The end of the traceback of that failure, on lines of its own; empty if there is none."""
    _, failure = _first_failure(members)
    if failure is None or not failure.traceback or _leaving(members):
        return ""
    return f"\n{failure.traceback}"


def _leaving(members: tuple[MemberFacts, ...]) -> str:
    """Which member left early, as the one cause of all failures; empty if one has another cause."""
    reasons = {m.failure.reason for m in members if m.failure is not None}
    return leaving_sentence(members) if reasons and reasons <= _OF_OTHERS else ""


def _first_failure(members: tuple[MemberFacts, ...]) -> tuple[str, Failure | None]:
    """The failure that explains the others, with its pod."""
    failures = [(m.member.pod, m.failure) for m in members if m.failure is not None]
    return min(failures, key=lambda failed: _remoteness(failed[1]), default=("", None))


def _remoteness(failure: Failure) -> int:
    """How far a failure is from the cause: 0 if it is the cause."""
    if failure.reason in _OF_OTHERS or is_aborted(failure):
        return 2
    return int(failure.reason is FailureReason.KILLED)  # a rank that gives up may end the others of its pod


def handle_hang(situation: Situation, draft: Draft) -> Draft:
    """Stop a generation without a step for longer than the job allows."""
    generation = draft.running
    if generation is None:
        return draft
    found = standstill(situation, generation)
    if found is None or found.seconds <= found.limit:
        return draft
    members = members_of(situation, generation)
    return request_end(situation, draft, members, Cause.HANG, hang_message(situation, generation), at_once=True)


def hang_message(situation: Situation, generation: GenerationStatus) -> str:
    """The sentence that says for how long there was no step, and what to do."""
    policy = situation.spec.run_policy
    what, limit = "step", f"runPolicy.hangTimeoutSeconds ({policy.hang_timeout_seconds})"
    if generation.first_step_at is None:
        what, limit = "first step", f"runPolicy.startTimeoutSeconds ({policy.start_timeout_seconds})"
    if left := leaving_sentence(members_of(situation, generation), until=generation.requested_at):
        return f"no rank made a {what} within {limit}: {left}. {ALL_RANKS}"
    unseen = ". Steps of a loop without training.steps don't count" if generation.first_step_at is None else ""
    return (
        f"no rank made a {what} within {limit}; see what the script waits for, or raise the limit{unseen}. The log "
        "of each pod shows where its ranks stood: mostly one is elsewhere, and the others wait for it"
    )


def charge_failure(situation: Situation, draft: Draft, generation: GenerationStatus, message: str) -> Draft:
    """Count a failure that no lost node explains.

    Give up if the budget is spent, or if no step is ever made.
    """
    policy, status = situation.spec.run_policy, draft.status
    failures = status.failures + 1
    stuck = status.generations_without_progress
    if made_progress(newest_progress(situation, generation)):
        stuck = 0
    elif not worked_unseen(situation, generation):
        stuck += 1
    draft = draft.update(failures=failures, generations_without_progress=stuck)
    # The event of the generation's end has said the message already.
    if stuck >= situation.timing.max_generations_without_progress:
        why = f"{counted(stuck, 'generation')} in a row failed like this, without making a step"
        text = f"{clause(message)}; {why}"
        return finish(situation, draft, Phase.FAILED, EndReason.NO_PROGRESS, text, event=why)
    if failures > policy.failure_budget and situation.observed.job.understands("runPolicy.failureBudget"):
        why = f"this was failure {failures}, and runPolicy.failureBudget is {policy.failure_budget}"
        text = f"{clause(message)}; {why}"
        return finish(situation, draft, Phase.FAILED, EndReason.FAILURE_BUDGET_EXCEEDED, text, event=why)
    return draft


def meets_an_earlier_job(situation: Situation, draft: Draft, generation: GenerationStatus) -> bool:
    """Whether the checkpoints of a deleted job fenced this generation.

    A job that resumes from them doesn't know the generation numbers of that job until its first generation is fenced.
    The next one is numbered above them. This doesn't count as a failure.
    """
    if draft.status.commit is not None or generation.first_step_at is not None:
        return False
    failures = (m.failure for m in members_of(situation, generation))
    return any(f is not None and (f.fence or 0) > generation.number for f in failures)


def made_progress(newest: Progress | None) -> bool:
    return newest is not None and newest.step > newest.start_step


def handle_pods_that_cannot_start(situation: Situation, draft: Draft) -> Draft:
    """Give up on a new job if no pod that has a node can start.

    A job that had a generation waits to be corrected.
    """
    if not _may_give_up(situation, draft):
        return draft
    refusal = _lasting_refusal(situation)
    if refusal is not None:
        if situation.now <= after(refusal.since, situation.timing.refusal_patience):
            return draft
        message = f"{clause(refusal.message)}; provide what is missing, or change the job"
        return finish(situation, draft, Phase.FAILED, EndReason.CANNOT_START, message)
    stuck = (f for f in situation.pods.values() if _cannot_start(f, situation))
    waiting = next((facts for facts in stuck if situation.now > _last_chance(facts)), None)
    if waiting is not None:
        message = start_sentence(situation.observed.job.namespace, waiting.pod)
        return finish(situation, draft, Phase.FAILED, EndReason.CANNOT_START, message)
    # What was killed or rejected from outside says nothing of the job: the next pod may start.
    failures = [f for f in start_failures(situation, draft) if not killed(f.pod)]
    if len(failures) < situation.timing.max_start_failures:
        return draft
    message = ended_early_sentence(situation.observed.job.namespace, [f.pod for f in failures])
    return finish(situation, draft, Phase.FAILED, EndReason.CANNOT_START, message)


def gives_up_at(situation: Situation, draft: Draft) -> datetime | None:
    """When a new job fails, if no pod starts before; None if what its pods wait for may last."""
    if not _may_give_up(situation, draft):
        return None
    refusal = _lasting_refusal(situation)
    if refusal is not None:
        return after(refusal.since, situation.timing.refusal_patience)
    return min((_last_chance(f) for f in situation.pods.values() if _cannot_start(f, situation)), default=None)


def _may_give_up(situation: Situation, draft: Draft) -> bool:
    """Whether the job is new and understood, and no pod has started or may."""
    is_new = draft.status.generation is None
    return is_new and not situation.observed.job.left_out and not _may_start(situation)


def _lasting_refusal(situation: Situation) -> Refusal | None:
    refusal = situation.refusal
    return refusal if refusal is not None and refusal.lasting and not situation.pods else None


def _may_start(situation: Situation) -> bool:
    """Whether a pod's container has started, or may on the node that the pod has.

    Events are read of one pod alone: what it can't mount, those that create their containers can't either.
    """
    pods = [f for f in situation.pods.values() if situation.is_of_template(f.pod) and not f.finished]
    if any(f.pod.container_started for f in pods):
        return True
    lacks_volume = any(f.pod.waiting_reason == WaitingReason.FAILED_MOUNT for f in pods)
    coming = [f.pod for f in pods if f.usable and f.pod.node is not None and f.pod.waiting_reason not in CANNOT_START]
    return any(not lacks_volume or pod.initializing_since is not None for pod in coming)


def _cannot_start(facts: PodFacts, situation: Situation) -> bool:
    pod = facts.pod
    if not situation.is_of_template(pod) or facts.coming_loss is not None or pod.container_started:
        return False
    return pod.waiting_reason in CANNOT_START


def _last_chance(facts: PodFacts) -> datetime:
    """When the patience with a pod that can't start ends."""
    pod, timing = facts.pod, facts.timing
    # A missing volume is never mounted, but a disk may take minutes to attach.
    slow = pod.waiting_reason == WaitingReason.FAILED_MOUNT and "not found" not in (pod.waiting_message or "")
    patience = timing.stuck_start if slow else timing.start_failure_patience
    return after(pod.stuck_since, patience)


def start_failures(situation: Situation, draft: Draft) -> list[PodFacts]:
    """Pods that failed before they joined a generation, oldest first.

    Their container ended, or their kubelet rejected them, and nothing points to the loss of their node. The pods are
    kept for a while. Counting existing pods never counts one twice, even if the operator restarts.
    """
    generation = draft.status.generation
    joined = {m.pod_uid for m in generation.members} if generation is not None else set()
    return [
        facts
        for uid, facts in situation.pods.items()
        if facts.pod.phase == "Failed"
        and situation.is_of_template(facts.pod)
        and uid not in joined
        and not (facts.report is not None and facts.report.generation)  # it has joined an earlier one
        and not (facts.pod.deleting or facts.node_lost or facts.coming_loss is not None)
        and seconds_between(facts.pod.created_at, situation.now) < situation.timing.start_failure_window
    ]
