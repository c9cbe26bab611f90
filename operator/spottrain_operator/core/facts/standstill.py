"""How long no rank has made a step.

The operator ends a generation that hangs. Before that, the job's message shows the standstill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain_api.contract.names import LABEL_JOB
from spottrain_api.v1alpha1.status import GenerationState, GenerationStatus
from spottrain_operator.core.facts.members import STILL_IN, MemberFacts, is_unheard, leaving_sentence, members_of
from spottrain_operator.core.facts.progress import newest_progress
from spottrain_operator.core.facts.situation import Situation
from spottrain_operator.core.timing import seconds_between
from spottrain_runtime.wording import time_of_day

ALL_RANKS = (
    "Each rank has to make every step: see in the script what ends that one, such as a break, a return or sys.exit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Seconds without a step of any rank, and their limit.

    Attributes:
        setting: The setting of runPolicy that sets the limit. It sets none if this version doesn't understand it.
        after_session: Whether the script does something after its session, which has no limit.
    """

    seconds: float
    limit: float
    setting: str
    after_session: bool


def standstill(situation: Situation, generation: GenerationStatus) -> Standstill | None:
    """The standstill of the generation.

    None if the generation stops or has ended, or if nobody can know whether it makes steps. In a drain, ranks that
    save have until its deadline. Members that left before the first step are waited for. After it, one rank alone may
    have work left.
    """
    if generation.state not in (GenerationState.ACTIVE, GenerationState.DRAINING):
        return None
    members = members_of(situation, generation)
    heard = [m for m in members if m.state in STILL_IN and m.facts is not None and m.facts.heard]
    if generation.state is GenerationState.DRAINING and any(m.at_its_end for m in heard):
        return None
    starting = generation.first_step_at is None
    complete = all(m.state in STILL_IN or (starting and m.left_early) for m in members)
    if not heard or not complete or is_unheard(situation, generation):
        return None
    policy = situation.spec.run_policy
    hang = _limit(situation, policy.hang_timeout_seconds, "hangTimeoutSeconds")
    start = _limit(situation, policy.start_timeout_seconds, "startTimeoutSeconds")
    if starting:
        seconds, (limit, setting) = seconds_between(generation.started_at, situation.now), start
    else:
        # The last save of a large model takes long.
        saving = all(m.at_its_end for m in heard) or any(m.at_its_end and not m.has_steps_left for m in heard)
        seconds, (limit, setting) = _step_age(heard), max(hang, start) if saving else hang
    after_session = all(m.is_done for m in heard)
    limit = math.inf if after_session else limit
    return Standstill(seconds=seconds, limit=limit, setting=setting, after_session=after_session)


def _limit(situation: Situation, seconds: float, setting: str) -> tuple[float, str]:
    """The limit that `setting` of runPolicy sets, and its name."""
    return (seconds if situation.observed.job.understands(f"runPolicy.{setting}") else math.inf), setting


def _step_age(heard: Sequence[MemberFacts]) -> float:
    """Seconds since the newest step of any of these members.

    It is 0 if one doesn't report steps. A member at rest is taken to make steps, as it would report at once that they
    no longer come. One that is frozen can't. So it counts no longer once a peer has reported that, since no rank
    makes a step alone.
    """
    facts = [(m.facts, m.report is not None and m.report.stalled) for m in heard if m.facts is not None]
    stalled_at = max((f.received_at for f, stalled in facts if stalled and f.received_at), default=None)
    return min(
        f.step_age or 0.0
        for f, stalled in facts
        if stalled or stalled_at is None or (f.received_at is not None and f.received_at >= stalled_at)
    )


def standstill_sentence(situation: Situation, generation: GenerationStatus) -> str:
    """Since when no rank has made a step, and how to see where the ranks stand; empty while that is not unusual.

    All ranks wait for the one that hangs, so their steps do not show which one it is. One that has ended, or has left
    the loop, is named soon.
    """
    found, newest = standstill(situation, generation), newest_progress(situation, generation)
    timing = situation.timing
    left = leaving_sentence(members_of(situation, generation))
    lasts = found is not None and found.after_session
    if (
        found is not None
        and left
        and not lasts
        and (generation.first_step_at is None or found.seconds > timing.stepping)
    ):
        return f"{left}, while others have not. {_consequence(found)}. {ALL_RANKS}"
    usual = newest.step_seconds or 0.0 if newest is not None else 0.0
    if found is None or found.seconds <= max(min(timing.no_step, found.limit / 2), timing.stuck_steps * usual):
        return ""
    since = f"its start at {time_of_day(generation.started_at, situation.now)}"
    if generation.first_step_at is not None and newest is not None:
        since = f"{time_of_day(newest.last_step_at or generation.first_step_at, situation.now)} (step {newest.step})"
    if lasts:
        return f"no step since {since}: all ranks have left their session, and the script goes on"
    job = situation.observed.job
    if found.limit == math.inf:
        return f"no step since {since}. {_consequence(found)}. py-spy dump --subprocesses shows where ranks stand"
    return (
        f"no step since {since}. {_consequence(found, '; lower it to stop it sooner')}. Then the logs of all pods "
        f"show where each rank stood: kubectl logs -n {job.namespace} -l {LABEL_JOB}={job.name} --prefix --tail=300. "
        "py-spy dump --subprocesses shows it at once"
    )


def _consequence(found: Standstill, advice: str = "") -> str:
    if found.limit == math.inf:
        return f"The generation continues, as this operator doesn't understand runPolicy.{found.setting}"
    return f"Without a step for {found.limit} s the generation is stopped (runPolicy.{found.setting}{advice})"
