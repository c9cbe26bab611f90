"""What a hostile spec shows to others.

That is in status, events, log, metrics, history, the report and the terminal. What is refused at once is checked on a
real API server, in test_hostile_specs_on_cluster.py.
"""

from __future__ import annotations

import io
import json
import logging
from datetime import datetime
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from hostile_specs import SHOWN
from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.crd import CRD_FILE
from spottrain_api.v1alpha1 import TrainingJobStatus
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.live_view import job_view
from spottrain_cli.report import html_report
from spottrain_operator.cluster.client import InvalidObjectError, Manifest

# A status is read by every watcher of jobs.
MOST_OF_STATUS = 10_000


class QuotingCluster(CrashingCluster):
    """Refuses pods, and quotes what is in them, as Kubernetes does."""

    quotes = ""

    async def create_pod(self, pod: Manifest) -> Manifest:
        if self.quotes:
            raise InvalidObjectError(f"spec.containers[0].image: Invalid value: {self.quotes}")
        return await super().create_pod(pod)


def strings(schema: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Every string, list and map below a schema, by its path."""
    found = {path: schema} if schema.get("type") in ("string", "array") or "additionalProperties" in schema else {}
    below = {f"{path}.{name}": each for name, each in schema.get("properties", {}).items()}
    below |= {f"{path}[]": schema["items"]} if "items" in schema else {}
    values = schema.get("additionalProperties")
    below |= {f"{path}{{}}": values} if isinstance(values, dict) else {}
    return found | {name: part for name, each in below.items() for name, part in strings(each, name).items()}


def test_nothing_in_a_spec_is_without_a_bound() -> None:
    root = yaml.safe_load(CRD_FILE.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found = strings(root["properties"]["spec"], "spec")
    assert len(found) > 60
    bounds = {"maxLength", "maxItems", "maxProperties", "enum"}
    assert [path for path, schema in found.items() if not bounds & schema.keys()] == []
    assert max(schema.get("maxLength", 0) for schema in found.values()) <= 131_072, "more than a process takes"


def hostile(text: str) -> dict[str, Any]:
    """A spec with the text wherever the CRD leaves it to users."""
    pool = {"capacityType": "spot", "provider": "custom", "nodeSelector": {"a": "b"}}
    pools = [{"name": text, **pool}, {"name": "o", **pool, "capacityType": "on-demand"}]
    return {
        "image": text,
        "entrypoint": {"script": text, "args": [text], "workingDir": text},
        "env": [{"name": "A", "value": text}],
        "checkpoint": {"uri": f"s3://bucket/{text}", "endpointURL": f"http://{text}"},
        "capacity": {"onDemand": {"min": 1}, "spot": {"max": 2}, "pools": pools},
        "podTemplate": {"annotations": {"a": text}},
    }


class Elements(HTMLParser):
    """The elements of a page, and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def looked_at(world: World, cluster: QuotingCluster) -> JobSnapshot:
    stored = cluster.jobs[KEY]
    return JobSnapshot(
        namespace=KEY.namespace,
        name=KEY.name,
        spec=stored["spec"],
        created_at=datetime.fromisoformat(stored["metadata"]["creationTimestamp"]),
        status=TrainingJobStatus.model_validate(world.status),
    )


@pytest.mark.parametrize("text", SHOWN.values(), ids=SHOWN)
async def test_hostile_text_is_shown_as_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = QuotingCluster()
    cluster.quotes = f"{text}\nCRITICAL: forged\x1b[2J"
    cluster.put_job(job(**hostile(text)))
    world = World(cluster)
    for _ in range(3):
        await world.turn()
    page = html_report(looked_at(world, cluster), world.now)
    assert "CRITICAL: forged" in world.status["message"]
    parsed = Elements()
    parsed.feed(page)
    assert not {"script", "img", "iframe"} & parsed.names
    assert not [name for name in parsed.attributes if name.startswith("on")]
    screen = Console(file=io.StringIO(), width=5000, force_terminal=False)
    screen.print(job_view(looked_at(world, cluster), world.now, []))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown

    cluster.quotes = ""
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"
    assert len(json.dumps(world.status)) < MOST_OF_STATUS
    for event in cluster.events:
        assert event["message"].isprintable()
    for line in caplog.messages:
        assert line.isprintable()
    metrics, _ = world.metrics.exposition()
    families = list(text_string_to_metric_families(metrics.decode()))
    labels = {name for family in families for sample in family.samples for name in sample.labels}
    assert "job_name" in labels
    assert "c" not in labels
    [history] = cluster.histories.values()
    assert {len(row.split(",")) for row in history["csv"].splitlines()} == {9}


async def test_a_refusal_of_megabytes_becomes_a_short_sentence() -> None:
    cluster = QuotingCluster()
    cluster.quotes = "x" * 2_000_000
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(3):
        await world.turn()
    assert len(json.dumps(world.status)) < MOST_OF_STATUS
    assert all(len(event["message"]) <= 1000 for event in cluster.events)
