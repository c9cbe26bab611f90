"""A job with a budget: what it says at 80 % and at 100 %, and how it pauses and resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from scene import NOW, Scene, training, training_job
from simulation.world import World
from spottrain_api.contract.assignments import AgentPhase, CapacityType
from spottrain_api.v1alpha1.budget import Budget
from spottrain_api.v1alpha1.spending import CostStatus
from spottrain_api.v1alpha1.status import GenerationState, Phase
from spottrain_operator.core.model import CreatePod, DeletePod
from world.jobs import spec_of

HOURLY = 2 * 3.0 + 2 * 1.0
SUSPEND = {"maxCost": 100.0, "onExceeded": "Suspend"}
WARN = {"maxCost": 100.0}


def spent(total: float, budget: dict[str, Any] | None = SUSPEND) -> Scene:
    """Four nodes train, and the last record was just now."""
    return training_job(budget=budget).status(cost=CostStatus(total=total), accounted_at=NOW)


def said(scene: Scene) -> tuple[str, str] | None:
    condition = scene.plan().status.condition("WithinBudget")
    return None if condition is None else (condition.status, condition.reason)


@pytest.mark.parametrize("max_cost", [-1, 0, 0.001, float("nan"), float("inf"), "much", None])
def test_a_budget_that_is_no_amount_is_refused(max_cost: object) -> None:
    with pytest.raises(ValidationError, match="maxCost"):
        Budget.model_validate({"maxCost": max_cost})


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf"), 1e300])
def test_a_price_that_is_no_amount_is_refused(price: float) -> None:
    with pytest.raises(ValidationError, match="pricePerHour"):
        spec_of(capacity={"spot": {"pricePerHour": price}})


@pytest.mark.parametrize(
    ("total", "budget", "expected"),
    [
        (79.0, SUSPEND, None),
        (500.0, None, None),
        (80.0, SUSPEND, ("True", "BudgetNearlySpent")),
        (80.0, WARN, ("True", "BudgetNearlySpent")),
        (100.0, WARN, ("False", "BudgetSpent")),
        (100.0, SUSPEND, ("False", "BudgetSpent")),
    ],
)
def test_a_job_says_how_much_of_its_budget_is_spent(
    total: float, budget: dict[str, Any] | None, expected: tuple[str, str] | None
) -> None:
    scene = spent(total, budget)
    assert said(scene) == expected
    events = [event for event in scene.plan().events if "Budget" in event.reason]
    assert [(event.type, event.reason) for event in events] == ([("Warning", expected[1])] if expected else [])
    assert not [event for event in scene.decided().plan().events if "Budget" in event.reason], "it is said once"


def test_money_is_counted_between_two_records() -> None:
    """The record before was half an hour ago, and the next one is not due."""
    scene = spent(100.0 - HOURLY / 2 + 0.01).later(30 * 60)
    rarely = replace(
        scene, observed=replace(scene.observed, timing=replace(scene.observed.timing, record_interval=1e6))
    )
    assert said(rarely) == ("False", "BudgetSpent")


@pytest.mark.parametrize(("total", "left"), [(70.0, 10.0), (99.99, 0.01)], ids=["before 80 %", "before all of it"])
def test_a_job_at_rest_is_looked_at_when_the_next_share_is_spent(total: float, left: float) -> None:
    scene = spent(total).all_say(step_age_seconds=0.5)
    scene = replace(
        scene, observed=replace(scene.observed, timing=replace(scene.observed.timing, record_interval=1e6))
    )
    assert scene.decided().plan().requeue_after == pytest.approx(left / HOURLY * 3600)


def test_a_job_that_is_to_warn_trains_on() -> None:
    plan = spent(150.0, WARN).plan()
    assert plan.status.generation is not None
    assert plan.status.generation.state is GenerationState.ACTIVE
    assert not plan.actions


def test_a_job_whose_budget_is_spent_drains_gives_its_nodes_back_and_says_why() -> None:
    scene = spent(100.0).decided()
    generation = scene.observed.job.status.generation
    assert generation is not None
    assert (generation.state, generation.reason) == (GenerationState.DRAINING, "BudgetSpent")
    [drain] = [event for event in spent(100.0).plan().events if event.reason == "BudgetSpent"]
    assert drain.message == "Generation 1 drains: the job has cost 100.00 of 100.00 USD (budget.maxCost)"
    plan = scene.all_say(phase=AgentPhase.DRAINED, progress=training(50)).plan()
    assert plan.status.phase is Phase.SUSPENDED
    assert plan.status.message == (
        "Suspended: the budget of 100.00 USD is spent. Raise budget.maxCost above status.cost.total to go on"
    )
    deleted = [action for action in plan.actions if isinstance(action, DeletePod)]
    assert [action.reason for action in deleted] == ["the job's budget is spent"] * 4
    assert plan.status.transitions[-1].reason == "BudgetSpent"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"maxCost": 101.0, "onExceeded": "Suspend"}, "BudgetNearlySpent"),
        ({"maxCost": 1000.0, "onExceeded": "Suspend"}, "MoneyLeft"),
        ({"maxCost": 100.0, "onExceeded": "Warn"}, "BudgetSpent"),
        (None, "NoBudget"),
    ],
    ids=["a little more", "much more", "it is to warn", "no budget"],
)
def test_a_raised_budget_resumes_the_job(changes: dict[str, Any] | None, expected: str) -> None:
    suspended = spent(100.0).decided().all_say(phase=AgentPhase.DRAINED, progress=training(50)).decided()
    for sequence in range(1, 5):
        suspended = suspended.without_pod(sequence)
    assert not suspended.later(60).plan().actions
    resumed = suspended.spec(nodes={"min": 2, "max": 4}, budget=changes).later(60)
    created = [action for action in resumed.plan().actions if isinstance(action, CreatePod)]
    assert len(created) == 4
    found = said(resumed)
    assert found is not None
    assert found[1] == expected


def test_a_new_job_with_a_budget_that_is_spent_creates_nothing() -> None:
    """As one that was restored with its status, or whose budget was lowered before it started."""
    scene = spent(100.0)
    idle = scene.status(generation=None, phase=Phase.PENDING)
    for sequence in range(1, 5):
        idle = idle.without_pod(sequence)
    assert not idle.plan().actions
    assert idle.plan().status.phase is Phase.SUSPENDED


def parts_of(cost: CostStatus | None) -> dict[tuple[str, str], float]:
    assert cost is not None
    return {(each.capacity_type, each.pool): round(each.total, 1) for each in cost.pools}


def test_the_parts_of_the_cost_add_up_and_name_their_pools() -> None:
    prices = {"a": ("spot", 1.0), "b": ("spot", 2.0), "od": ("on-demand", 3.0)}
    pools = [
        {"name": name, "capacityType": kind, "provider": "eks", "pricePerHour": price}
        for name, (kind, price) in prices.items()
    ]
    scene = training_job(capacity={"onDemand": {"min": 2}, "pools": pools}).status(cost=None, accounted_at=NOW)
    for sequence, pool in enumerate(("od", "od", "a", "b"), start=1):
        scene = scene.pod(sequence, pool=pool)
    scene = scene.later(3600).decided()
    of_od_and_b = {("on-demand", "od"): 6.0, ("spot", "b"): 2.0}
    assert parts_of(scene.observed.job.status.cost) == of_od_and_b | {("spot", "a"): 1.0}
    fewer = scene.spec(nodes={"min": 2, "max": 4}, capacity={"onDemand": {"min": 2}, "pools": pools[1:]})
    assert parts_of(fewer.later(3).plan().status.cost) == of_od_and_b | {("spot", ""): 1.0}


def test_a_whole_job_pauses_for_its_budget_without_losing_a_step_and_goes_on() -> None:
    prices = {"onDemand": {"min": 2, "pricePerHour": 300.0}, "spot": {"pricePerHour": 100.0}}
    world = World(spec_of(capacity=prices, budget={"maxCost": 15.0, "onExceeded": "Suspend"}), total_steps=240)
    for kind in (CapacityType.ON_DEMAND,) * 2 + (CapacityType.SPOT,) * 4:
        world.add_node(kind)
    world.run(90)
    assert world.status.phase.value == "Suspended", world.story()
    assert not world.pods
    assert world.training.is_committed
    cost = world.status.cost
    assert cost is not None
    paid_per_second = 1000.0 / 3600
    assert 15.0 <= cost.total < 15.0 + 10 * paid_per_second, "the commit comes on top"
    assert cost.total == pytest.approx(sum(each.total for each in cost.pools))
    world.edit(budget={"maxCost": 1500.0, "onExceeded": "Suspend"})
    world.run_until_finished(400)
    assert world.status.phase.value == "Succeeded", world.story()
    assert world.status.steps_redone == 0
    assert not world.problems
