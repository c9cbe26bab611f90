"""What a constant of `timing` decides changes exactly there, to the millisecond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest

import timing_scenes as scenes
from spottrain_operator.core.model import MAX_TRANSITIONS
from spottrain_operator.core.timing import DEFAULT_TIMING, Timing

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
    "silent_while_others_ended": Boundary(scenes.is_lost_while_others_ended, False),
    "without_relay": Boundary(scenes.is_lost_without_its_relay, True),
    "silent_while_stuck": Boundary(scenes.is_lost_while_stuck, False),
    "stuck_steps": Boundary(scenes.is_stuck, False),
    "silent_alone": Boundary(scenes.is_lost_alone, False),
    "silent_on_lost_node": Boundary(scenes.is_lost_with_its_node, False),
    "candidate_report_age": Boundary(scenes.is_candidate, True),
    "operator_restart_grace": Boundary(scenes.is_missed_after_a_restart, False),
    "stepping": Boundary(scenes.is_stepping, False),
    "first_generation_patience": Boundary(scenes.starts_without_the_cold_one, True),
    "next_generation_patience": Boundary(scenes.follows_without_the_cold_one, True),
    "scheduling": Boundary(scenes.waits_for_the_scheduler, False),
    "take_up": Boundary(scenes.is_stuck_without_its_assignment, False),
    "in_flight": Boundary(scenes.has_left_the_generation, False),
    "restarted": Boundary(scenes.has_restarted, False),
    "says_nothing": Boundary(scenes.runs_a_script_without_the_library, False),
    "unwatched": Boundary(scenes.tells_that_nobody_watches, True),
    "no_step": Boundary(scenes.tells_that_no_step_is_made, False),
    "just_now": Boundary(scenes.drains_as_it_may_have_trained, False),
    "planned_drain": Boundary(scenes.is_stopped_in_a_planned_drain, False),
    "planned_drain_saves": Boundary(scenes.is_stopped_after_so_many_saves, False),
    "unknown_lead": Boundary(scenes.is_stopped_on_a_marked_node, False),
    "drain_overtime": Boundary(scenes.is_stopped_after_the_deadline, False),
    "stop_timeout": Boundary(scenes.is_given_up_while_it_stops, False),
    "notice_expiry": Boundary(scenes.is_believed, False),
    "culprit_grace": Boundary(scenes.is_charged, True),
    "culprit_last_word": Boundary(scenes.is_culprit, True),
    "max_generations_without_progress": Boundary(scenes.is_given_up_without_progress, True, 1),
    "start_failure_patience": Boundary(scenes.is_given_up_before_its_image, False),
    "stuck_start": Boundary(scenes.is_given_up_before_its_volume, False),
    "starts_containers": Boundary(scenes.is_asked_about_its_volumes, False),
    "unseen_by_scheduler": Boundary(scenes.is_unseen_by_schedulers, False),
    "refusal_patience": Boundary(scenes.is_given_up_as_refused, False),
    "refusal_pause": Boundary(scenes.is_tried_again, True),
    "refusal_max_pause": Boundary(scenes.is_tried_again_after_many_tries, True),
    "max_start_failures": Boundary(scenes.is_given_up_after, True, 1),
    "start_failure_pause": Boundary(scenes.is_replaced, True),
    "start_failure_window": Boundary(scenes.is_remembered, False),
    "growth_interval": Boundary(scenes.grows_after_the_first_step, True),
    "growth_patience": Boundary(scenes.grows_though_a_pod_has_no_node, False),
    "growth_patience_while_coming": Boundary(scenes.grows_though_a_pod_is_coming, False),
    "growth_longest": Boundary(scenes.grows_though_a_restart_takes_long, False),
    "prewarmed_stay": Boundary(scenes.stays_after_the_hint, False),
    "device_avoidance": Boundary(scenes.avoids_the_node, False),
    "gang_patience": Boundary(scenes.gives_its_node_back, True),
    "gang_pause": Boundary(scenes.asks_again, True),
    "gang_max_pause": Boundary(scenes.asks_again_after_many_times, True),
    "pool_avoidance": Boundary(scenes.avoids_the_pool, False),
    "unrest_window": Boundary(scenes.falls_back_though_they_were_so_long_ago, False),
    "unrest_interruptions": Boundary(scenes.falls_back_after_interruptions, True, 1),
    "pool_patience": Boundary(scenes.is_moved_to_another_pool, True),
    "leave": Boundary(scenes.is_deleted_after_the_end, False),
    "stray": Boundary(scenes.is_stray, False),
    "record_interval": Boundary(scenes.is_recorded, True),
}


def test_every_constant_has_a_boundary() -> None:
    assert {field.name for field in fields(Timing)} == set(BOUNDARIES)


def test_stuck_peers_are_stuck_before_they_have_stopped_stepping() -> None:
    assert DEFAULT_TIMING.silent_while_stuck < DEFAULT_TIMING.stepping


def test_the_number_of_transitions() -> None:
    assert not scenes.keeps_the_oldest_transition(MAX_TRANSITIONS)
    assert scenes.keeps_the_oldest_transition(MAX_TRANSITIONS - 1)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_the_decision_changes_at_the_constant(name: str) -> None:
    constant, boundary = getattr(DEFAULT_TIMING, name), BOUNDARIES[name]
    before, exactly, after = (boundary.holds(constant + i * boundary.step) for i in (-1, 0, 1))
    assert before is not after
    assert exactly is boundary.at
