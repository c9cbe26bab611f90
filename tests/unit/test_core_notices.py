"""Truth tables of `plan` for notices: whose they are, and which deadline counts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from scene import (
    DRAINING,
    NOW,
    STOPPING,
    notice,
    pod,
    starting_job,
    training_job,
)
from spottrain_api.contract import (
    AgentPhase,
    NoticeKind,
)


def test_a_notice_before_the_ranks_are_up_stops_at_once() -> None:
    decided = starting_job().node(4, notice=notice(4, lead=-60)).plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is STOPPING


def test_a_notice_to_a_script_that_tells_nothing_drains_it() -> None:
    scene = starting_job().all_say(generation=1, phase=AgentPhase.RUNNING, step_age_seconds=1.0)
    decided = scene.node(4, notice=notice(4, lead=60)).plan()
    assert decided.status.generation is not None
    assert decided.status.generation.state is DRAINING


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({}, "node n4 goes at"),
        ({"kind": NoticeKind.EVICT, "source": "condition:EvictionByEvictionAPI"}, "the pod on node n4 goes at"),
        (
            {"kind": NoticeKind.EVICT, "source": "condition:PreemptionByScheduler"},
            "the pod on node n4 makes way for one of higher priority, and goes at",
        ),
    ],
)
def test_events_tell_a_node_that_goes_from_a_pod(changes: dict[str, Any], goes: str) -> None:
    decided = training_job().says(4, notices=(notice(4, **changes),)).plan()
    assert any(goes in event.message for event in decided.events)


@pytest.mark.parametrize(
    ("disruption", "why"),
    [
        ("PreemptionByScheduler", "makes way for one of higher priority (PreemptionByScheduler)"),
        ("EvictionByEvictionAPI", "is being evicted (EvictionByEvictionAPI)"),
    ],
)
def test_a_pod_that_makes_way_is_told_from_one_that_is_evicted(disruption: str, why: str) -> None:
    decided = training_job().with_pod(pod(4, disruption=disruption)).plan()
    assert any(f"pod job-4 {why}" in event.message for event in decided.events)


def test_a_second_notice_brings_the_deadline_nearer() -> None:
    scene = training_job().node(4, notice=notice(4, lead=60)).decided().node(3, notice=notice(3, lead=15))
    generation = scene.plan().status.generation
    assert generation is not None
    assert generation.deadline == NOW + timedelta(seconds=15)
