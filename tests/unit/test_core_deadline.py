"""capacity.finishBy: what the job does for it, and what it says."""

from __future__ import annotations

from datetime import timedelta
from statistics import mean
from typing import Any

import pytest
from pydantic import ValidationError

from scene import NOW, Scene, training, training_job
from spottrain_api.v1alpha1.capacity import Capacity
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.spending import CostStatus, PoolCost
from spottrain_api.v1alpha1.status import ProgressStatus
from spottrain_operator.core.facts.deadline import deadline_of
from spottrain_operator.core.facts.dear_spot import dear_spot
from spottrain_operator.core.facts.situation import Situation
from spottrain_simulator.clock import at
from spottrain_simulator.strategies import Outcome, Work, oracle, simulate, uniform_progress, without_fallback
from spottrain_simulator.synthetic import KINDS, UNLIKE, synthetic_trace
from spottrain_simulator.trace import HOUR, Offer, Trace
from spottrain_simulator.traced import Cloud, TracedWorld
from world.jobs import spec_of

PRICES = {"onDemand": {"min": 2, "pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
# Four members have 950 steps of a second before them, and the job has four nodes at most.
NEEDED = 950.0


def by(seconds: float, **capacity: object) -> Scene:
    """Four nodes train, and the deadline is so many seconds away."""
    finish_by = (NOW + timedelta(seconds=seconds)).isoformat()
    return training_job().spec(nodes={"min": 2, "max": 4}, capacity=PRICES | {"finishBy": finish_by} | capacity)


def said(scene: Scene) -> tuple[str, str] | None:
    condition = scene.plan().status.condition("OnTime")
    return None if condition is None else (condition.status, condition.reason)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (10 * NEEDED, ("True", "SlackLeft")),
        (NEEDED + 300, ("True", "NoSlackLeft")),
        (NEEDED - 10, ("False", "DeadlineOutOfReach")),
        (0, ("False", "DeadlinePassed")),
        (-60, ("False", "DeadlinePassed")),
    ],
)
def test_a_job_says_whether_it_will_be_in_time(left: float, expected: tuple[str, str]) -> None:
    scene = by(left)
    assert said(scene) == expected
    events = [event.type for event in scene.plan().events if event.reason == expected[1]]
    assert events == {"SlackLeft": [], "NoSlackLeft": ["Normal"]}.get(expected[1], ["Warning"])
    assert not [event for event in scene.decided().plan().events if event.reason == expected[1]], "it is said once"


def test_a_job_without_a_deadline_says_nothing_until_one_is_removed() -> None:
    assert said(training_job()) is None
    scene = by(NEEDED).decided()
    assert said(scene.spec(capacity=PRICES)) == ("True", "NoFinishBy")


def test_the_slack_is_recorded() -> None:
    scene = by(NEEDED + 1000).status(accounted_at=None)
    assert scene.plan().status.slack_seconds == pytest.approx(1000, abs=2)


def test_before_its_first_steps_a_job_knows_no_slack() -> None:
    scene = by(NEEDED).all_say(progress=None).status(progress=ProgressStatus())
    assert said(scene) is None


def test_a_job_that_may_use_no_on_demand_nodes_can_promise_nothing() -> None:
    scene = by(10 * NEEDED, onDemand={"max": 0, "pricePerHour": 3.0})
    assert said(scene) == ("False", "DeadlineOutOfReach")
    assert "Raise capacity.onDemand.max" in scene.plan().status.condition("OnTime").message  # type: ignore[union-attr]


def test_a_job_that_hurries_goes_back_to_waiting_only_with_much_time() -> None:
    """Otherwise on-demand nodes would come and go with each second."""
    scene = by(NEEDED + 300).decided()
    deadline = deadline_of(Situation(scene.observed, scene.now))
    assert deadline is not None
    a_little = deadline.reserve - deadline.slack + 60

    def later(seconds: float) -> Scene:
        finish_by = (NOW + timedelta(seconds=NEEDED + 300 + seconds)).isoformat()
        return scene.spec(nodes={"min": 2, "max": 4}, capacity=PRICES | {"finishBy": finish_by})

    assert said(later(a_little)) == ("True", "NoSlackLeft")
    assert said(later(a_little + deadline.reserve + 60)) == ("True", "SlackLeft")
    assert said(by(NEEDED + 300 + a_little)) == ("True", "SlackLeft"), "it has not hurried yet"


