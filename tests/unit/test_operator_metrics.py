"""The metrics: names, labels and types that Prometheus and Grafana can rely on, and a dashboard that fits them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

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
    CostStatus,
    Counts,
    GenerationState,
    GenerationStatus,
    Phase,
    ProgressStatus,
    TrainingJobSpec,
    TrainingJobStatus,
    Transition,
)
from spottrain_operator.cluster.client import JobKey
from spottrain_operator.core.model import JobView, ReportView
from spottrain_operator.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "charts" / "spottrain" / "dashboards" / "spottrain.json"
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
    started_at=NOW,
)
STATUS = TrainingJobStatus(
    phase=Phase.RUNNING,
    generation=GENERATION,
    progress=ProgressStatus(step=10, total_steps=100, loss=1.5, tokens_per_second=900.0, data_wait_ratio=0.2),
    commit=COMMIT,
    members=Counts(on_demand=1, spot=3),
    preemptions=3,
    preemptions_without_notice=1,
    goodput=0.9,
    cost=CostStatus(total=1.0, on_demand_only=2.0, currency="EUR"),
)


def view(status: TrainingJobStatus) -> JobView:
    spec = {
        "image": "i",
        "entrypoint": {"script": "train.py"},
        "checkpoint": {"uri": "s3://b/c"},
        "batch": {"global": 8},
    }
    return JobView(
        namespace=KEY.namespace,
        name=KEY.name,
        uid="u",
        spec=TrainingJobSpec.model_validate(spec | {"nodes": {"min": 1, "max": 4}}),
        metadata_generation=1,
        created_at=NOW,
        status=status,
    )


def report() -> ReportView:
    """Of an agent that has heard a notice and seen a commit."""
    timings = CheckpointTimings(
        staging_seconds=0.1, upload_seconds=1.0, commit_seconds=0.1, num_bytes=100, forecast_seconds=1.8
    )
    notice = Notice(id="n", node="spot-0", kind=NoticeKind.PREEMPT, source="ec2", deadline=NOW, observed_at=NOW)
    agent = AgentReport(
        pod="gpt-0",
        pod_uid="p",
        rendezvous_port=1,
        progress=Progress(generation=2, updated_at=NOW, commit=COMMIT, checkpoint=timings),
        notices=(notice,),
        sent_at=NOW,
    )
    return ReportView(report=agent, received_at=NOW)


@pytest.fixture
def metrics() -> Metrics:
    """After a drain for a preemption has been decided, and the next generation has made its first step."""
    metrics = Metrics(num_agents=lambda: 4)
    gap = Transition(generation=1, reason="Preempted", at=NOW, seconds_without_step=1.5)
    draining = GENERATION.model_copy(update={"requested_at": NOW + timedelta(seconds=0.2)})
    after = STATUS.model_copy(update={"transitions": (gap,), "generation": draining})
    metrics.passed(KEY, view(STATUS), after, {"p": report()})
    metrics.reconcile_seconds.observe(0.01)
    metrics.reconcile_errors.labels("conflict").inc()
    return metrics


def families(metrics: Metrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.exposition()[0].decode()))


def test_every_metric_has_a_sample_a_help_and_a_conventional_name(metrics: Metrics) -> None:
    found = families(metrics)
    assert all(family.samples for family in found), [family.name for family in found if not family.samples]
    for family in found:
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"(spottrain|process)(_[a-z]+)+", family.name)
        assert not (family.type == "gauge" and family.name.endswith("_total")), family.name
        assert family.type != "histogram" or family.name.endswith("_seconds"), family.name
        # What is measured in a unit names the base unit at its end.
        assert all(unit not in family.name or family.name.endswith(unit) for unit in UNITS), family.name


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
        metrics.passed(KEY, view(STATUS), after, views)
        (family,) = [each for each in families(metrics) if each.name == "spottrain_job_unwatched_members"]
        return float(family.samples[0].value)

    watches = {
        "watched": NodeWatch(state=WatchState.WATCHED, seconds=3600.0),
        "missing": NodeWatch(state=WatchState.MISSING, seconds=3600.0),
        "blind": NodeWatch(state=WatchState.BLIND, seconds=3600.0),
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
        "spottrain_job_cost_on_demand_only": "EUR",
    }


def test_no_label_is_one_that_prometheus_gives_to_the_target(metrics: Metrics) -> None:
    for family in families(metrics):
        for sample in family.samples:
            assert not TARGET_LABELS & sample.labels.keys(), sample.name


def test_a_job_has_few_series_and_takes_them_along(metrics: Metrics) -> None:
    def of_job() -> list[str]:
        return [s.name for f in families(metrics) for s in f.samples if s.labels.get("job_name") == KEY.name]

    assert len(of_job()) < 110
    assert not any(name.endswith("_created") for name in of_job())
    metrics.forget(KEY)
    assert of_job() == []


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(metrics: Metrics) -> None:
    labels: dict[str, set[str]] = {}
    for family in families(metrics):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text())
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    asked: set[str] = set()
    for text in [*variables, *(f"{target['expr']} {target['legendFormat']}" for target in targets)]:
        names = re.findall(r"\bspottrain_\w+", text)
        assert names, text
        asked.update(names)
        for name in names:
            assert name in labels, f"{name}: no such metric"
        used = re.findall(r"(\w+)=~", text) + re.findall(r"{{(\w+)}}", text)
        for label in used:
            assert any(label in labels[name] for name in names), f"{text}: no such label: {label}"
    money = [target for target in targets if target["expr"].startswith("spottrain_job_cost_total")]
    assert money
    assert all("{{currency}}" in target["legendFormat"] for target in money)
    # Every metric about jobs is to be seen.
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    shown_otherwise = {"spottrain_job_generation", "spottrain_job_productive_seconds"}
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels if name.startswith("spottrain_")}
    assert ours - stems - shown_otherwise == set()
