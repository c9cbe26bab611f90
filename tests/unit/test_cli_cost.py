"""`spottrain cost`: jobs that run, are over or are deleted, by what the user asks for."""

from __future__ import annotations

import io
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from answering_server import answering_server
from spottrain_api.cost_record import DAYS_KEPT, CostRecord
from spottrain_cli.api_access import UserError
from spottrain_cli.cost import cost_json, cost_table, first_day, spent, today
from spottrain_cli.main import main

TODAY = date(2026, 3, 10)


def ago(days: int) -> str:
    return (today() - timedelta(days=days)).isoformat()


def of_day(day: str, *pools: tuple[str, str, float], alone: float = 3.0, currency: str = "USD") -> dict[str, Any]:
    return {
        "day": day,
        "currency": currency,
        "pools": [
            {"capacityType": kind, "pool": pool, "total": total, "onDemandOnly": alone * total}
            for kind, pool, total in pools
        ],
    }


def record(namespace: str, job: str, uid: str, *days: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": f"{job}-{uid}"}, "job": job, "uid": uid, "days": list(days)}


def job(namespace: str, name: str, uid: str, *days: dict[str, Any]) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name, "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {}, "status": {"cost": {"days": list(days)}}}


ON_DEMAND = ("on-demand", "", 6.0)
DELETED = record("team-a", "old", "1", of_day(ago(1), ("spot", "h100", 4.0)), of_day(ago(20), ("spot", "h100", 8.0)))
RECORDED = record("team-a", "gpt", "2", of_day(ago(1), ON_DEMAND, alone=1), of_day(ago(0), ("spot", "", 1.0)))
RUNS = job("team-a", "gpt", "2", of_day(ago(0), ("spot", "", 2.0)))
OTHERS = job("team-b", "bert", "3", of_day(ago(0), ("spot", "", 5.0), alone=0, currency="EUR"))


def cost(folder: Path, *options: str, records: bool = True) -> Result:
    def answers(url: str) -> tuple[int, dict[str, Any]]:
        path = url.partition("?")[0]
        everywhere = "/namespaces/" not in path
        if path.endswith("/trainingjobcosts"):
            return (200, {"items": [DELETED, RECORDED]}) if records else (404, {"message": "not found"})
        return 200, {"items": [RUNS, OTHERS] if everywhere else [RUNS]}

    runner = CliRunner(env={"COLUMNS": "200"})
    with answering_server(folder, answers, namespace="team-a") as kubeconfig:
        return runner.invoke(main, ["cost", *options, "--kubeconfig", str(kubeconfig)], catch_exceptions=False)


def rows(folder: Path, *options: str) -> list[list[str]]:
    result = cost(folder, *options)
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines()[1:]]


def test_jobs_that_run_and_jobs_that_are_deleted_count(tmp_path: Path) -> None:
    """What the status of a job says of a day is newer than its record."""
    assert rows(tmp_path, "--since", "7d") == [
        ["gpt", "on-demand", "6.00", "USD", "6.00", "USD", "0%"],
        ["gpt", "spot", "2.00", "USD", "6.00", "USD", "67%"],
        ["old", "spot", "h100", "4.00", "USD", "12.00", "USD", "67%"],
        ["Since", ago(6), "12.00", "USD", "24.00", "USD", "50%"],
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--by", "job"], [["gpt", "8.00"], ["old", "12.00"], ["Since", ago(29)]]),
        (["--by", "day", "--since", "2d"], [[ago(1), "10.00"], [ago(0), "2.00"], ["Since", ago(1)]]),
        (["--by", "pool", "--since", ago(1)], [["8.00", "USD"], ["h100", "4.00"], ["Since", ago(1)]]),
        (
            ["-A", "--by", "namespace"],
            [["team-a", "20.00"], ["team-b", "5.00"], ["Since", ago(29)], ["Since", ago(29)]],
        ),
    ],
    ids=["job", "day", "pool", "namespace"],
)
def test_rows_are_of_what_the_user_asks_for(options: list[str], expected: list[list[str]], tmp_path: Path) -> None:
    assert [row[:2] for row in rows(tmp_path, *options)] == expected


