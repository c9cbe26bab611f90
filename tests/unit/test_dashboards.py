"""The chart's dashboards fit the metrics, and can be read."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from measured_job import families, metrics_after_a_drain, watcher_metrics
from prometheus_binaries import find_prometheus
from spottrain_api.contract.names import QUIET_REPORT_SECONDS

DASHBOARDS = sorted((Path(__file__).parents[2] / "charts" / "spottrain" / "dashboards").glob("*.json"))


@pytest.fixture
def labels() -> dict[str, set[str]]:
    """The labels of each series of the operator and of the watcher, by its name."""
    found: dict[str, set[str]] = {}
    for family in [*families(metrics_after_a_drain()), *families(watcher_metrics())]:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels_of(dashboard: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(dashboard.read_text())["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_metrics_and_labels_that_exist(dashboard: Path, labels: dict[str, set[str]]) -> None:
    variables = json.loads(dashboard.read_text())["templating"]["list"]
    queries = [each["query"]["query"] for each in variables if each["type"] == "query"]
    targets = [target for panel in panels_of(dashboard) for target in panel["targets"]]
    for text in [*queries, *(f"{target['expr']} {target['legendFormat']}" for target in targets)]:
        names = re.findall(r"\b(?:spottrain|process)_\w+", text)
        assert names, text
        assert [name for name in names if name not in labels] == [], text
        used = re.findall(r"(\w+)[=!]~?\"", text) + re.findall(r"{{(\w+)}}", text)
        known = {label for name in names for label in labels[name]} | {"instance", "namespace"}  # of the scrape
        assert [label for label in used if label not in known] == [], text


def test_every_metric_about_jobs_is_to_be_seen(labels: dict[str, set[str]]) -> None:
    asked = {name for path in DASHBOARDS for name in re.findall(r"\bspottrain_\w+", path.read_text())}
    # For alerts alone.
    asked |= {f"spottrain_job_{which}_timestamp_seconds" for which in ("deadline", "first_step", "last_step")}
    ours = {name for name in labels if name.startswith("spottrain_")}
    assert {stem(name) for name in ours} - {stem(name) for name in asked} == set()


def stem(name: str) -> str:
    """A metric's name without what a histogram adds."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_units_and_descriptions_and_do_not_overlap(dashboard: Path) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels_of(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        place = panel["gridPos"]
        own = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24, panel["title"]
        cells |= own


def test_rates_of_members_reach_over_several_reports() -> None:
    """Other members than node rank 0 report every QUIET_REPORT_SECONDS at rest."""
    targets = [t["expr"] for path in DASHBOARDS for panel in panels_of(path) for t in panel["targets"]]
    minutes = re.findall(r"spottrain_job_member_\w+{[^}]*}\[(\d+)m\]", " ".join(targets))
    assert len(minutes) == 4
    assert min(map(int, minutes)) * 60 > 2 * QUIET_REPORT_SECONDS


def test_totals_of_the_fleet_say_that_jobs_which_ended_long_ago_are_left_out() -> None:
    """Of these the operator shows the phase alone."""
    [fleet] = [path for path in DASHBOARDS if path.stem == "fleet"]
    totals = [
        panel
        for panel in panels_of(fleet)
        if any(re.search(r"\bspottrain_job_\w+_total{[^}]*}(?!\[)", target["expr"]) for target in panel["targets"])
    ]
    assert {"Goodput", "Cost", "Saved", "Time lost so far"} <= {panel["title"] for panel in totals}
    assert [panel["title"] for panel in totals if "ended more than an hour ago" not in panel["description"]] == []


COSTS = """
    - {series: 'spottrain_job_cost_total{job_namespace="a", job_name="compared", currency="USD"}', values: "100x5"}
    - {series: 'spottrain_job_cost_on_demand_only_total{job_namespace="a", job_name="compared", currency="USD"}',
       values: "400x5"}
    - {series: 'spottrain_job_cost_total{job_namespace="a", job_name="not", currency="USD"}', values: "500x5"}
"""
TIMES = """
    - {series: 'spottrain_job_time_seconds_total{job_namespace="a", cause="productive"}', values: "90x5"}
    - {series: 'spottrain_job_time_seconds_total{job_namespace="a", cause="restart"}', values: "10x5"}
    - {series: 'spottrain_job_time_seconds_total{job_namespace="a", cause="unreported"}', values: "9e9x5"}
"""
LEADERS = """
    - {series: 'spottrain_leader{namespace="spottrain-a", pod="operator-a"}', values: "1x5"}
    - {series: 'spottrain_leader{namespace="spottrain-b", pod="operator-b"}', values: "0x5"}
    - {series: 'spottrain_leader{namespace="spottrain-b", pod="operator-c"}', values: "0x5"}
"""


@pytest.mark.parametrize(
    ("title", "series", "shown"),
    [
        ("Saved", COSTS, {'{currency="USD"}': 0.75}),
        ("Goodput", TIMES, {"{}": 0.9}),
        ("Leaders", LEADERS, {'{namespace="spottrain-a"}': 1, '{namespace="spottrain-b"}': 0}),
    ],
    ids=["savings of jobs whose on-demand price is known", "goodput of time that is reported", "leaders by release"],
)
def test_a_figure_of_the_fleet_counts_what_it_says(
    tmp_path: Path, title: str, series: str, shown: dict[str, float]
) -> None:
    prometheus = find_prometheus()
    assert prometheus is not None, "Prometheus is not here: run `make prometheus`."
    [panel] = [panel for panel in panels_of(DASHBOARDS[0]) if panel["title"] == title]
    expr = panel["targets"][0]["expr"].replace("$namespace", ".*")
    samples = [{"labels": labels, "value": value} for labels, value in shown.items()]
    expected = {"expr": expr, "eval_time": "3m", "exp_samples": samples}
    case = {"interval": "1m", "input_series": yaml.safe_load(series), "promql_expr_test": [expected]}
    (tmp_path / "figures.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    command = [str(prometheus.promtool), "test", "rules", str(tmp_path / "figures.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_money_is_shown_with_its_currency() -> None:
    """A sum over currencies would mean nothing."""
    targets = [t for path in DASHBOARDS for panel in panels_of(path) for t in panel["targets"]]
    sums = [t["expr"] for t in targets if re.match(r"sum.*spottrain_job_cost_total", t["expr"])]
    assert sums
    assert all(expr.startswith("sum by (currency)") for expr in sums)
