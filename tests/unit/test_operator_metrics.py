"""The metrics, and a dashboard that fits them.

Prometheus and Grafana can rely on the metrics' names, labels and types.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from memory_signals import MemorySource
from prometheus_binaries import find_prometheus
from scene import pod
from spottrain_api.contract import (
    AgentReport,
    CapacityType,
    CheckpointTimings,
    CommitRef,
    Member,
    NodeWatch,
    Notice,
    NoticeKind,
    Progress,
    WatchState,
)
from spottrain_api.v1alpha1 import (
    Condition,
    CostStatus,
    Counts,
    GenerationState,
    GenerationStatus,
    Phase,
    ProgressStatus,
    TimeStatus,
    TrainingJobSpec,
    TrainingJobStatus,
    Transition,
)
from spottrain_operator import process
from spottrain_operator.cluster.client import JobKey
from spottrain_operator.core.model import JobView, NodeView, Observed, ReportView
from spottrain_operator.job_families import JOB
from spottrain_operator.job_histograms import JobHistogram
from spottrain_operator.metrics import Metrics, drain_latency
from spottrain_watcher.metrics import Metrics as WatcherMetrics

DASHBOARDS = sorted((Path(__file__).parents[2] / "charts" / "spottrain" / "dashboards").glob("*.json"))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = JobKey(namespace="research", name="gpt")
UNITS = ("_seconds", "_bytes", "_ratio", "_total")
# Names that Prometheus and its operator give to targets; a sample with one of them is renamed.
TARGET_LABELS = {"job", "instance", "namespace", "pod", "container", "service", "endpoint"}

COMMIT = CommitRef(generation=2, step=10, manifest="m", committed_at=NOW)
GENERATION = GenerationStatus(
    number=2,
    state=GenerationState.ACTIVE,
    rendezvous_id="gpt-2",
    rendezvous_endpoint="10.0.0.1:29400",
    world_size=4,
    members=(
        Member(
            pod="gpt-7",
            pod_uid="p",
            address="10.0.0.1",
            node="spot-0",
            node_rank=0,
            capacity_type=CapacityType.SPOT,
        ),
    ),
    started_at=NOW,
    first_step_at=NOW,
)
STATUS = TrainingJobStatus(
    phase=Phase.RUNNING,
    generation=GENERATION,
    progress=ProgressStatus(
        step=10,
        total_steps=100,
        loss=1.5,
        tokens_per_second=900.0,
        data_wait_ratio=0.2,
        eta_seconds=90.0,
        checkpoint_interval_seconds=30.0,
        last_step_at=NOW,
    ),
    conditions=(
        Condition(type="Ready", status="True", reason="Running", message="", last_transition_time=NOW),
        Condition(type="Blocked", status="False", reason="Free", message="", last_transition_time=NOW),
    ),
    start_time=NOW,
    time=TimeStatus(until=NOW, productive_seconds=8.0, restart_seconds=2.0),
    commit=COMMIT,
    members=Counts(on_demand=1, spot=3),
    preemptions=3,
    preemptions_without_notice=1,
    goodput=0.9,
    cost=CostStatus(total=1.0, on_demand_only=2.0, currency="EUR"),
)


def view(status: TrainingJobStatus) -> JobView:
    spec: dict[str, Any] = {
        "image": "i",
        "entrypoint": {"script": "train.py"},
        "checkpoint": {"uri": "s3://b/c"},
        "batch": {"global": 8},
    }
    spec["runPolicy"] = {"activeDeadlineSeconds": 3600}
    return JobView(
        namespace=KEY.namespace,
        name=KEY.name,
        uid="u",
        spec=TrainingJobSpec.model_validate(spec | {"nodes": {"min": 1, "max": 4}}),
        metadata_generation=1,
        created_at=NOW,
        status=status,
    )


def heard(**changes: Any) -> Notice:
    fields: dict[str, Any] = {"id": "n", "node": "spot-0", "source": "ec2", "deadline": NOW, "observed_at": NOW}
    return Notice(**(fields | changes))


def report(*notices: Notice) -> ReportView:
    """Of an agent that has heard notices and seen a commit."""
    timings = CheckpointTimings(
        staging_seconds=0.1, upload_seconds=1.0, commit_seconds=0.1, num_bytes=100, forecast_seconds=1.8
    )
    agent = AgentReport(
        pod="gpt-0",
        pod_uid="p",
        rendezvous_port=1,
        progress=Progress(
            generation=2,
            updated_at=NOW,
            commit=COMMIT,
            checkpoint=timings,
            step_seconds=1.0,
            waited_seconds=3.0,
            stalled_seconds=1.0,
            memory_bytes=2**30,
        ),
        notices=notices,
        sent_at=NOW,
    )
    return ReportView(report=agent, received_at=NOW)


def seen(status: TrainingJobStatus, reports: Mapping[str, ReportView], **more: Any) -> Observed:
    """What a pass saw of the job with this status."""
    member = pod(7, uid="p", node="spot-0", created_at=NOW - timedelta(minutes=1))
    return Observed(
        job=view(status), pods=(member,), reports=reports, template_hash="t", operator_started_at=NOW, **more
    )


def ending(reason: str = "Preempted", *, seconds: float = 0.2) -> TrainingJobStatus:
    changes = {"reason": reason, "requested_at": NOW + timedelta(seconds=seconds)}
    return STATUS.model_copy(update={"generation": GENERATION.model_copy(update=changes)})


@pytest.fixture
def metrics() -> Metrics:
    """Metrics after a drain for a preemption and the next generation's first step."""
    metrics = Metrics(num_agents=lambda: 4)
    gap = Transition(generation=1, reason="Preempted", at=NOW, seconds_without_step=1.5)
    after = ending().model_copy(update={"transitions": (gap,)})
    metrics.passed(KEY, seen(STATUS, {"p": report(heard())}), after)
    metrics.reconcile_seconds.observe(0.01)
    metrics.reconcile_errors.labels("conflict").inc()
    return metrics


