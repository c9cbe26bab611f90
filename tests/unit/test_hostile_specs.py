"""What a hostile spec shows to others.

That is in status, events, log, metrics, history, the report and the terminal. What is refused at once is checked on a
real API server, in test_pod_templates_on_cluster.py.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from datetime import datetime
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from hostile_pod_templates import volume
from hostile_specs import MEGABYTE, SHOWN
from operator_world import KEY, CrashingCluster, World, job
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import LABEL_CAPACITY_TYPE
from spottrain_api.crd import CRD_FILE
from spottrain_api.tolerant import read_known
from spottrain_api.v1alpha1.free_form import too_large
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_cli.job_view import JobSnapshot
from spottrain_cli.live_view import job_view
from spottrain_cli.report import html_report
from spottrain_operator.kube.errors import InvalidObjectError
from spottrain_operator.kube.json_text import parsed
from spottrain_operator.kube.resources import PODS, Manifest
from spottrain_simulator.clock import EPOCH
from world.faults import Fault

# A status is read by every watcher of jobs.
MOST_OF_STATUS = 10_000


def quoting(text: str) -> Fault:
    """Refuses pods, and quotes what is in them, as Kubernetes does."""
    error = InvalidObjectError(f"spec.containers[0].image: Invalid value: {text}")
    return Fault(error=error, verbs=("create",), resource=PODS)


FREE = "x-kubernetes-preserve-unknown-fields"
# Free-form parts, which the operator bounds, and what holds a text of users there.
FREE_FORM: dict[str, Callable[[str], dict[str, Any]]] = {
    "spec.podTemplate.volumes[].emptyDir": lambda text: volume(emptyDir={"medium": text}),
    "spec.podTemplate.volumes[].configMap": lambda text: volume(configMap={"name": "a", "items": [{"path": text}]}),
    "spec.podTemplate.volumes[].secret": lambda text: volume(secret={"secretName": text}),
    "spec.podTemplate.volumes[].persistentVolumeClaim": lambda text: volume(persistentVolumeClaim={"a": text}),
    "spec.podTemplate.volumes[].ephemeral": lambda text: volume(ephemeral={text: {}}),
    "spec.podTemplate.volumes[].csi": lambda text: volume(csi={"driver": "d", "volumeAttributes": {"a": text}}),
    "spec.deepspeed.config": lambda text: {"deepspeed": {"config": {"comment": [text]}}},
}


def strings(schema: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Every string, list, map and free-form object below a schema, by its path."""
    open_ended = schema.get("type") in ("string", "array") or "additionalProperties" in schema or FREE in schema
    found = {path: schema} if open_ended else {}
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
    assert {path for path, schema in found.items() if not bounds & schema.keys()} == FREE_FORM.keys()
    assert max(schema.get("maxLength", 0) for schema in found.values()) <= 131_072, "more than a process takes"


@pytest.mark.parametrize("path", FREE_FORM)
async def test_a_free_form_part_that_is_too_large_starts_nothing(path: str) -> None:
    cluster = CrashingCluster()
    cluster.put_job(job(**FREE_FORM[path](MEGABYTE)))
    world = World(cluster)
    for _ in range(8):
        await world.turn()
    field = path.partition("[]")[0]
    sentence = f"{field}: above 64 KiB, or 50 levels, which the operator does not pass on to pods. Shorten it, or put"
    assert (world.status["phase"], cluster.created) == ("Pending", [])
    assert world.status["message"].startswith(sentence)
    assert world.num_crashes == 0
    assert cluster.num_status_writes < 4, "nothing is tried again and again"
    cluster.put_job(job(**FREE_FORM[path]("x" * 50_000)))
    await world.until_finished()
    assert world.status["phase"] == "Succeeded"