def test_what_money_went_into_adds_up_to_the_cost(tmp_path: Path) -> None:
    """Days that were recorded without causes count as such."""
    day = of_day(ago(0), ("spot", "", 2.0), ("on-demand", "", 3.0), alone=1.0)
    parts = [("Training", 3.0, 4.0), ("Fallback", 1.0, 0.0)]
    day["causes"] = [{"cause": name, "total": total, "onDemandOnly": alone} for name, total, alone in parts]
    kept = CostRecord.model_validate({"job": "gpt", "uid": "1", "days": [day, of_day(ago(1), ("spot", "", 4.0))]})
    costs = spent([("team-a", kept)], [], first_day("7d", today()), ["cause"])
    rows = json.loads(cost_json(costs, ["job", "cause"], TODAY))["costs"]
    assert [(row["job"], row["cause"], row["cost"]) for row in rows] == [
        ("gpt", "Fallback", 1.0),
        ("gpt", "Training", 3.0),
        ("gpt", "not recorded", 5.0),
    ]
    assert rows[1]["onDemandOnly"] == 4.0
    refused = cost(tmp_path, "--by", "cause", "--by", "pool")
    assert refused.exit_code != 0
    assert "causes are recorded by job and day" in " ".join(refused.output.split())


def test_amounts_of_two_currencies_are_not_added(tmp_path: Path) -> None:
    answer = json.loads(cost(tmp_path, "-A", "--since", "1d", "-o", "json").output)
    assert answer["since"] == ago(0)
    assert answer["totals"] == [
        {"currency": "EUR", "cost": 5.0, "onDemandOnly": None, "listPricesOf": []},
        {"currency": "USD", "cost": 2.0, "onDemandOnly": 6.0, "listPricesOf": []},
    ]
    assert answer["costs"][0] == {
        "namespace": "team-a",
        "job": "gpt",
        "day": ago(0),
        "type": "spot",
        "pool": "",
        "currency": "USD",
        "cost": 2.0,
        "onDemandOnly": 6.0,
        "listPricesOf": [],
    }


def test_list_prices_show_their_date() -> None:
    paid = of_day(ago(0), ("spot", "", 2.0)) | {"listPricesOf": "2025-12-01"}
    costs = spent([("team-a", CostRecord.model_validate({"job": "gpt", "uid": "1", "days": [paid]}))], [], TODAY)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(cost_table(costs, ["job"], TODAY))
    shown = console.export_text()
    assert "2.00 USD*" in shown
    assert "* contains list prices of 2025-12-01, each of one region, as the job gives no prices." in shown
    assert json.loads(cost_json(costs, ["job"], TODAY))["totals"][0]["listPricesOf"] == ["2025-12-01"]


def test_if_nothing_was_spent_it_says_what_would_count() -> None:
    said = cost_table([], ["job"], TODAY)
    assert isinstance(said, str)
    assert said.startswith("No job has cost anything since 2026-03-10 (UTC). Only nodes whose price is known count: ")


def test_a_cluster_without_records_says_what_to_do(tmp_path: Path) -> None:
    result = cost(tmp_path, records=False)
    assert result.exit_code == 1
    assert "its chart is older than this command. Upgrade the release" in result.output


def test_since_is_a_number_of_days_or_a_date() -> None:
    assert first_day("1d", TODAY) == TODAY
    assert first_day("7d", TODAY) == date(2026, 3, 4)
    assert first_day("2026-02-28", TODAY) == date(2026, 2, 28)


@pytest.mark.parametrize(
    ("since", "said"),
    [
        ("0d", "give a number of days, as in 7d, or a date, as in 2026-03-10"),
        ("-3d", "give a number of days"),
        ("a week", "give a number of days"),
        ("", "give a number of days"),
        (f"{'9' * 40}d", "give a number of days"),
        ("2026-02-30", "give a number of days"),
        ("2026-03-11", "that day is yet to come"),
        (f"{DAYS_KEPT + 1}d", f"costs are kept for {DAYS_KEPT} days. Ask for {DAYS_KEPT}d at most"),
        ("2020-01-01", "costs are kept for"),
    ],
)
def test_a_since_that_cannot_be_answered_is_refused(since: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        first_day(since, TODAY)
