"""Generations: how one ends, and how the next one follows."""

from __future__ import annotations

from datetime import datetime

from spottrain_api.contract.assignments import CapacityType, Member
from spottrain_api.contract.causes import Cause
from spottrain_api.contract.conditions import EventReason
from spottrain_api.contract.reports import Progress, TrainerPhase
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus, Phase, ProgressStatus
from spottrain_operator.core.draft import Draft
from spottrain_operator.core.facts.causes import FAILURES, PREEMPTIONS
from spottrain_operator.core.facts.members import (
    STILL_IN,
    MemberFacts,
    MemberState,
    culprits,
    members_of,
    worked_unseen,
)
from spottrain_operator.core.facts.pauses import pause_of
from spottrain_operator.core.facts.places import Places, places
from spottrain_operator.core.facts.progress import found_commits, newest_progress
from spottrain_operator.core.facts.replicas import newest_replicated_step
from spottrain_operator.core.facts.situation import PodFacts, Situation
from spottrain_operator.core.policies.ending import finish, request_end
from spottrain_operator.core.policies.failure_policy import (
    EARLIER_JOB,
    charge_failure,
    failure_message,
    failure_traceback,
    hang_message,
    made_progress,
    meets_an_earlier_job,
    missing_program,
)
from spottrain_operator.core.policies.growth import coming
from spottrain_operator.core.policies.profiles import waits_for_profile
from spottrain_operator.core.policies.recording import record_progress
from spottrain_operator.core.policies.rivals import rival_of
from spottrain_operator.core.policies.time_spent import spend_on_end
from spottrain_operator.core.policies.transitions import close_transitions, open_transition
from spottrain_operator.core.policies.understanding import waits_to_be_understood
from spottrain_operator.core.timing import after, seconds_between
from spottrain_runtime.wording import listed


def succeed(situation: Situation, draft: Draft) -> Draft:
    """End the job as SUCCEEDED once all members have succeeded.

    A member that was lost at the very end doesn't matter, unless it has rank 0, on which scripts keep their results.
    """
    generation = draft.running
    if generation is None:
        return draft
    members = members_of(situation, generation)
    done = {MemberState.SUCCEEDED, MemberState.LOST}
    if members[0].state is not MemberState.SUCCEEDED or any(m.state not in done for m in members):
        return draft
    newest = newest_progress(situation, generation)
    draft = record_progress(situation, draft, at_once=True)
    draft = draft.update_generation(reason=Cause.SUCCEEDED.value)
    draft = close_transitions(draft, newest.step if newest is not None else draft.status.progress.step, situation.now)
    message, event, reported = _trained_to(draft.status.progress), "", members[0].progress
    if newest is None and reported is not None and not _is_complete(draft.status.progress):
        message, event = _without_a_step(draft.status.progress, reported), "Exit code 0 counts as a success"
        draft = draft.record(EventReason.NOT_AS_PLANNED, message, warning=True)
    if newest is not None and found_commits(generation, newest) and not made_progress(newest):
        message = (
            f"Nothing to train: {situation.spec.checkpoint.uri} was already at step {newest.step} of "
            f"{newest.total_steps}. For a fresh run, create a new job with a different checkpoint.uri. To "
            "train on, raise the script's steps"
        )
    return finish(situation, draft, Phase.SUCCEEDED, Cause.SUCCEEDED, message, event=event)


def _is_complete(progress: ProgressStatus) -> bool:
    return progress.total_steps is not None and progress.step >= progress.total_steps


def _trained_to(progress: ProgressStatus) -> str:
    """Where a job has ended, if that was too early, and what did not go as planned.

    A skipped step did.
    """
    total, trained = progress.total_steps, f"Trained to step {progress.step}"
    if total is not None and not _is_complete(progress):
        trained += f" of {total}: the script ended by itself before the last step, as with early stopping"
    judged = progress.skipped_steps or progress.rollbacks
    return f"{trained}. {progress.message}" if progress.message and not judged else trained


def _without_a_step(before: ProgressStatus, progress: Progress) -> str:
    """That the script of a job ended before its loop, and where to look."""
    if progress.phase is TrainerPhase.STARTING:
        why = (
            "it never opened its session. Look at what comes before spottrain.session in the script: "
            'the line if __name__ == "__main__", sys.exit, a return'
        )
    else:
        why = "it left its session before the loop of steps"
    since = f"Trained to step {before.step} of {before.total_steps}. Then the" if before.step else "The"
    return f"{since} script ended with exit code 0 without a step: {why}"


def enforce_deadline(situation: Situation, draft: Draft) -> Draft:
    """Stop a drain that can no longer end: its time is over, or a member has left."""
    generation = draft.running
    if generation is None or generation.state is not GenerationState.DRAINING:
        return draft
    members = members_of(situation, generation)
    if not any(m.state in STILL_IN for m in members):
        return draft
    cause = Cause(generation.reason or Cause.EDITED)
    left = next((m for m in members if m.state in (MemberState.STOPPED, MemberState.RELEASED)), None)
    if left is not None:
        message = f"pod {left.member.pod} has left it"
        return request_end(situation, draft, members, cause, message, at_once=True)
    due = _drains_until(situation, generation)
    if due is not None and situation.now > after(due, situation.timing.drain_overtime):
        return request_end(situation, draft, members, cause, "its drain had not ended by the deadline", at_once=True)
    return draft