# Spot nodes have cost a third of on-demand nodes so far.
PAID = CostStatus(total=10, pools=(PoolCost(capacity_type="spot", total=10, on_demand_only=30),))


def priced(spot: float, left: float = 2 * NEEDED, **capacity: object) -> Scene:
    """The price of spot nodes is edited while the job trains."""
    return by(left, spot={"pricePerHour": spot}, **capacity).status(cost=PAID)


@pytest.mark.parametrize(
    ("spot", "left", "waits"),
    [
        (1.2, 2 * NEEDED, False),
        (2.0, 2 * NEEDED, True),
        (2.0, NEEDED + 300, False),
        (9.0, NEEDED + 300, False),
        (2.0, NEEDED - 10, False),
        (9.0, -1, False),
    ],
)
def test_a_job_with_time_to_lose_waits_for_a_lower_price(spot: float, left: float, waits: bool) -> None:
    scene = priced(spot, left)
    plan = scene.plan()
    assert (said(scene) == ("True", "SpotIsDear")) is waits
    assert (plan.status.generation.reason if plan.status.generation else None) == ("SpotIsDear" if waits else None)
    sentences = [event.message for event in plan.events if event.reason == "SpotIsDear"]
    assert len(sentences) == waits
    if waits:
        assert "spot nodes cost 2.00 USD an hour, after 1.00 so far" in sentences[0]


@pytest.mark.parametrize(
    ("spot", "slack", "waits"), [(2.4, 0.20, True), (2.4, 0.08, False), (4.0, 0.08, True), (1.5, 0.30, False)]
)
def test_the_less_time_there_is_the_more_a_job_pays(spot: float, slack: float, waits: bool) -> None:
    """The slack is a share of the 100,000 seconds that the rest takes. Above the on-demand price, it always waits."""
    long = training().model_copy(update={"total_steps": 100_050})
    scene = priced(spot, 100_000 * (1 + slack)).all_say(progress=long)
    assert said(scene) == ("True", "SpotIsDear" if waits else "SlackLeft")


def test_a_job_that_waits_for_a_price_goes_on_waiting_a_little_below() -> None:
    """Otherwise it would stop and go. At 1.50 it trains."""
    long = training().model_copy(update={"total_steps": 100_050})
    waiting = priced(2.0, 120_000).all_say(progress=long).decided()
    trains = priced(1.6, 120_000).all_say(progress=long)
    assert said(trains) == ("True", "SlackLeft")
    nodes, capacity = trains.observed.job.spec.nodes.to_dict(), trains.observed.job.spec.capacity.to_dict()
    assert said(waiting.spec(nodes=nodes, capacity=capacity)) == ("True", "SpotIsDear")
    cheap = capacity | {"spot": {"pricePerHour": 1.45}}
    assert said(waiting.spec(nodes=nodes, capacity=cheap)) == ("True", "SlackLeft")


def test_a_job_without_its_own_prices_or_a_paid_spot_node_waits_for_no_price() -> None:
    assert said(priced(2.0).status(cost=None)) == ("True", "SlackLeft")
    only_spot = priced(2.0, onDemand={"min": 2})
    assert said(only_spot) == ("True", "SlackLeft")


def test_of_several_pools_the_cheapest_counts() -> None:
    pools = [
        {"name": "a", "capacityType": "spot", "provider": "eks", "pricePerHour": 2.5},
        {"name": "b", "capacityType": "spot", "provider": "karpenter", "pricePerHour": 1.1},
        {"name": "c", "capacityType": "on-demand", "provider": "eks", "pricePerHour": 3.0},
    ]
    assert dear_spot(_situation(priced(1.0, pools=pools))) is None
    pools[1]["weight"] = 0
    assert dear_spot(_situation(priced(1.0, pools=pools))) is not None


