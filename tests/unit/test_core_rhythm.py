"""When a job is looked at again, and when its progress is written.

Both happen seldom at rest, and with every event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from scene import NOW, START, Scene, commit, notice, training, training_job
from spottrain_api.contract.assignments import AgentPhase, Member
from spottrain_api.contract.notices import NodeWatch, WatchState
from spottrain_operator.core.model import Refusal
from spottrain_operator.core.timing import DEFAULT_TIMING


def at_rest(**run_policy: object) -> Scene:
    """All members train, and the last record was ten seconds ago."""
    scene = training_job(**({"runPolicy": run_policy} if run_policy else {}))
    scene = scene.all_say(step_age_seconds=0.5).status(accounted_at=NOW - timedelta(seconds=10))
    return replace(scene, observed=replace(scene.observed, timing=DEFAULT_TIMING))


def test_a_job_at_rest_waits_for_its_next_record_and_nothing_is_written() -> None:
    plan = at_rest().plan()
    assert plan.status == at_rest().observed.job.status
    assert (plan.actions, plan.events) == ((), ())
    assert plan.requeue_after == DEFAULT_TIMING.record_interval - 10


def to_a_new_operator(scene: Scene, num_heard: int) -> Scene:
    """The operator began to listen a second ago, and has heard `num_heard` agents."""
    known = dict(list(scene.observed.reports.items())[:num_heard])
    return replace(scene, observed=replace(scene.observed, reports=known, listening_since=NOW - timedelta(seconds=1)))


def test_a_job_that_a_new_operator_has_not_heard_waits_for_its_agents() -> None:
    unheard = to_a_new_operator(at_rest(), 0)
    assert unheard.plan().requeue_after == DEFAULT_TIMING.record_interval - 10
    assert unheard.node(4, notice=notice(4)).plan().requeue_after == 0.5
    assert unheard.node(4, ready=False).plan().requeue_after == 2.0, "its silence counts in a moment"
    assert to_a_new_operator(at_rest(), 1).plan().requeue_after == 2.0, "the others are missing"
    assert to_a_new_operator(at_rest(), 4).plan().requeue_after == DEFAULT_TIMING.record_interval - 10


@pytest.mark.parametrize("num_missed", [0, 1, 7])
def test_a_new_operator_makes_up_for_no_records(num_missed: int) -> None:
    """Otherwise the records of all jobs would be due in its first passes."""

    def recorded(seconds: float) -> Scene:
        newest = NOW - timedelta(seconds=num_missed * DEFAULT_TIMING.record_interval + seconds)
        return to_a_new_operator(at_rest().status(accounted_at=newest), 4)

    waits = recorded(10).plan()
    assert waits.status == recorded(10).observed.job.status
    assert waits.requeue_after == DEFAULT_TIMING.record_interval - 10
    assert recorded(DEFAULT_TIMING.record_interval).plan().status.accounted_at == NOW


@pytest.mark.parametrize(("seconds", "step"), [(19, 50), (20, 60), (250, 60)])
def test_a_record_of_the_future_puts_none_off(seconds: float, step: int) -> None:
    """The operator before, whose clock was five minutes ahead, wrote it."""
    ahead = at_rest().status(accounted_at=NOW + timedelta(seconds=300 - 10))
    taken_over = replace(ahead, observed=replace(ahead.observed, listening_since=NOW)).later(seconds)
    plan = taken_over.all_say(progress=training(60), step_age_seconds=0.5).plan()
    assert plan.status.progress.step == step
    assert plan.requeue_after is not None
    assert plan.requeue_after <= DEFAULT_TIMING.record_interval


RESTLESS: dict[str, Callable[[Scene], Scene]] = {
    "a member that is not there": lambda scene: scene.says(4, age=2.0),
    "a member that makes no steps": lambda scene: scene.says(4, step_age_seconds=40.0),
    "a pod that is no member": lambda scene: scene.generation(members=_members(scene)[:3]).says(
        4, generation=0, phase=AgentPhase.IDLE, progress=None, warm=False
    ),
    "a node that nobody watches": lambda scene: scene.says(4, watch=NodeWatch(state=WatchState.MISSING, seconds=3.0)),
}


def _members(scene: Scene) -> tuple[Member, ...]:
    generation = scene.observed.job.status.generation
    assert generation is not None
    return generation.members


@pytest.mark.parametrize("change", RESTLESS.values(), ids=RESTLESS)
def test_a_job_that_is_not_at_rest_is_looked_at_soon(change: Callable[[Scene], Scene]) -> None:
    assert change(at_rest()).plan().requeue_after == 2.0


def test_a_generation_that_ends_is_looked_at_sooner() -> None:
    assert at_rest().node(4, notice=notice(4)).plan().requeue_after == 0.5


def test_a_job_with_a_deadline_is_looked_at_by_then() -> None:
    started = at_rest().observed.job.status.start_time
    assert started is not None
    limit = int((NOW - started).total_seconds()) + 12
    requeue_after = at_rest(activeDeadlineSeconds=limit).plan().requeue_after
    assert requeue_after is not None
    assert 11 <= requeue_after <= 12


@pytest.mark.parametrize(
    ("lacks_one", "tried", "seconds"),
    [(True, 3, 27.0), (True, 100, 2.0), (False, 3, DEFAULT_TIMING.record_interval - 10)],
    ids=["a moment ago", "long ago", "that nobody lacks"],
)
def test_a_job_that_trains_tries_a_refused_pod_again_in_time(lacks_one: bool, tried: float, seconds: float) -> None:
    refusal = Refusal(
        metadata_generation=1,
        message="exceeded quota",
        since=START,
        lasting=False,
        tried_at=NOW - timedelta(seconds=tried),
        num_tries=9,
    )
    scene = at_rest().spec(nodes={"min": 2, "max": 5 if lacks_one else 4})
    scene = replace(scene, observed=replace(scene.observed, refusal=refusal))
    assert scene.plan().requeue_after == seconds


def test_whatever_changes_the_status_takes_the_progress_along() -> None:
    later = at_rest().all_say(progress=training(step=77), step_age_seconds=0.5)
    assert later.plan().status.progress.step == 50, "nothing else changes, so it can wait"
    status = later.says(1, commit=commit(1, 70)).plan().status
    assert (status.commit is not None and status.commit.step, status.progress.step) == (70, 77)
    assert status.accounted_at == NOW