def _drains_until(situation: Situation, generation: GenerationStatus) -> datetime | None:
    """The deadline of a drain by the clock of this operator.

    Another operator may have set it, by another clock. What it gave the drain in all is known, and passes anew.
    """
    deadline, requested_at = generation.deadline, generation.requested_at
    if deadline is None or requested_at is None:
        return deadline
    return max(deadline, after(situation.observed.listening_since, seconds_between(requested_at, deadline)))


def conclude(situation: Situation, draft: Draft) -> Draft:
    """End the generation once no member is in it.

    Then judge what that means for the job.
    """
    generation = draft.running
    if generation is None:
        return draft
    members = members_of(situation, generation)
    if any(m.state in STILL_IN for m in members) or _awaits_culprit(situation, generation, members):
        return draft
    cause = _cause(situation, draft, generation)
    message = _message(situation, generation, members, cause)
    draft = record_progress(situation, draft, at_once=True)
    draft = spend_on_end(situation, draft, unreported=worked_unseen(situation, generation))
    draft = open_transition(situation, draft, cause, message)
    failed = message if cause is Cause.FAILURE else None
    draft = draft.update_generation(
        state=GenerationState.ENDED, ended_at=situation.now, reason=cause.value, message=failed, deadline=None
    )
    if cause is Cause.EARLIER_JOB:
        draft = draft.record(cause, message)
    elif Cause.FAILURE in (generation.reason, cause):
        text = f"Generation {generation.number} has ended: {message}{failure_traceback(members)}"
        draft = draft.record(cause, text, warning=True)
    status = draft.status
    if cause in FAILURES:
        spared = missing_program(situation, draft)
        return draft if spared else charge_failure(situation, draft, generation, message)
    if cause in PREEMPTIONS:
        without_notice = status.preemptions_without_notice + (cause is Cause.NODE_LOST)
        draft = draft.update(preemptions=status.preemptions + 1, preemptions_without_notice=without_notice)
    if made_progress(newest_progress(situation, generation)) and status.generations_without_progress:
        draft = draft.update(generations_without_progress=0)
    return draft


def _awaits_culprit(situation: Situation, generation: GenerationStatus, members: tuple[MemberFacts, ...]) -> bool:
    """Whether a failure may be the first sign of a lost node.

    A member without peers failed by itself.
    """
    if generation.reason not in FAILURES or culprits(generation, members) or generation.requested_at is None:
        return False
    if len(members) == 1 and members[0].state in (MemberState.FAILED, MemberState.STOPPED):
        return False
    return seconds_between(generation.requested_at, situation.now) < situation.timing.culprit_grace


def _cause(situation: Situation, draft: Draft, generation: GenerationStatus) -> Cause:
    cause = Cause(generation.reason) if generation.reason is not None else Cause.FAILURE
    members = members_of(situation, generation)
    guilty = culprits(generation, members)
    # An eviction begins as a preemption does, with a SIGTERM or a silence.
    if cause in PREEMPTIONS and not guilty and any(m.facts and m.facts.pod.exceeded_limits for m in members):
        return Cause.FAILURE
    if cause not in FAILURES:
        return cause
    if meets_an_earlier_job(situation, draft, generation):
        return Cause.EARLIER_JOB
    return Cause.NODE_LOST if guilty else cause


def _message(
    situation: Situation, generation: GenerationStatus, members: tuple[MemberFacts, ...], cause: Cause
) -> str:
    if cause is Cause.FAILURE:
        return failure_message(generation, members)
    if cause is Cause.HANG:
        return hang_message(situation, generation)
    if cause is Cause.EARLIER_JOB:
        return EARLIER_JOB
    gone = [
        m for m in members if m.state is MemberState.LOST or (m.facts is not None and m.facts.coming_loss is not None)
    ]
    names = listed([m.member.node for m in gone])
    if cause is Cause.PREEMPTED:
        return f"notice for {names}" if names else "a notice reached an agent"
    if cause is Cause.NODE_LOST:
        return f"{names} went without notice" if names else "a node went without notice"
    return ""