@pytest.mark.parametrize("levels", [49, 60, 300, 900, 9000])
def test_a_job_that_is_nested_deeply_hides_no_other(levels: int) -> None:
    """The API server takes ten thousand levels; parsers refuse the list."""
    deep = '{"a\\"}":[' * (levels // 2) + "1" + "]}" * (levels // 2)
    text = json.dumps({"items": [job(), job(deepspeed={"config": {"b": "@"}}), job()]}).replace('"@"', deep)
    first, hostile, last = parsed(text.encode())["items"]
    assert first == last == job()
    spec, _ = read_known(TrainingJobSpec, hostile["spec"])
    assert too_large(spec) == (() if levels < 50 else ("deepspeed.config",))
    with pytest.raises(ValueError, match="key must be a string"):
        parsed(b'{"items": {]')


@pytest.mark.parametrize("path", ["spec.podTemplate.volumes[].csi", "spec.deepspeed.config"])
async def test_an_edit_that_is_too_large_takes_nothing_from_a_job_that_trains(path: str) -> None:
    cluster = CrashingCluster()
    cluster.put_job(job())
    world = World(cluster, last_step=100)
    while world.status.get("phase") != "Running":
        await world.turn()
    cluster.put_job(job(**FREE_FORM[path](MEGABYTE)))
    for _ in range(10):
        await world.turn()
    assert (world.status["phase"], world.status["generation"]["state"]) == ("Running", "Active")
    assert (len(cluster.created), cluster.deleted) == (3, set())
    [reason] = {each["reason"] for each in world.status["conditions"] if each["type"] == "SpecNotUnderstood"}
    assert reason == "TooLarge"
    for uid in [pod["metadata"]["uid"] for pod in cluster.pods.values()]:
        told = await world.board.next(uid, after=None, timeout_seconds=0)
        assert told is not None
        assert len(told.to_json()) < MOST_OF_STATUS
    cluster.pods.clear()
    for _ in range(10):
        await world.turn()
    assert (world.status["phase"], len(cluster.created)) == ("Recovering", 3)
    assert "above 64 KiB" in world.status["message"]
    cluster.put_job(job())
    for _ in range(3):
        await world.turn()
    assert (world.status["generation"]["number"], len(cluster.created)) == (2, 6)


class WithoutSpot(World):
    """No spot pod finds a node."""

    def _run(self, pod: Manifest) -> None:
        if pod["metadata"]["labels"][LABEL_CAPACITY_TYPE] == CapacityType.ON_DEMAND.value:
            super()._run(pod)
        else:
            scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"] = {"conditions": [scheduled | {"lastTransitionTime": EPOCH.isoformat()}]}


FOR_EVER = 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        pytest.param({"runPolicy": {"activeDeadlineSeconds": FOR_EVER}}, "Succeeded", id="activeDeadlineSeconds"),
        pytest.param({"runPolicy": {"ttlSecondsAfterFinished": FOR_EVER}}, "Succeeded", id="ttlSecondsAfterFinished"),
        pytest.param({"runPolicy": {"hangTimeoutSeconds": FOR_EVER}}, "Succeeded", id="hangTimeoutSeconds"),
        pytest.param({"runPolicy": {"startTimeoutSeconds": FOR_EVER}}, "Succeeded", id="startTimeoutSeconds"),
        pytest.param({"fallback": {"afterSeconds": FOR_EVER}}, "Pending", id="fallback.afterSeconds"),
        pytest.param(
            {"fallback": {"afterSeconds": 0, "returnAfterSeconds": FOR_EVER}},
            "Succeeded",
            id="fallback.returnAfterSeconds",
        ),
    ],
)
async def test_a_duration_beyond_the_calendar_is_one_that_never_ends(fields: dict[str, Any], phase: str) -> None:
    fallback = fields.get("fallback", {"afterSeconds": 0})
    capacity = {"onDemand": {"min": 1}, "spot": {"max": 2}, "fallback": fallback}
    cluster = CrashingCluster()
    cluster.put_job(job(capacity=capacity, runPolicy=fields.get("runPolicy", {})))
    world = WithoutSpot(cluster, last_step=20)
    for _ in range(60):
        await world.turn()
        metrics, _ = world.metrics.exposition()
        assert b'job_name="gpt"' in metrics
    assert world.status["phase"] == phase


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


def looked_at(world: World, cluster: CrashingCluster) -> JobSnapshot:
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
    cluster = CrashingCluster()
    refusing = quoting(f"{text}\nCRITICAL: forged\x1b[2J")
    cluster.before.append(refusing)
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

    refusing.error = None
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
    cluster = CrashingCluster()
    cluster.before.append(quoting("x" * 2_000_000))
    cluster.put_job(job())
    world = World(cluster)
    for _ in range(3):
        await world.turn()
    assert len(json.dumps(world.status)) < MOST_OF_STATUS
    assert all(len(event["message"]) <= 1000 for event in cluster.events)