AN_HOUR_AGO = NOW - timedelta(hours=1)
HINT = heard(id="hint", kind=NoticeKind.REBALANCE, observed_at=AN_HOUR_AGO)


def test_a_drain_is_timed_from_the_notice_that_made_it() -> None:
    taken_back = heard(id="false alarm", cancelled=True, observed_at=AN_HOUR_AGO)
    reports = {"p": report(HINT, taken_back, heard()), "no member": report(heard(observed_at=AN_HOUR_AGO))}
    assert drain_latency(seen(STATUS, reports), ending()) == 0.2


def test_a_drain_is_timed_also_if_the_node_shows_the_notice_before_the_agent_says_it() -> None:
    nodes = {"spot-0": NodeView(name="spot-0", notice=heard())}
    assert drain_latency(seen(STATUS, {"p": report()}, nodes=nodes), ending()) == 0.2


def test_a_drain_is_not_timed_from_a_notice_about_an_earlier_node_of_that_name() -> None:
    nodes = {"spot-0": NodeView(name="spot-0", notice=heard(id="old", deadline=AN_HOUR_AGO, observed_at=AN_HOUR_AGO))}
    assert drain_latency(seen(STATUS, {"p": report(heard())}, nodes=nodes), ending()) == 0.2


@pytest.mark.parametrize("reason", ["Grow", "Edited", "Suspended", "NodeLost", "Failure"])
def test_the_end_of_a_generation_for_another_reason_is_not_timed(reason: str) -> None:
    assert drain_latency(seen(STATUS, {"p": report(HINT, heard())}), ending(reason)) is None


def test_a_stop_after_a_drain_is_not_timed_again() -> None:
    assert drain_latency(seen(ending(), {"p": report(heard())}), ending(seconds=25)) is None


@pytest.fixture
def watcher() -> WatcherMetrics:
    return WatcherMetrics([MemorySource("ec2"), MemorySource("kubernetes")])


def families(metrics: Metrics | WatcherMetrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.exposition()[0].decode()))


def test_every_metric_has_a_sample_a_help_and_a_conventional_name(metrics: Metrics, watcher: WatcherMetrics) -> None:
    found = [*families(metrics), *families(watcher)]
    assert all(family.samples for family in found), [family.name for family in found if not family.samples]
    for family in found:
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"(spottrain|process)(_[a-z]+)+", family.name)
        assert not (family.type == "gauge" and family.name.endswith("_total")), family.name
        assert family.type != "histogram" or family.name.endswith("_seconds"), family.name
        # What is measured in a unit names the base unit at its end.
        assert all(unit not in family.name or family.name.endswith(unit) for unit in UNITS), family.name


