"""List prices of common GPU instances, for jobs that give no prices.

They are in list_prices.csv, in USD per hour of one instance, each in one region. Spot prices are typical ones.
A bill differs: by region, by contract, and, for spot instances, by the hour.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

LIST_PRICES_OF = date(2025, 12, 1)
"""The date of the prices, which is shown wherever they are used. Change it with them."""
LIST_CURRENCY = "USD"
LABEL_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_FILE = Path(__file__).with_name("list_prices.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPrice:
    """Prices of one instance per hour, in `LIST_CURRENCY`."""

    on_demand: float
    spot: float


def list_price(labels: Mapping[str, str]) -> ListPrice | None:
    """The list price of a node with these labels; None if it isn't known."""
    return _prices().get(labels.get(LABEL_INSTANCE_TYPE, ""))


@cache
def _prices() -> Mapping[str, ListPrice]:
    with _FILE.open(newline="", encoding="utf-8") as file:
        return {
            row["instanceType"]: ListPrice(on_demand=float(row["onDemand"]), spot=float(row["spot"]))
            for row in csv.DictReader(file)
        }
