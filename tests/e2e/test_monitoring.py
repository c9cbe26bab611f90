"""A real Prometheus scrapes the operator while a job is preempted.

Every panel and every alert has data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster_fixtures import Kubectl
from e2e.prometheus_server import PrometheusServer, Series, prometheus_server
from e2e.rehearsal import NAMESPACE, Rehearsal, rehearsal
from prometheus_binaries import Prometheus, find_prometheus
from spottrain_api.contract.names import WATCHER_PORT
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_local.cluster import Cluster
from spottrain_local.install import NAMESPACE as OPERATOR_NAMESPACE
from spottrain_local.install import chart_folder, install_operator
from spottrain_local.layout import LocalClusterError

JOB = "monitored"
DASHBOARDS = sorted((chart_folder() / "dashboards").glob("*.json"))
RULES = chart_folder() / "alerts" / "spottrain.yaml"
# Who announces a preemption, by the start of the node's name. The scheduler may choose any node.
SOURCES = {"spot": "ec2", "gke": "gce", "aks": "azure"}

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def binaries() -> Prometheus:
    found = find_prometheus()
    if found is None:
        pytest.fail("Prometheus is not here: run `make prometheus`.")
    return found


def targets(kubectl: Kubectl) -> list[str]:
    """Addresses and ports of the operator and of the watchers."""
    return [
        f"{pod['status']['podIP']}:{port}"
        for component, port in (("operator", operator_port(kubectl)), ("watcher", WATCHER_PORT))
        for pod in kubectl.list("pod", OPERATOR_NAMESPACE, labels=f"app.kubernetes.io/component={component}")
    ]


def operator_port(kubectl: Kubectl) -> int:
    """The local cluster chooses a free one."""
    deployment = kubectl.get("deployment", "spottrain-operator", OPERATOR_NAMESPACE)
    ports = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    return next(int(each["containerPort"]) for each in ports if each["name"] == "metrics")


def answer(prometheus: PrometheusServer, target: Mapping[str, Any]) -> list[Series]:
    """What Grafana gets for a query of a panel, with the job chosen.

    Data of its own, without the zero that stands in.
    """
    expression = target["expr"].replace("$namespace", NAMESPACE).replace("$job", JOB).replace(" or vector(0)", "")
    return prometheus.query(expression, instant=target.get("instant", False))


def without_data(prometheus: PrometheusServer, dashboard: Mapping[str, Any]) -> list[str]:
    """The panels' queries that get no number."""
    return [
        f"{panel['title']}: {target['expr']}"
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        if not answer(prometheus, target)
    ]


def test_every_panel_and_every_alert_of_a_preempted_job_has_data(
    operator_cluster: Cluster, tmp_path: Path, binaries: Prometheus
) -> None:
    kubectl = Kubectl(kubeconfig=operator_cluster.kubeconfig)
    spec: dict[str, Any] = {
        "capacity": {"onDemand": {"min": 1, "max": 1, "pricePerHour": 3.0}, "spot": {"max": 2, "pricePerHour": 1.0}},
        "runPolicy": {"activeDeadlineSeconds": 10**7},
        "budget": {"maxCost": 10**6},
    }
    with (
        prometheus_server(binaries, tmp_path, targets(kubectl), RULES) as prometheus,
        rehearsal(operator_cluster, JOB, tmp_path, members=2, **spec) as run,
    ):
        run.wait_for_spot(1, ready=3)
        # A rate needs a sample from before the notice.
        seen = f'spottrain_job_notice_to_drain_seconds_count{{job_name="{JOB}"}}'
        run.wait("Prometheus knows the job", lambda: prometheus.query(seen))
        with run.incident("one node, 30 s of notice, under the eyes of Prometheus"):
            preempted = run.wait_for_spot_nodes()[0]
            run.preempt([preempted], 30)
        run.wait("a commit after the preemption", lambda: committed_since_the_start(run))
        check_dashboards(run, prometheus)
        check_notices(prometheus, SOURCES[preempted.partition("-")[0]])
        check_alerts(prometheus)
        run.bring_back()
        check_time(run.finish())


def check_time(status: TrainingJobStatus) -> None:
    """The parts are all of the job's time, and goodput is the productive one."""
    assert status.time is not None
    assert status.start_time is not None
    assert status.time.until == status.completion_time
    elapsed = (status.time.until - status.start_time).total_seconds()
    assert sum(value for name, value in status.time if name != "until") == pytest.approx(elapsed, abs=0.01)
    assert status.goodput == pytest.approx(status.time.productive_seconds / elapsed, abs=1e-3)
    lost = status.time
    assert min(lost.start_up_seconds, lost.restart_seconds, lost.data_wait_seconds, lost.commit_stall_seconds) > 0
    assert lost.unreported_seconds == lost.suspended_seconds == lost.redone_seconds == 0


def test_a_cluster_without_the_prometheus_operator_is_reported(operator_cluster: Cluster) -> None:
    with pytest.raises(LocalClusterError, match=r"alerts\.enabled needs PrometheusRule of the Prometheus operator"):
        install_operator(operator_cluster, {"alerts": {"enabled": True}})


def committed_since_the_start(run: Rehearsal) -> bool:
    status = run.status()
    return bool(status.commit and status.generation and status.commit.generation == status.generation.number)


def wait_for_data(run: Rehearsal, prometheus: PrometheusServer, dashboard: Mapping[str, Any]) -> None:
    """A rate needs two scrapes."""
    try:
        run.wait("each panel has data", lambda: not without_data(prometheus, dashboard), seconds=30)
    except AssertionError:
        assert without_data(prometheus, dashboard) == []
        raise


def check_dashboards(run: Rehearsal, prometheus: PrometheusServer) -> None:
    assert len(DASHBOARDS) == 2
    for path in DASHBOARDS:
        wait_for_data(run, prometheus, json.loads(path.read_text()))


def check_notices(prometheus: PrometheusServer, source: str) -> None:
    """The panel shows the notice, although its watcher has heard no other."""
    panels = [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]
    [target] = next(panel["targets"] for panel in panels if panel["title"] == "Notices")
    [preempted] = [
        series
        for series in answer(prometheus, target)
        if (series.labels["source"], series.labels["kind"]) == (source, "preempt")
    ]
    assert max(value for _, value in preempted.samples) > 0


def is_firing(rule: Mapping[str, Any]) -> bool:
    """Whether it fires because of the job, or of no job in particular: other tests' jobs have failures, too."""
    jobs = [alert["labels"].get("job_name", JOB) for alert in rule["alerts"] if alert["state"] == "firing"]
    return JOB in jobs


def check_alerts(prometheus: PrometheusServer) -> None:
    rules = prometheus.rules()
    assert {rule["name"] for rule in rules} == set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if is_firing(rule)] == []
    series = {name for rule in rules for name in re.findall(r"\bspottrain_\w+", rule["query"])}
    assert sorted(name for name in series if not prometheus.query(name)) == []
