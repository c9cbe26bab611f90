"""What a job's time went into.

That the parts add up is checked in every life of test_plan_simulation.py, too.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scene import NOW, START, at, failed, starting_job, training, training_job
from simulation.world import World
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.contract.reports import FailureReason, Progress, TrainerPhase
from spottrain_api.v1alpha1.spending import TimeStatus
from spottrain_api.v1alpha1.status import Phase, ProgressStatus, TrainingJobStatus, Transition
from world.invariants import parts_of
from world.jobs import spec_of


def times(status: TrainingJobStatus) -> dict[str, float]:
    """The parts that are not zero."""
    return {name.removesuffix("_seconds"): round(value, 3) for name, value in parts_of(status.time).items() if value}


def progress(**changes: object) -> Progress:
    return training().model_copy(update=changes)


def test_the_time_up_to_the_newest_step_is_split_into_start_waits_stalls_and_steps() -> None:
    scene = replace(starting_job(), now=NOW)
    said: dict[str, Any] = {"generation": 1, "phase": AgentPhase.RUNNING, "step_age_seconds": 1.0}
    scene = scene.all_say(**said, progress=progress(waited_seconds=4.0, stalled_seconds=2.5))
    scene = scene.says(3, **said, progress=progress(waited_seconds=6.0, stalled_seconds=1.0))
    status = scene.decided().observed.job.status
    # The generation started at 3 s, its first step ended at 10 s, its newest at 99 s.
    assert times(status) == {"start_up": 7, "data_wait": 6, "commit_stall": 2.5, "productive": 80.5}
    assert status.time is not None
    assert status.time.until == at(99)
    assert status.goodput == pytest.approx(80.5 / 97, abs=1e-4)


def test_a_rank_that_waits_longest_and_reports_no_more_is_not_counted_again() -> None:
    scene = training_job()
    waited = []
    for seconds, newest_step in ((6.0, 109), (1.0, 119), (6.0, 129), (8.0, 139)):
        said = progress(waited_seconds=seconds, last_step_at=at(newest_step))
        scene = scene.later(10).all_say(progress=said).decided()
        waited.append(times(scene.observed.job.status)["data_wait"])
    assert waited == [6, 6, 6, 8]


def test_steps_up_to_the_newest_of_an_earlier_generation_are_redone() -> None:
    lost = Transition(generation=1, reason="NodeLost", at=at(50), last_step=50, seconds_without_step=10.0)
    before = TimeStatus(until=at(50), productive_seconds=50.0)
    scene = training_job().status(
        transitions=(lost,),
        time=before,
        start_time=START,
        progress=ProgressStatus(step=50, last_step_at=at(49)),
        accounted_at=None,
    )
    scene = scene.generation(number=2, first_step_at=at(60))
    # Resumed from step 40; 39 s for steps 42 to 61, of which 42 to 50 are made again.
    resumed = progress(generation=2, start_step=40, step=61, first_step_at=at(60))
    status = scene.all_say(generation=2, progress=resumed).plan().status
    again = 39 * 9 / 20
    assert times(status) == {"restart": 10, "redone": round(again, 3), "productive": round(50 + 39 - again, 3)}


def test_steps_that_a_rollback_undid_stay_productive() -> None:
    """They are not made again: training continues with the next samples."""
    scene = training_job()
    before = times(scene.observed.job.status)
    undid = progress(step=150, last_step_at=at(199), rollbacks=1)
    status = scene.later(100).all_say(progress=undid).plan().status
    assert times(status) == before | {"productive": before["productive"] + 100}


def test_a_generation_whose_start_was_recorded_is_a_restart() -> None:
    """A pass between start and first step records a progress without a step."""
    scene = training_job().status(
        transitions=(Transition(generation=1, reason="NodeLost", at=at(50), last_step=50),),
        time=TimeStatus(until=at(50), productive_seconds=50.0),
        start_time=START,
        progress=ProgressStatus(step=50, last_step_at=at(49)),
        accounted_at=None,
    )
    scene = scene.generation(number=2, first_step_at=None)
    starts = progress(generation=2, start_step=50, step=50, first_step_at=None, last_step_at=None)
    scene = scene.all_say(generation=2, progress=starts).decided().later(60)
    assert scene.observed.job.status.progress.last_step_at is None
    stepped = progress(generation=2, start_step=50, step=60, first_step_at=at(90), last_step_at=at(95))
    status = scene.all_say(generation=2, progress=stepped).plan().status
    assert times(status) == {"restart": 40, "productive": 55}


def test_a_clock_that_is_ahead_gains_no_time() -> None:
    scene = training_job().status(accounted_at=None, time=TimeStatus(until=at(90)), start_time=at(90))
    status = scene.all_say(progress=progress(last_step_at=NOW + timedelta(hours=1))).plan().status
    assert status.time is not None
    assert status.time.until == NOW
    assert sum(parts_of(status.time).values()) == 10


@pytest.mark.parametrize("behind", [5, 3600])
def test_a_new_leader_whose_clock_is_behind_takes_no_time_back(behind: int) -> None:
    scene = training_job()
    before = scene.observed.job.status.time
    scene = replace(scene, now=at(99 - behind)).all_say(progress=progress(step=54, last_step_at=at(103)))
    assert scene.status(accounted_at=None).plan().status.time == before


def test_a_failed_generation_without_a_step_prolongs_the_start() -> None:
    scene = failed(replace(starting_job(), now=at(20)).all_say(generation=1), FailureReason.START_FAILED)
    status = scene.later(6).decided().later(6).decided().observed.job.status
    assert times(status) == {"start_up": 29}


def test_a_script_that_reports_no_steps_leaves_its_time_unreported() -> None:
    scene = replace(starting_job(), now=at(3600)).all_say(generation=1, phase=AgentPhase.RUNNING)
    status = scene.all_say(generation=1, phase=AgentPhase.SUCCEEDED).plan().status
    assert status.phase is Phase.SUCCEEDED
    assert times(status) == {"unreported": 3597}
    assert (status.goodput, status.goodput_display) == (None, None)


def test_goodput_is_a_share_of_the_time_with_reports() -> None:
    before = TimeStatus(until=at(1000), unreported_seconds=800.0, restart_seconds=200.0)
    scene = training_job().status(start_time=START, time=before, accounted_at=None)
    scene = scene.status(goodput=0.5, goodput_display="50.0%")
    scene = replace(scene, now=at(1100)).generation(started_at=at(990), first_step_at=at(1000))
    without = scene.all_say(progress=None).plan().status
    assert (without.goodput, without.goodput_display) == (None, None)
    stepped = progress(step=150, first_step_at=at(1000), last_step_at=at(1100))
    status = scene.all_say(progress=stepped).plan().status
    assert times(status) == {"unreported": 800, "restart": 200, "productive": 100}
    assert (status.goodput, status.goodput_display) == (round(100 / 300, 4), "33.3%")


def test_the_time_of_a_script_without_the_library_is_left_out_while_it_runs() -> None:
    before = TimeStatus(until=at(1000), productive_seconds=900.0, start_up_seconds=100.0)
    scene = replace(training_job(), now=at(9000)).status(start_time=START, time=before, accounted_at=None)
    scene = scene.generation(started_at=at(1000), first_step_at=None).all_say(progress=None)
    assert scene.plan().status.goodput == 0.9


def test_a_script_without_the_library_whose_pods_vanish_in_a_drain_stays_unreported() -> None:
    scene = replace(starting_job(), now=at(7200)).all_say(generation=1, phase=AgentPhase.RUNNING).decided()
    for sequence in (1, 2, 3, 4):
        scene = scene.pod(sequence, deleting=True)
    scene = scene.decided().later(3)
    assert scene.observed.job.status.phase is Phase.DRAINING
    for sequence in (1, 2, 3, 4):
        scene = scene.without_pod(sequence).forgets(sequence)
    status = scene.decided().later(3).decided().observed.job.status
    assert times(status).keys() == {"unreported", "capacity"}


@pytest.mark.parametrize(("uses_library", "part"), [(True, "start_up"), (False, "unreported")])
def test_a_generation_whose_pods_vanish_with_their_reports_is_known_by_what_it_did(
    uses_library: bool, part: str
) -> None:
    starts = progress(phase=TrainerPhase.STARTING, total_steps=None, first_step_at=None, last_step_at=None)
    said = {"generation": 1, "phase": AgentPhase.RUNNING, "progress": starts if uses_library else None}
    scene = replace(starting_job(), now=at(200)).all_say(**said).decided().later(3)
    for sequence in (1, 2, 3, 4):
        scene = scene.without_pod(sequence).forgets(sequence)
    status = scene.decided().observed.job.status
    assert [transition.reason for transition in status.transitions] == ["NodeLost"]
    assert times(status) == {part: 200}


def test_waits_for_nodes_and_suspensions_are_parts_of_their_own() -> None:
    world = World(spec_of(nodes={"min": 2, "max": 2}, capacity={"onDemand": {"min": 2}}), seed=2, total_steps=240)
    nodes = [world.add_node(CapacityType.ON_DEMAND) for _ in range(2)]
    world.run(60)
    world.kill(nodes[1])
    world.run(200)
    world.add_node(CapacityType.ON_DEMAND)
    world.run(30)
    world.edit(runPolicy={"suspend": True})
    world.run(100)
    world.edit(runPolicy={"suspend": False})
    world.run_until_finished(600)
    status = world.status
    assert (status.phase, world.problems) == (Phase.SUCCEEDED, [])
    assert status.time is not None
    assert status.start_time is not None
    assert 165 < status.time.capacity_seconds < 180
    assert 90 < status.time.suspended_seconds < 101
    assert 0 < status.time.restart_seconds < 80
    assert 0 < status.time.start_up_seconds < 10
    assert 240 * 0.25 < status.time.productive_seconds < 240 * 0.5
    assert status.goodput == round(
        status.time.productive_seconds / (status.time.until - status.start_time).total_seconds(), 4
    )