def test_prometheus_own_check_of_metrics_finds_nothing(metrics: Metrics, watcher: WatcherMetrics) -> None:
    prometheus = find_prometheus()
    assert prometheus is not None, "Prometheus is not here: run `make prometheus`."
    for exposing in (metrics, watcher):
        text, _ = exposing.exposition()
        done = subprocess.run([prometheus.promtool, "check", "metrics"], input=text, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_forecast_of_a_checkpoint_is_compared_with_what_it_took(metrics: Metrics) -> None:
    (family,) = [family for family in families(metrics) if family.name == "spottrain_job_checkpoint_forecast_ratio"]
    assert family.samples[0].value == pytest.approx(1.5)


def test_members_that_nobody_watches_are_counted(metrics: Metrics) -> None:
    def counted(after: TrainingJobStatus) -> float:
        views = {
            uid: ReportView(
                report=report().report.model_copy(update={"pod_uid": uid, "watch": watch}), received_at=NOW
            )
            for uid, watch in watches.items()
        }
        metrics.passed(KEY, seen(STATUS, views), after)
        (family,) = [each for each in families(metrics) if each.name == "spottrain_job_unwatched_members"]
        return float(family.samples[0].value)

    watches = {
        "watched": NodeWatch(state=WatchState.WATCHED, seconds=3600.0),
        "missing": NodeWatch(state=WatchState.MISSING, seconds=3600.0),
        "blind": NodeWatch(state=WatchState.BLIND, seconds=3600.0),
        "starting": NodeWatch(state=WatchState.STARTING, seconds=100.0),
        "restarts": NodeWatch(state=WatchState.MISSING, seconds=1.0),
        "on-demand": None,
        "old": None,
    }
    members = tuple(
        Member(
            pod=uid,
            pod_uid=uid,
            address="10.0.0.1",
            node=f"node-{uid}",
            node_rank=rank,
            capacity_type=CapacityType.ON_DEMAND if uid == "on-demand" else CapacityType.SPOT,
        )
        for rank, uid in enumerate(watches)
    )
    running = GENERATION.model_copy(update={"members": members})
    assert counted(STATUS.model_copy(update={"generation": running})) == 2.0
    ended = running.model_copy(update={"state": GenerationState.ENDED})
    assert counted(STATUS.model_copy(update={"generation": ended})) == 0.0


def test_money_has_its_currency(metrics: Metrics) -> None:
    costs = [family for family in families(metrics) if "cost" in family.name]
    assert {sample.name: sample.labels["currency"] for family in costs for sample in family.samples} == {
        "spottrain_job_cost_total": "EUR",
        "spottrain_job_cost_on_demand_only_total": "EUR",
    }


def samples(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """The values of a job's metric, by one of its labels."""
    return {s.labels[label]: s.value for f in families(metrics) for s in f.samples if s.name == name}


def test_the_parts_of_the_time_are_one_counter_by_cause(metrics: Metrics) -> None:
    parts = samples(metrics, "spottrain_job_time_seconds_total", "cause")
    assert len(parts) == 9
    assert {cause: seconds for cause, seconds in parts.items() if seconds} == {"productive": 8.0, "restart": 2.0}


def test_a_condition_is_1_while_it_is_true(metrics: Metrics) -> None:
    assert samples(metrics, "spottrain_job_condition", "condition") == {"Ready": 1.0, "Blocked": 0.0}


def test_a_member_has_values_of_its_own_while_its_generation_runs(metrics: Metrics) -> None:
    def of_members() -> dict[str, float]:
        return {s.name: s.value for f in families(metrics) for s in f.samples if s.labels.get("node_rank") == "0"}

    found = of_members()
    assert found["spottrain_job_member_memory_bytes"] == 2**30
    assert found["spottrain_job_member_data_wait_seconds_total"] == 3.0
    assert samples(metrics, "spottrain_job_member_info", "pod_name") == {"gpt-7": 1.0}
    ended = GENERATION.model_copy(update={"state": GenerationState.ENDED})
    metrics.passed(KEY, seen(STATUS, {"p": report()}), STATUS.model_copy(update={"generation": ended}))
    assert of_members() == {}


def test_the_deadline_is_a_time(metrics: Metrics) -> None:
    found = samples(metrics, "spottrain_job_deadline_timestamp_seconds", "job_name")
    assert found == {KEY.name: (NOW + timedelta(hours=1)).timestamp()}


def test_no_label_is_one_that_prometheus_gives_to_the_target(metrics: Metrics, watcher: WatcherMetrics) -> None:
    for family in [*families(metrics), *families(watcher)]:
        for sample in family.samples:
            assert not TARGET_LABELS & sample.labels.keys(), sample.name


def test_a_job_has_few_series_and_takes_them_along(metrics: Metrics) -> None:
    def of_job() -> list[str]:
        return [s.name for f in families(metrics) for s in f.samples if s.labels.get("job_name") == KEY.name]

    assert len(of_job()) < 150
    assert not any(name.endswith("_created") for name in of_job())
    metrics.forget(KEY)
    assert of_job() == []


def test_a_job_without_an_incident_has_its_histograms_at_zero() -> None:
    """Prometheus' rate() leaves out the first value of a series."""
    metrics = Metrics(num_agents=lambda: 0)
    metrics.passed(KEY, seen(STATUS, {}), STATUS)
    assert samples(metrics, "spottrain_job_gap_seconds_count", "job_name") == {KEY.name: 0.0}


def test_each_kind_of_error_is_counted_from_0() -> None:
    metrics = Metrics(num_agents=lambda: 0)
    kinds = set(re.findall(r'reconcile_errors\.labels\("(\w+)"\)', inspect.getsource(process)))
    assert samples(metrics, "spottrain_reconcile_errors_total", "kind") == dict.fromkeys(kinds, 0.0)


def test_the_histogram_of_a_job_is_the_one_that_prometheus_client_would_show() -> None:
    bounds, values = (0.5, 1.0, 2.5), [0.2, 0.5, 0.7, 1.0, 2.6, 40.0, 0.0]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = JobHistogram("gap_seconds", "Seconds.", bounds, ours)
    standard = Histogram("gap_seconds", "Seconds.", JOB, buckets=bounds, registry=theirs)
    other = JobKey(namespace="team", name="other")
    for key in (KEY, other):
        histogram.show(key)
        standard.labels(key.namespace, key.name)
    for value in values:
        histogram.observe(KEY, value)
        standard.labels(KEY.namespace, KEY.name).observe(value)
    histogram.show(KEY)
    assert generate_latest(ours) == generate_latest(theirs)
    histogram.forget(other)
    standard.remove(other.namespace, other.name)
    assert generate_latest(ours) == generate_latest(theirs)


@pytest.fixture
def labels(metrics: Metrics, watcher: WatcherMetrics) -> dict[str, set[str]]:
    """The labels of each series of the operator and of the watcher, by its name."""
    found: dict[str, set[str]] = {}
    for family in [*families(metrics), *families(watcher)]:
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
        known = {label for name in names for label in labels[name]} | {"instance"}
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


def test_money_is_shown_with_its_currency() -> None:
    """A sum over currencies would mean nothing."""
    targets = [t for path in DASHBOARDS for panel in panels_of(path) for t in panel["targets"]]
    sums = [t["expr"] for t in targets if re.match(r"sum.*spottrain_job_cost_total", t["expr"])]
    assert sums
    assert all(expr.startswith("sum by (currency)") for expr in sums)


def test_of_a_job_that_is_long_over_only_the_phase_is_left() -> None:
    """Also of one that a new operator finds so."""
    now = NOW
    metrics = Metrics(num_agents=lambda: 0, now=lambda: now)
    over = STATUS.model_copy(update={"phase": Phase.FAILED, "completion_time": NOW})
    metrics.passed(KEY, seen(STATUS, {}), over)

    def series() -> list[tuple[str, str]]:
        samples = [sample for family in families(metrics) for sample in family.samples]
        return [(each.name, each.labels.get("phase", "")) for each in samples if "job_name" in each.labels]

    assert len(series()) > 50
    now = NOW + timedelta(hours=1, seconds=1)
    metrics.passed(KEY, seen(over, {}), over)
    assert series() == [("spottrain_job_phase", "Failed")]
    metrics.forget(KEY)
    assert series() == []


def test_a_job_that_is_deleted_during_a_scrape_stays_forgotten() -> None:
    """A scrape runs in a thread."""

    def now() -> datetime:
        scraped.forget(KEY)
        return NOW

    scraped = Metrics(num_agents=lambda: 0, now=now)
    ended = STATUS.model_copy(update={"phase": Phase.FAILED, "completion_time": NOW})
    scraped.passed(KEY, seen(STATUS, {}), ended)
    assert families(scraped)
    assert [sample for family in families(scraped) for sample in family.samples if "job_name" in sample.labels] == []
