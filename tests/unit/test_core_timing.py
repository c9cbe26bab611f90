"""What a constant of `timing` decides changes exactly there, to the millisecond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

import timing_scenes as scenes
from spottrain_operator.core import timing

MILLISECOND = 0.001


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is true on one side of a constant alone.

    `at` says whether it holds at the constant. `step` is the smallest one.
    """

    holds: Callable[[float], bool]
    at: bool
    step: float = MILLISECOND


BOUNDARIES = {
    "SILENT_WHILE_OTHERS_ENDED": Boundary(scenes.is_lost_while_others_ended, False),
    "WITHOUT_RELAY": Boundary(scenes.is_lost_without_its_relay, True),
    "SILENT_WHILE_STUCK": Boundary(scenes.is_lost_while_stuck, False),
    "STUCK_STEPS": Boundary(scenes.is_stuck, False),
    "SILENT_ALONE": Boundary(scenes.is_lost_alone, False),
    "SILENT_ON_LOST_NODE": Boundary(scenes.is_lost_with_its_node, False),
    "CANDIDATE_REPORT_AGE": Boundary(scenes.is_candidate, True),
    "OPERATOR_RESTART_GRACE": Boundary(scenes.is_missed_after_a_restart, False),
    "STEPPING": Boundary(scenes.is_stepping, False),
    "FIRST_GENERATION_PATIENCE": Boundary(scenes.starts_without_the_cold_one, True),
    "NEXT_GENERATION_PATIENCE": Boundary(scenes.follows_without_the_cold_one, True),
    "SCHEDULING": Boundary(scenes.waits_for_the_scheduler, False),
    "TAKE_UP": Boundary(scenes.is_stuck_without_its_assignment, False),
    "IN_FLIGHT": Boundary(scenes.has_left_the_generation, False),
    "RESTARTED": Boundary(scenes.has_restarted, False),
    "SAYS_NOTHING": Boundary(scenes.runs_a_script_without_the_library, False),
    "UNWATCHED": Boundary(scenes.tells_that_nobody_watches, True),
    "NO_STEP": Boundary(scenes.tells_that_no_step_is_made, False),
    "JUST_NOW": Boundary(scenes.drains_as_it_may_have_trained, False),
    "PLANNED_DRAIN": Boundary(scenes.is_stopped_in_a_planned_drain, False),
    "PLANNED_DRAIN_SAVES": Boundary(scenes.is_stopped_after_so_many_saves, False),
    "UNKNOWN_LEAD": Boundary(scenes.is_stopped_on_a_marked_node, False),
    "DRAIN_OVERTIME": Boundary(scenes.is_stopped_after_the_deadline, False),
    "STOP_TIMEOUT": Boundary(scenes.is_given_up_while_it_stops, False),
    "NOTICE_EXPIRY": Boundary(scenes.is_believed, False),
    "CULPRIT_GRACE": Boundary(scenes.is_charged, True),
    "CULPRIT_LAST_WORD": Boundary(scenes.is_culprit, True),
    "MAX_GENERATIONS_WITHOUT_PROGRESS": Boundary(scenes.is_given_up_without_progress, True, 1),
    "START_FAILURE_PATIENCE": Boundary(scenes.is_given_up_before_its_image, False),
    "STUCK_START": Boundary(scenes.is_given_up_before_its_volume, False),
    "STARTS_CONTAINERS": Boundary(scenes.is_asked_about_its_volumes, False),
    "UNSEEN_BY_SCHEDULER": Boundary(scenes.is_unseen_by_schedulers, False),
    "REFUSAL_PATIENCE": Boundary(scenes.is_given_up_as_refused, False),
    "REFUSAL_PAUSE": Boundary(scenes.is_tried_again, True),
    "REFUSAL_MAX_PAUSE": Boundary(scenes.is_tried_again_after_many_tries, True),
    "MAX_START_FAILURES": Boundary(scenes.is_given_up_after, True, 1),
    "START_FAILURE_PAUSE": Boundary(scenes.is_replaced, True),
    "START_FAILURE_WINDOW": Boundary(scenes.is_remembered, False),
    "GROWTH_INTERVAL": Boundary(scenes.grows_after_the_first_step, True),
    "GROWTH_PATIENCE": Boundary(scenes.grows_though_a_pod_has_no_node, False),
    "GROWTH_PATIENCE_WHILE_COMING": Boundary(scenes.grows_though_a_pod_is_coming, False),
    "GROWTH_MIN_REMAINING": Boundary(scenes.grows_with_so_much_left, True),
    "PREWARMED_STAY": Boundary(scenes.stays_after_the_hint, False),
    "POOL_PATIENCE": Boundary(scenes.is_moved_to_another_pool, True),
    "LEAVE": Boundary(scenes.is_deleted_after_the_end, False),
    "STRAY": Boundary(scenes.is_stray, False),
    "RECORD_INTERVAL": Boundary(scenes.is_recorded, True),
    "MAX_TRANSITIONS": Boundary(scenes.keeps_the_oldest_transition, False, 1),
}


def test_every_constant_has_a_boundary() -> None:
    assert {name for name in vars(timing) if name.isupper()} == set(BOUNDARIES)


def test_stuck_peers_are_stuck_before_they_have_stopped_stepping() -> None:
    assert timing.SILENT_WHILE_STUCK < timing.STEPPING


@pytest.mark.parametrize("name", BOUNDARIES)
def test_the_decision_changes_at_the_constant(name: str) -> None:
    constant, boundary = getattr(timing, name), BOUNDARIES[name]
    before, exactly, after = (boundary.holds(constant + i * boundary.step) for i in (-1, 0, 1))
    assert before is not after
    assert exactly is boundary.at
