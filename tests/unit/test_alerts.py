"""The alerts fire when they should, and each says what to do.

Prometheus' own promtool evaluates them.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.reference_pages import REPOSITORY
from docs.reference_pages.job_metrics import exposed_name

from prometheus_binaries import NoPrometheusError, Prometheus, ensure_prometheus, find_prometheus
from spottrain_local.install import find_helm
from spottrain_operator.metrics import Metrics
from spottrain_watcher.metrics import Metrics as WatcherMetrics

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "spottrain"
RULES = CHART / "alerts" / "spottrain.yaml"
CASES = ROOT / "tests" / "alerts" / "test_rules.yaml"
MONITOR = ROOT / "docs" / "how-to" / "monitor.md"
RUNBOOKS = ROOT / "docs" / "runbooks.md"


@pytest.fixture(scope="module")
def prometheus() -> Prometheus:
    found = find_prometheus()
    if found is None:
        pytest.fail("Prometheus is not here: run `make prometheus`.")
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_the_alerts_fire_when_they_should_and_not_otherwise(prometheus: Prometheus) -> None:
    done = subprocess.run([prometheus.promtool, "test", "rules", CASES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_machine_without_prometheus_and_apt_is_shown_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        NoPrometheusError, match=r"there is no apt-get .* Put `prometheus` and `promtool` .* on the PATH"
    ):
        ensure_prometheus()


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tried = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts()}
    assert {each["alertname"] for each in tried if each["exp_alerts"]} == names
    assert {each["alertname"] for each in tried if not each["exp_alerts"]} == names


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_says_what_is_wrong_and_where_to_read_what_to_do(alert: dict[str, Any]) -> None:
    name, notes = alert["alert"], alert["annotations"]
    assert name.startswith("Spottrain")
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert notes["description"].endswith(".")
    assert not notes["summary"].endswith(".")
    assert notes["runbook_url"] == f"{REPOSITORY}/docs/runbooks.md#{name.lower()}"
    text = RUNBOOKS.read_text()
    assert f"\n## {name}\n" in text
    assert f"| [{name}](#{name.lower()}) | {alert['labels']['severity']} |" in text


def test_alerts_ask_for_metrics_that_exist() -> None:
    registries = Metrics(num_agents=lambda: 0).registry, WatcherMetrics(()).registry
    known = {exposed_name(family) for registry in registries for family in registry.collect()}
    asked = set(re.findall(r"\bspottrain_\w+", " ".join(alert["expr"] for alert in alerts())))
    assert asked - known == set()
    assert len(asked) > 10


def configuration(folder: Path, *pods: dict[str, str]) -> Path:
    """The configuration in the docs, as a file. It discovers pods with these labels."""
    [text] = re.findall(r"```yaml\n(scrape_configs:.*?)```", MONITOR.read_text(), re.DOTALL)
    config = folder / "prometheus.yml"
    # Debian's Prometheus is built without the discovery of Kubernetes' pods.
    found = json.dumps([{"targets": ["localhost:8080"], "labels": labels} for labels in pods])
    text = re.sub(r"kubernetes_sd_configs: .*", f"static_configs: {found}", text)
    config.write_text(text.replace("charts/", f"{ROOT}/charts/"))
    return config


def test_the_configuration_in_the_docs_is_one_that_prometheus_reads(prometheus: Prometheus, tmp_path: Path) -> None:
    config = configuration(tmp_path, {})
    done = subprocess.run(
        [prometheus.promtool, "check", "config", config], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


@pytest.mark.parametrize(("component", "port"), [("operator", 9402), ("watcher", 9401)])
def test_the_configuration_in_the_docs_finds_pods_of_both_kinds_of_addresses(
    prometheus: Prometheus, tmp_path: Path, component: str, port: int
) -> None:
    label = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    pods = [{label: component, "__meta_kubernetes_pod_ip": ip} for ip in ("10.244.0.7", "fd00:10:244::7")]
    config, job = configuration(tmp_path, *pods), f"spottrain-{component}"
    # promtool waits for further targets until the timeout, 30 s by default.
    command = [str(prometheus.promtool), "check", "service-discovery", "--timeout=3s", str(config), job]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {each["labels"]["instance"] for each in json.loads(done.stdout)}
    assert found == {f"10.244.0.7:{port}", f"[fd00:10:244::7]:{port}"}


@pytest.mark.cluster
def test_the_chart_makes_a_rule_object_of_the_file() -> None:
    command = [find_helm(), "template", "s", str(CHART), "--set", "alerts.enabled=true"]
    options = ["--set", "alerts.labels.release=prom", "--show-only", "templates/alerts.yaml"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, timeout=60)
    rule = yaml.safe_load(done.stdout)
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["release"] == "prom"
