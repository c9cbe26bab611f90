"""Decisions about steps that would spoil the model, and learning rates by step."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spottrain.checkpoint.format import codec
from spottrain.loop.stability import MAX_SKIPPED_IN_A_ROW, StabilityGuard, StepDecision
from spottrain.schedules import Schedule, warmup_cosine, warmup_stable_decay
from spottrain.world.failures import UserError
from spottrain_api.contract.reports import FailureReason
from spottrain_api.settings.choices import StabilityAction
from spottrain_api.settings.stability import LossSpikeConfig, StabilityConfig

SKIP, ROLLBACK, FAIL = StabilityAction.SKIP, StabilityAction.ROLLBACK, StabilityAction.FAIL


def guard(non_finite: StabilityAction = SKIP, spike: LossSpikeConfig | None = None, **more: int) -> StabilityGuard:
    return StabilityGuard(StabilityConfig(non_finite=non_finite, loss_spike=spike, **more))


def verdicts(judge: StabilityGuard, *losses: float) -> list[str]:
    return [judge.judge(step, loss).value for step, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "last"),
    [
        pytest.param([4, 4, 4, 8], "update", id="twice-is-not-more-than-twice"),
        pytest.param([4, 4, 4, 8.1], "skip", id="more-than-twice-the-median"),
        pytest.param([4, 4, 100], "update", id="the-window-is-not-full"),
        pytest.param([4, 4, 4, 9, 9], "skip", id="a-skipped-loss-does-not-count-as-usual"),
        pytest.param([1, 4, 6, 7.9], "update", id="the-median-and-not-the-least"),
        pytest.param([9, 4, 4, 4, 8.1], "skip", id="only-the-newest-count"),
        pytest.param([-4, -4, -4, -3], "update", id="a-negative-loss-is-usual"),
        pytest.param([-4, -4, -4, 0.1], "skip", id="as-far-above-a-negative-median"),
        pytest.param([-2, 0, 2, 2], "update", id="a-loss-around-zero-is-usual"),
        pytest.param([-2, 0, 2, 2.1], "skip", id="more-than-its-magnitude-above-zero"),
    ],
)
def test_a_loss_spikes_by_the_median_of_the_window(losses: list[float], last: str) -> None:
    judge = guard(spike=LossSpikeConfig(factor=2, window=3, action=SKIP))
    assert verdicts(judge, *losses)[-1] == last


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out_from_the_first_step_on(loss: float) -> None:
    assert verdicts(guard(SKIP), loss, 1.0) == ["skip", "update"]
    assert verdicts(guard(ROLLBACK), loss) == ["rollBack"]
    assert guard(SKIP).judge(1, 2.0, gradients_are_finite=False) is StepDecision.SKIP


def test_a_job_that_is_to_fail_says_why() -> None:
    with pytest.raises(
        UserError, match=r"The loss of step 7 is nan\. Lower .* or set stability\.nonFinite to skip\."
    ) as caught:
        guard(FAIL).judge(7, math.nan)
    assert caught.value.reason is FailureReason.TRAINING_UNSTABLE
    judge = guard(spike=LossSpikeConfig(factor=2, window=1, action=FAIL))
    with pytest.raises(
        UserError,
        match=r"The loss of step 2 is 30, above 20, .* and the median 10 .* set stability\.lossSpike\.action",
    ):
        verdicts(judge, 10, 30)


def test_a_model_that_is_no_good_any_more_is_given_up() -> None:
    judge = guard(SKIP)
    assert set(verdicts(judge, *[math.nan] * MAX_SKIPPED_IN_A_ROW)) == {"skip"}
    assert judge.judge(11, 1.0) is StepDecision.UPDATE
    verdicts(judge, *[math.nan] * MAX_SKIPPED_IN_A_ROW)
    with pytest.raises(UserError, match="The 10 steps before it were skipped, too"):
        judge.judge(22, math.nan)


def test_rollbacks_to_the_same_model_are_bounded() -> None:
    judge = guard(ROLLBACK, max_rollbacks=2)
    judge.rolled_back(14, 10, None)
    judge.rolled_back(18, 10, None)
    assert (judge.num_skipped, judge.num_rollbacks) == (8, 2)
    committed = judge.state_dict()  # at step 20, with what was learnt in steps 19 and 20
    judge.rolled_back(25, 20, committed)
    judge.rolled_back(26, 20, committed)
    assert (judge.num_skipped, judge.num_rollbacks) == (8 + 6, 4)
    with pytest.raises(UserError, match=r"the model of step 26 2 times already, which is stability\.maxRollbacks"):
        judge.rolled_back(27, 26, judge.state_dict())  # a commit at step 26, with nothing learnt since step 20


@given(
    losses=st.lists(st.sampled_from([1.0, 1.5, 4.0, math.nan]), max_size=30),
    cut=st.integers(min_value=0, max_value=30),
)
def test_a_resumed_guard_decides_as_one_that_was_never_interrupted(losses: list[float], cut: int) -> None:
    def decisions(judge: StabilityGuard, part: list[float], first: int) -> list[str]:
        found = []
        for step, loss in enumerate(part, start=first):
            try:
                found.append(judge.judge(step, loss).value)
            except UserError as error:
                found.append(str(error))
        return found

    settings = StabilityConfig(non_finite=SKIP, loss_spike=LossSpikeConfig(factor=2, window=4, action=SKIP))
    whole, first, second = (StabilityGuard(settings) for _ in range(3))
    wanted = decisions(whole, losses, 1)
    before = decisions(first, losses[:cut], 1)
    stored = json.loads(json.dumps(codec.encode(first.state_dict())))
    second.load_state_dict(codec.decode(stored))
    assert before + decisions(second, losses[cut:], len(losses[:cut]) + 1) == wanted
    assert second.state_dict() == whole.state_dict()


def rates(schedule: Schedule, steps: int, *, resume_at: int | None = None) -> list[float]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    scheduler = schedule(optimizer)
    found = []
    for step in range(steps):
        if step == resume_at:
            saved = codec.decode(json.loads(json.dumps(codec.encode(scheduler.state_dict()))))
            scheduler = schedule(optimizer)
            scheduler.load_state_dict(saved)
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def test_warm_up_and_cosine() -> None:
    schedule = warmup_cosine(total=12, warmup=4, floor=0.1)
    found = rates(schedule, 14)
    assert found[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert found[8] == pytest.approx(1.1)  # half-way, between 2.0 and 0.2
    assert found[12:] == pytest.approx([0.2, 0.2])
    assert rates(schedule, 14, resume_at=7) == found


def test_warm_up_stable_decay() -> None:
    schedule = warmup_stable_decay(total=10, warmup=2, decay=4, floor=0.5)
    found = rates(schedule, 12)
    assert found == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0])
    assert rates(schedule, 12, resume_at=8) == found


def test_a_schedule_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for 11 steps of warm-up and decay"):
        warmup_stable_decay(total=10, warmup=5, decay=6)
