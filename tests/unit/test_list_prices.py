"""List prices of common instances, for jobs that give no prices."""

from __future__ import annotations

import csv
from datetime import date

import pytest

from scene import NOW, Scene, training_job
from spottrain_api import list_prices
from spottrain_api.list_prices import LABEL_INSTANCE_TYPE, LIST_PRICES_OF, list_price
from spottrain_api.v1alpha1.spending import CostStatus

RESERVED = {"name": "block", "capacityType": "reserved", "provider": "eks"}


def test_each_instance_is_listed_once_with_prices_that_can_be() -> None:
    with list_prices._FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [row["instanceType"] for row in rows]
    assert len(set(names)) == len(names) > 15
    assert {row["cloud"] for row in rows} == {"AWS", "Google Cloud"}
    for row in rows:
        assert 0 < float(row["spot"]) < float(row["onDemand"]) < 200, row
        assert row["region"]


def test_the_price_is_that_of_the_nodes_instance_type() -> None:
    found = list_price({LABEL_INSTANCE_TYPE: "p5.48xlarge"})
    assert found is not None
    assert (found.on_demand, found.spot) == (55.04, 21.62)
    assert list_price({LABEL_INSTANCE_TYPE: "m5.large"}) is None
    assert list_price({}) is None


def on(scene: Scene, *instance_types: str) -> CostStatus | None:
    """The cost after an hour of a job with its two on-demand and two spot nodes of these types."""
    scene = scene.status(cost=None, accounted_at=NOW)
    for sequence, name in enumerate(instance_types, start=1):
        scene = scene.node(sequence, labels={LABEL_INSTANCE_TYPE: name})
    return scene.later(3600).plan().status.cost


def test_a_job_without_prices_costs_what_the_list_says() -> None:
    cost = on(training_job(capacity={"onDemand": {"min": 2}}), *["p5.48xlarge"] * 4)
    assert cost is not None
    assert cost.total == pytest.approx(2 * 55.04 + 2 * 21.62)
    assert cost.on_demand_only == pytest.approx(4 * 55.04)
    assert (cost.list_prices_of, cost.days[-1].list_prices_of) == (LIST_PRICES_OF, LIST_PRICES_OF)
    assert cost.display == f"{cost.total:.2f} USD (saved 30%; list prices of {LIST_PRICES_OF})"


def test_nodes_that_are_not_listed_are_not_counted() -> None:
    scene = training_job(capacity={"onDemand": {"min": 2}})
    assert on(scene, *["m5.large"] * 4) is None
    cost = on(scene, "m5.large", "m5.large", "m5.large", "p5.48xlarge")
    assert cost is not None
    assert cost.total == pytest.approx(21.62)


@pytest.mark.parametrize(
    "capacity",
    [
        {"onDemand": {"min": 2, "pricePerHour": 1.0}},
        {"onDemand": {"min": 2}, "spot": {"pricePerHour": 0.0}},
        {"onDemand": {"min": 2}, "currency": "EUR"},
    ],
    ids=["one price", "a price of 0", "another currency"],
)
def test_one_price_of_the_job_or_another_currency_takes_the_lists_place(capacity: dict[str, object]) -> None:
    cost = on(training_job(capacity=capacity), *["p5.48xlarge"] * 4)
    assert cost is None or (cost.total < 3 and cost.list_prices_of is None)


def test_reserved_nodes_cost_nothing_at_list_prices() -> None:
    spot = {"name": "spot", "capacityType": "spot", "provider": "eks"}
    scene = training_job(capacity={"onDemand": {"min": 2}, "pools": [RESERVED, spot]})
    for sequence in (1, 2):
        scene = scene.pod(sequence, pool="block")
    cost = on(scene, *["p5.48xlarge"] * 4)
    assert cost is not None
    assert cost.total == pytest.approx(2 * 21.62)


def test_the_date_stays_once_the_job_gives_prices() -> None:
    before = CostStatus(total=5.0, list_prices_of=date(2025, 1, 1))
    scene = training_job(capacity={"onDemand": {"min": 2, "pricePerHour": 1.0}})
    cost = scene.status(cost=before, accounted_at=NOW).later(60).plan().status.cost
    assert cost is not None
    assert cost.list_prices_of == date(2025, 1, 1)
