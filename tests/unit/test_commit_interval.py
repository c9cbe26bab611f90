"""When to commit between drains: the interval, given or automatic."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.recovery.interval import (
    MAX_INTERVAL_SECONDS,
    MIN_INTERVAL_SECONDS,
    CheckpointCost,
    CommitInterval,
)
from spottrain.world.failures import UserError, as_user_errors
from spottrain_api.contract.configuration import Interruptions, TrainerConfig
from spottrain_api.settings.interval import Interval

SETTINGS: dict[str, Any] = {"job": "job", "generation": 1, "attemptId": "a", "batch": {"global": 1}}


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("auto", CommitInterval()),
        ("50steps", CommitInterval(steps=50)),
        ("90s", CommitInterval(seconds=90)),
        ("5m", CommitInterval(seconds=300)),
    ],
)
def test_an_interval_is_parsed(text: str, interval: CommitInterval) -> None:
    assert CommitInterval.of(Interval.parse(text), Interruptions()) == interval


@pytest.mark.parametrize("text", ["", "0s", "5", "5 steps", "-1s", "1h"])
def test_an_interval_that_is_not_understood_is_refused_with_a_sentence(text: str) -> None:
    sentence = (
        f"checkpoint.interval {text!r} is not understood; write auto, or a number with steps, s or m, as in 50steps"
    )
    with pytest.raises(UserError, match=re.escape(sentence)), as_user_errors():
        TrainerConfig.model_validate(SETTINGS | {"checkpoint": {"interval": text}})


def test_an_interval_that_is_too_long_is_refused_as_text() -> None:
    sentence = "checkpoint.interval can't be read: string should have at most 16 characters"
    with pytest.raises(UserError, match=sentence), as_user_errors():
        TrainerConfig.model_validate(SETTINGS | {"checkpoint": {"interval": "100000000000steps"}})


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300.0), ("50steps", 100.0), ("auto", MIN_INTERVAL_SECONDS)], ids=str
)
def test_the_planned_seconds_between_commits(text: str, seconds: float) -> None:
    assert CommitInterval.of(Interval.parse(text), Interruptions()).planned_seconds(None, 2.0) == seconds
    assert CommitInterval(steps=50).planned_seconds(None, None) is None
    cost = CheckpointCost(stall_seconds=1.0, total_seconds=2.0)
    assert CommitInterval().planned_seconds(cost, 2.0) == CommitInterval().optimal_seconds(cost)


def test_when_a_commit_is_due() -> None:
    cost = CheckpointCost(stall_seconds=0.5, total_seconds=2.0)
    assert [step for step in range(1, 10) if CommitInterval(steps=3).due_at_step(step)] == [3, 6, 9]
    assert not CommitInterval(steps=3).due_after(1e9, cost)
    assert CommitInterval(seconds=5).due_after(5, cost)
    assert not CommitInterval(seconds=5).due_after(4.9, cost)
    assert CommitInterval().due_after(MIN_INTERVAL_SECONDS, None)
    assert not CommitInterval().due_after(59.9, cost)
    assert CommitInterval().due_after(60, cost)


def test_the_automatic_interval_follows_the_cost_within_bounds() -> None:
    def seconds(stall: float, total: float) -> float:
        return CommitInterval().optimal_seconds(CheckpointCost(stall_seconds=stall, total_seconds=total))

    assert seconds(2, 2) == pytest.approx(120)
    assert seconds(0.001, 0) == MIN_INTERVAL_SECONDS
    assert seconds(0.001, 40) == 80
    assert seconds(3600, 3600) == MAX_INTERVAL_SECONDS


def test_the_automatic_interval_follows_what_was_observed() -> None:
    cost = CheckpointCost(stall_seconds=0.5, total_seconds=1.0)

    def seconds(num: int, num_noticed: int, hours: float) -> float:
        seen = Interruptions(num=num, num_noticed=num_noticed, observed_seconds=3600 * hours)
        return CommitInterval.of(Interval(), seen).optimal_seconds(cost)

    assert seconds(0, 0, 0) == pytest.approx(60)
    assert seconds(8, 0, 1) < seconds(8, 4, 1) < seconds(8, 8, 1)
    # Young/Daly with the share with notice under the root, once the prior weighs little.
    assert seconds(2000, 1500, 1000) == pytest.approx((2 * 0.5 * 1800 / (1 - 0.75)) ** 0.5, rel=0.01)
    assert seconds(10_000, 10_000, 10_000) == MAX_INTERVAL_SECONDS


@given(losses=st.integers(0, 50), covered=st.integers(0, 50), hours=st.floats(0, 10_000))
def test_what_peers_memory_covered_is_no_loss_to_the_interval(losses: int, covered: int, hours: float) -> None:
    cost = CheckpointCost(stall_seconds=0.5, total_seconds=1.0)

    def seconds(num: int, num_covered: int, hours: float = hours) -> float:
        seen = Interruptions(num=num, num_covered=num_covered, observed_seconds=3600 * hours)
        return CommitInterval.of(Interval(), seen).optimal_seconds(cost)

    assert seconds(losses + covered, covered) == seconds(losses, 0)
    assert seconds(losses, 0) <= seconds(losses, 0, hours + 1) <= MAX_INTERVAL_SECONDS
    assert seconds(losses + 1, 0) <= seconds(losses + 1, 1)


def test_while_a_node_is_at_risk_the_automatic_interval_is_shorter_and_a_given_one_stays() -> None:
    cost = CheckpointCost(stall_seconds=2.0, total_seconds=3.0)
    assert CommitInterval().optimal_seconds(cost) == pytest.approx(120)
    assert CommitInterval().optimal_seconds(cost, at_risk=True) == pytest.approx(math.sqrt(2 * 2 * 600))
    assert not CommitInterval().due_after(49, cost)
    assert CommitInterval().due_after(49, cost, at_risk=True)
    assert not CommitInterval(seconds=60).due_after(49, cost, at_risk=True)
    assert not CommitInterval(steps=5).due_after(1e9, cost, at_risk=True)
    often = Interruptions(num=99, observed_seconds=3600)
    assert CommitInterval(interruptions=often).optimal_seconds(cost, at_risk=True) < math.sqrt(2 * 2 * 600)
    assert CommitInterval(seconds=60).explain(cost, at_risk=True) == "every 60 s, as the job says"
    assert CommitInterval().explain(cost, at_risk=True) == (
        "auto: every 49 s, because a checkpoint stops training for 2 s and is stored after 3 s, and a member's node "
        "may be taken back soon"
    )


def test_the_interval_is_explained() -> None:
    seen = Interruptions(num=5, num_noticed=3, observed_seconds=7200)
    cost = CheckpointCost(stall_seconds=0.5, total_seconds=2.0)
    assert CommitInterval(steps=50).explain(cost) == "every 50 steps, as the job says"
    assert CommitInterval(steps=1).explain(cost) == "every 1 step, as the job says"
    assert CommitInterval(seconds=90).explain(None) == "every 90 s, as the job says"
    assert "the first after 10 s" in CommitInterval().explain(None)
    assert CommitInterval.of(Interval(), seen).explain(cost) == (
        "auto: every 60 s, because a checkpoint stops training for 0.5 s and is stored after 2 s, and 2 of 5 "
        "interruptions in 2.0 h came without notice"
    )
    first = Interruptions(num=1, observed_seconds=24)
    said = CommitInterval(interruptions=first).explain(cost)
    assert said.endswith("and 1 of 1 interruption in 0.4 min came without notice")
    assert CommitInterval().explain(cost).endswith(", and there was no interruption so far")
    covered = seen.model_copy(update={"num_covered": 1})
    assert CommitInterval.of(Interval(), covered).explain(cost) == (
        "auto: every 73 s, because a checkpoint stops training for 0.5 s and is stored after 2 s, and 2 of 5 "
        "interruptions in 2.0 h came without notice, 1 of them covered by peers' memory"
    )


def test_a_cost_rises_at_once_and_falls_slowly() -> None:
    cheap, dear = (CheckpointCost(stall_seconds=s, total_seconds=2 * s) for s in (1.0, 5.0))
    assert cheap.updated(dear) == dear
    assert dear.updated(cheap) == CheckpointCost(stall_seconds=3.0, total_seconds=6.0)