def _situation(scene: Scene) -> Situation:
    return Situation(scene.observed, scene.now)


@pytest.mark.parametrize(
    ("capacity", "sentence"),
    [
        ({"fallback": {"policy": "None"}}, "policy None forbids them"),
        ({"pools": [{"name": "a", "capacityType": "spot", "provider": "eks"}]}, "capacity.pools has none"),
    ],
)
def test_a_deadline_without_on_demand_nodes_is_refused_by_the_api_server(
    capacity: dict[str, Any], sentence: str
) -> None:
    rules = [message for _, message in Capacity.cel_rules if "finishBy" in message]
    assert any(sentence in message for message in rules), (capacity, rules)


def test_a_time_without_a_zone_is_no_time() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        spec_of(capacity={"finishBy": "2026-12-24T18:00:00"})


# --- lives -----------------------------------------------------------------------------------------------

WORK = Work(steps=8 * 60, step_seconds=60.0)  # eight hours on all nodes


def job(hours: float | None = None, **capacity: object) -> TrainingJobSpec:
    deadline = {} if hours is None else {"finishBy": at(hours * HOUR).isoformat()}
    prices = {"onDemand": {"pricePerHour": 3.0}, "spot": {"pricePerHour": 1.0}}
    return spec_of(nodes={"min": 1, "max": 4}, capacity=prices | deadline | capacity)


def cloud_of(*offers: tuple[float, int], hours: float = 96) -> Cloud:
    found = [Offer(time=hour * HOUR, nodes=nodes, price=1.0) for hour, nodes in offers]
    return Cloud(trace=Trace({"spot": found}, hours * HOUR), prices={"on-demand": 3.0})


def test_a_job_waits_for_spot_nodes_as_long_as_it_can_and_is_in_time() -> None:
    """After two hours there is no spot node for ever: six hours are left, and sixteen until the deadline."""
    lived = simulate("job", job(16), cloud_of((0, 4), (2, 0)), WORK)
    assert lived.finish is not None
    assert 15.5 * HOUR < lived.finish <= 16 * HOUR
    assert lived.on_demand_hours == pytest.approx(4 * 6, abs=0.5)


def test_stand_ins_from_before_the_first_steps_are_given_back_while_there_is_time() -> None:
    """At the start there is no spot node for an hour."""
    lived = simulate("job", job(24), cloud_of((0, 0), (1, 4)), WORK)
    assert lived.on_demand_hours < 2
    assert lived.finish is not None
    assert lived.finish < 10 * HOUR


def test_a_job_waits_a_spike_out_and_pays_the_usual_price() -> None:
    """From the second to the fifth hour, spot nodes cost more than on-demand nodes."""
    prices = [Offer(time=hour * HOUR, nodes=4, price=price) for hour, price in ((0, 1.0), (2, 4.0), (5, 1.0))]
    cloud = Cloud(trace=Trace({"spot": prices}, 96 * HOUR), prices={"on-demand": 3.0})
    lived = simulate("job", job(16), cloud, WORK)
    assert lived.finish == pytest.approx(11.1 * HOUR, abs=0.1 * HOUR)
    assert lived.cost == pytest.approx(32, rel=0.03)
    assert lived.on_demand_hours == 0
    hurried = simulate("job", job(8.5), cloud, WORK)
    assert not missed(hurried, 8.5)


def test_stand_ins_stay_while_spot_nodes_cost_no_less() -> None:
    """There is no spot node at first, and then there are dear ones."""
    found = [Offer(time=hour * HOUR, nodes=n, price=price) for hour, n, price in ((0, 0, 1.0), (1, 4, 3.5))]
    cloud = Cloud(trace=Trace({"spot": found}, 96 * HOUR), prices={"on-demand": 3.0})
    lived = simulate("job", job(), cloud, WORK)
    assert lived.spot_hours == 0
    assert lived.finish is not None