def start_next(situation: Situation, draft: Draft) -> Draft:
    """Start a generation with the pods that are up.

    It starts if they are enough and it doesn't pay to wait for more.
    """
    if draft.running is not None or pause_of(situation) or rival_of(situation, draft):
        return draft
    if waits_for_profile(situation):
        return draft
    if waits_to_be_understood(situation, draft) or (situation.tries_template and situation.refusal is None):
        return draft
    found = places(situation, draft.status)
    chosen = _chosen(situation, found)
    if len(chosen) < situation.spec.nodes.min or _waits(situation, draft, found.kept, chosen):
        return draft
    last = draft.status.generation
    number = 1 + max(last.number if last is not None else 0, _highest_known(situation, draft))
    generation = _generation(situation, draft, number, chosen)
    same = last is not None and last.template_hash == generation.template_hash
    if same and missing_program(situation, draft):
        return draft
    begun = {"world_size_after": generation.world_size, "from_replicas": generation.replicated_step is not None}
    transitions = tuple(
        t if t.world_size_after is not None else t.model_copy(update=begun) for t in draft.status.transitions
    )
    draft = draft.update(
        generation=generation,
        transitions=transitions,
        start_time=draft.status.start_time or situation.now,
    )
    members = ", ".join(m.pod for m in generation.members)
    return draft.record(
        EventReason.GENERATION_STARTED, f"Generation {number} starts from {_start(generation)} with {members}"
    )


def _chosen(situation: Situation, found: Places) -> list[PodFacts]:
    """Pods that could start now.

    Prewarmed ones stand in for spot pods that couldn't.
    """
    kept = (situation.pods[uid] for uid in found.kept)
    absent = sum(f.pod.capacity_type is CapacityType.SPOT and not f.candidate for f in kept)
    standing_in = situation.candidates(found.prewarmed)[:absent]
    candidates = situation.candidates((*found.kept, *(f.pod.uid for f in standing_in)))
    return candidates[: situation.spec.nodes.max]


def _start(generation: GenerationStatus) -> str:
    """From where a generation starts.

    The operator doesn't know commits of an earlier job, or of a fork.
    """
    if generation.replicated_step is not None:
        return f"replicas of step {generation.replicated_step.step}"
    if generation.resume is not None:
        return f"step {generation.resume.step}"
    return "the newest commit, or step 0 if there is none,"


def _highest_known(situation: Situation, draft: Draft) -> int:
    """The highest generation that agents have seen, or that the URI holds.

    An earlier job may have left one at this URI. A generation that isn't numbered above it would be fenced, or count
    as an old one.
    """
    commit = draft.status.commit
    reports = [view.report for view in situation.observed.reports.values()]
    fences = [report.failure.fence or 0 for report in reports if report.failure is not None]
    return max([commit.generation if commit is not None else 0, *fences, *(report.generation for report in reports)])


def _generation(situation: Situation, draft: Draft, number: int, chosen: list[PodFacts]) -> GenerationStatus:
    job = situation.observed.job
    members = tuple(
        Member(
            pod=facts.pod.name,
            pod_uid=facts.pod.uid,
            address=facts.pod.ip or "",
            node=facts.pod.node or "",
            node_rank=node_rank,
            capacity_type=facts.pod.capacity_type,
            replica_port=facts.report.replica_port if facts.report is not None else None,
        )
        for node_rank, facts in enumerate(chosen)
    )
    report = chosen[0].report
    port = report.rendezvous_port if report is not None else 0
    return GenerationStatus(
        number=number,
        state=GenerationState.ACTIVE,
        # A restore of etcd may let the number come again. The time tells the two apart.
        rendezvous_id=f"{job.name}-{job.uid[:8]}-g{number}-{situation.now:%Y%m%d%H%M%S}",
        rendezvous_endpoint=f"{members[0].address}:{port}",
        world_size=len(members) * situation.spec.processes_per_node,
        members=members,
        resume=draft.status.commit,
        replicated_step=newest_replicated_step(situation, chosen, draft.status.commit),
        template_hash=situation.run_hash_on(facts.pod.template_hash for facts in chosen),
        started_at=situation.now,
    )


def _waits(situation: Situation, draft: Draft, kept: tuple[str, ...], chosen: list[PodFacts]) -> bool:
    """Whether more pods will be ready soon enough to wait for them."""
    others = coming(situation, set(kept))
    last = draft.status.generation
    if not others or len(situation.candidates(kept)) >= situation.spec.nodes.max:
        return False
    enough_since = _enough_since(situation, chosen)
    if last is None and seconds_between(enough_since, situation.now) < situation.timing.first_generation_patience:
        return True
    if not any(f.pod.ready and _may_come_back(situation, f) for f in others):
        return False
    ended = [last.ended_at or last.started_at] if last is not None else []
    since = max(*ended, enough_since, situation.observed.listening_since)
    return seconds_between(since, situation.now) < situation.timing.next_generation_patience


def _may_come_back(situation: Situation, facts: PodFacts) -> bool:
    """Whether its agent may join.

    It was heard just now, or is one that a new operator has yet to hear.
    """
    if facts.received_at is not None:
        return facts.silence < situation.timing.silent_on_lost_node
    ready_since = facts.pod.ready_since
    return ready_since is not None and ready_since < situation.observed.listening_since


def _enough_since(situation: Situation, chosen: list[PodFacts]) -> datetime:
    """Time at which as many pods were ready as nodes.min asks for."""
    ready = sorted(f.pod.ready_since or f.pod.created_at for f in chosen)
    return ready[situation.spec.nodes.min - 1]
