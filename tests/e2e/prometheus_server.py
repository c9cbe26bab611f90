"""A real Prometheus that scrapes an operator, and what it answers."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster_fixtures import wait_for
from prometheus_binaries import Prometheus
from spottrain_local.address import free_port

LOOPBACK = "127.0.0.1"
SECOND_BETWEEN_SCRAPES = 1
# What a panel shows of the past.
RANGE_SECONDS, STEP_SECONDS = 180, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Labels, and the finite samples as pairs of time and value, oldest first."""

    labels: dict[str, str]
    samples: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusServer:
    """The HTTP API of a running Prometheus."""

    url: str

    def query(self, expression: str, *, instant: bool = False) -> list[Series]:
        """The series of an expression, those without a finite sample left out.

        Args:
            expression: In PromQL.
            instant: Ask for the present alone. Otherwise for the last minutes.

        Raises:
            urllib.error.HTTPError: Prometheus refuses the expression.
        """
        now = time.time()
        if instant:
            found = self.get("query", query=expression, time=now)["result"]
        else:
            times = {"start": now - RANGE_SECONDS, "end": now, "step": STEP_SECONDS}
            found = self.get("query_range", query=expression, **times)["result"]
        series = [Series(labels=each["metric"], samples=_finite(each)) for each in found]
        return [each for each in series if each.samples]

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules that are loaded, with their health."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def get(self, path: str, **query: object) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        try:
            self.get("status/buildinfo")
        except (OSError, urllib.error.HTTPError):
            return False
        return True


def _finite(answer: dict[str, Any]) -> tuple[tuple[float, float], ...]:
    """The samples that are numbers."""
    values = answer.get("values") or [answer["value"]]
    return tuple((at, float(text)) for at, text in values if math.isfinite(float(text)))


@contextmanager
def prometheus_server(
    binaries: Prometheus, folder: Path, targets: list[str], rules: Path
) -> Iterator[PrometheusServer]:
    """Run Prometheus while the block runs.

    It scrapes the targets every second, and evaluates the alerts of `rules` as often.
    """
    every = f"{SECOND_BETWEEN_SCRAPES}s"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "spottrain", "static_configs": [{"targets": targets}]}],
    }
    file, port = folder / "prometheus.yml", free_port(LOOPBACK, 9090)
    file.write_text(yaml.safe_dump(config))
    options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [binaries.server, *options, f"--web.listen-address={LOOPBACK}:{port}"], stdout=log, stderr=log, cwd=folder
        )
    try:
        server = PrometheusServer(url=f"http://{LOOPBACK}:{port}")
        wait_for(server.is_ready, f"Prometheus is ready; its log is in {folder}")
        yield server
    finally:
        process.terminate()
        process.wait(20)