def test_a_job_takes_each_spot_node_as_it_comes() -> None:
    """One spot node comes after the other, and each takes the place of an on-demand node."""
    world = TracedWorld(job(), total_steps=10**6, pace=WORK.pace(job()), cloud=cloud_of((0, 0), (0.5, 1), (1, 2)))
    for number in range(1, 3):
        world.run_to((number + 0.9) / 2 * HOUR)
        assert world.status.members.spot == number, "\n".join(world.events[-20:])
        assert len(world.nodes) == 4


def missed(lived: Outcome, hours: float) -> bool:
    return lived.finish is None or lived.finish > hours * HOUR


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_is_met_for_less_than_on_demand_nodes_alone(kind: str) -> None:
    hours = 10.0
    cloud = Cloud(trace=synthetic_trace(kind, 7, nodes=4), prices={"on-demand": 3.0})
    assert oracle(job(), cloud, WORK, hours * HOUR) is not None
    lived = simulate("job", job(hours), cloud, WORK, seed=7)
    assert not missed(lived, hours)
    assert lived.cost < 3.0 * WORK.node_hours(job())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("hours", [27.6, 36.0])
@pytest.mark.parametrize(("kinds", "most"), [(KINDS, 1.10), (UNLIKE, 1.15)], ids=["known", "unlike"])
def test_traces_beside_uniform_progress(kinds: dict[str, Any], most: float, hours: float) -> None:
    """The figures are in docs/benchmarks.md."""
    work, ratios, others = Work(steps=24 * 60, step_seconds=60.0), [], []
    for kind in kinds:
        for seed in range(4):
            cloud = Cloud(trace=synthetic_trace(kind, seed, nodes=4), prices={"on-demand": 3.0})
            best = oracle(job(), cloud, work, hours * HOUR)
            assert best is not None
            lived = simulate(f"{kind} {seed}", job(hours), cloud, work, seed=seed)
            assert not missed(lived, hours), lived
            assert lived.cost < 3.0 * work.node_hours(job()), lived
            other = uniform_progress(job(), cloud, work, hours * HOUR, seed=seed)
            ratios.append(lived.cost / best.cost)
            others.append(other.cost / best.cost)
            late = ", late" if missed(other, hours) else ""
            print(f"{kind} {seed}: oracle {best.cost:.1f}, {ratios[-1]:.3f}, Uniform Progress {others[-1]:.3f}{late}")
        print(f"{kind}: {mean(ratios[-4:]):.3f}, Uniform Progress {mean(others[-4:]):.3f}", flush=True)
    print(f"mean: {mean(ratios):.3f}, Uniform Progress {mean(others):.3f}")
    assert mean(ratios) < min(most, mean(others))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stands_in", [True, False], ids=["fallback", "spot alone"])
def test_twenty_traces_without_a_deadline(stands_in: bool) -> None:
    """The oracle has as long as the job takes, and one start more. The figures are in docs/benchmarks.md."""
    work, ratios = Work(steps=24 * 60, step_seconds=60.0), []
    spec = job() if stands_in else without_fallback(job())
    for kind in KINDS:
        for seed in range(4):
            cloud = Cloud(trace=synthetic_trace(kind, seed, nodes=4), prices={"on-demand": 3.0})
            lived = simulate(f"{kind} {seed}", spec, cloud, work, seed=seed)
            assert lived.finish is not None, lived
            deadline = lived.finish + cloud.boot_seconds + work.restart_seconds
            best = oracle(spec, cloud, work, deadline)
            assert best is not None
            ratios.append(lived.cost / best.cost)
            print(f"{kind} {seed}: {lived.cost:.1f}, oracle {best.cost:.1f}, {ratios[-1]:.3f}")
    print(f"mean: {sum(ratios) / len(ratios):.3f}")
    assert sum(ratios) / len(ratios) < 1.05


def test_a_planned_drain_has_time_for_a_step_that_takes_minutes() -> None:
    """On one node instead of four, a step takes four times as long. A drain that is cut off loses it."""
    slow = training().model_copy(update={"step_seconds": 240.0})
    suspended = training_job().all_say(progress=slow).spec(runPolicy={"suspend": True}).plan().status.generation
    assert suspended is not None
    assert suspended.deadline is not None
    assert (suspended.deadline - NOW).total_seconds() == 3 * 240.0
