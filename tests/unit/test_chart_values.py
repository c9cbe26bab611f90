"""The chart's schema knows each value, and refuses wrong ones in helpful words."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml
from docs.reference_pages import chart, chart_schema

from rendered_objects import objects_in
from spottrain_api.v1alpha1.capacity import PoolType
from spottrain_local.install import find_helm
from spottrain_operator.command import main
from spottrain_operator.objects.placement import TEMPLATES, TERMS

CHART = chart.FILE.parent
SCHEMA: dict[str, Any] = json.loads(chart_schema.FILE.read_text())


def test_the_schema_is_that_of_the_values() -> None:
    completed = chart_schema.completed(json.loads(chart_schema.FILE.read_text()), chart.FILE.read_text())
    assert chart_schema.shown(completed) == chart_schema.FILE.read_text(), "run `make schema`"


def test_a_value_without_an_entry_is_named() -> None:
    values = chart.FILE.read_text() + "\nmine:\n  # What it is for.\n  size: 1\n"
    with pytest.raises(chart_schema.SchemaMismatchError, match=r"has no entry for mine\.size: write its type"):
        chart_schema.completed(json.loads(chart_schema.FILE.read_text()), values)


def test_an_entry_without_a_value_is_named() -> None:
    schema = json.loads(chart_schema.FILE.read_text())
    schema["properties"]["image"]["properties"]["platform"] = {"type": "string"}
    with pytest.raises(chart_schema.SchemaMismatchError, match=r"values.yaml has no image\.platform: add it"):
        chart_schema.completed(schema, chart.FILE.read_text())


def objects(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, each in (schema.get("properties", {}) | schema.get("$defs", {})).items():
        yield from objects(f"{path}.{name}", each)
    if "items" in schema:
        yield from objects(f"{path}[]", schema["items"])


def test_every_value_has_a_type_and_no_object_takes_unknown_keys() -> None:
    for path, each in objects("", SCHEMA):
        assert {"type", "enum", "$ref"} & each.keys(), path
        if "properties" in each:
            assert each["additionalProperties"] is False, path


def test_the_chart_and_the_operator_have_one_limit_for_the_time_between_records() -> None:
    entry = SCHEMA["properties"]["operator"]["properties"]["progressSeconds"]
    [option] = [each for each in main.params if each.name == "progress_seconds"]
    assert isinstance(option.type, click.FloatRange)
    assert (entry["minimum"], entry["maximum"]) == (option.type.min, option.type.max)


def test_the_operator_keeps_off_the_nodes_that_spot_pods_go_to() -> None:
    affinity = yaml.safe_load(chart.FILE.read_text())["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    known = (*TERMS.items(), *TEMPLATES.items())
    terms = [term for (_, kind), each in known if kind is PoolType.SPOT for term in each]
    avoided = [expression | {"operator": "NotIn"} for term in terms for expression in term]
    assert sorted(term["matchExpressions"], key=str) == sorted(avoided, key=str)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [find_helm(), "template", "spottrain", str(CHART), *arguments]
    if "--name-template" in arguments:
        command.remove("spottrain")
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("operator.prot=8080", "at '/operator': additional properties 'prot' not allowed"),
        ("watchr.enabled=false", "additional properties 'watchr' not allowed"),
        ("operator.port=70000", "at '/operator/port': maximum: got 70,000, want 65,535"),
        ("operator.healthPort=8443", "operator.port and operator.healthPort are both 8443. Choose another port"),
        ("operator.certificateIssuer.kind=Vault", "value must be one of 'Issuer', 'ClusterIssuer'"),
        ("operator.certificateIssuer.kind=ClusterIssuer", "properties 'name' required, if 'kind' exists"),
        ("operator.replicas=-1", "at '/operator/replicas': minimum: got -1, want 0"),
        ("operator.replicas=two", "at '/operator/replicas': got string, want integer"),
        (
            "operator.logLevel=VERBOSE",
            "at '/operator/logLevel': value must be one of 'DEBUG', 'INFO', 'WARNING',",
        ),
        ("operator.progressSeconds=300", "at '/operator/progressSeconds': maximum: got 300, want 120"),
        ("watcher.port=0", "at '/watcher/port': minimum: got 0, want 1"),
        ("spotLabels.cheap=true", "at '/spotLabels/cheap': got boolean, want string"),
        (r"spotLabels.cheap=a\,b", "at '/spotLabels/cheap': 'a,b' does not match pattern"),
        ("spotLabels.a=b=c", "at '/spotLabels/a': 'b=c' does not match pattern"),
        ("watchNamespaces.labels.-a=b", "invalid propertyName '-a'"),
        ("image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("image.tag=1", "at '/image/tag': got number, want string"),
        ("image.tag=team/a", 'image.tag: "team/a" is not a tag. Write what follows the colon, such as 0.1.0'),
        ("image.digest=0.1.0", 'image.digest: "0.1.0" is not a digest. Write what the registry printed'),
        ("image.repository=r/x:1", 'image.repository: "r/x:1" is not the name of an image. Write it in lower case'),
        ("image.repository=", 'image.repository: "" is not the name of an image.'),
        ("nodeSelector.pool=true", "at '/nodeSelector/pool': got boolean, want string"),
        ("policies.allowedTokenAudiences[0]=", "at '/policies/allowedTokenAudiences/0': minLength: got 0, want 1"),
        ("operator.env[0].value=x", "at '/operator/env/0': missing property 'name'"),
        ("tolerations[0].effects=NoSchedule", "at '/tolerations/0': additional properties 'effects' not allowed"),
        ("watcher.resources.request.cpu=1", "at '/watcher/resources': additional properties 'request' not allowed"),
        (
            "podMonitor.interval=15x",
            'podMonitor.interval: "15x" is not a duration. Write numbers with units',
        ),
    ],
)
def test_a_wrong_value_is_refused(value: str, sentence: str) -> None:
    done = helm("--set", value, "--set", "podMonitor.enabled=true")
    assert done.returncode != 0
    assert sentence in done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("assigned", [False, True])
def test_a_cluster_that_assigns_ids_finds_none_in_the_release(assigned: bool) -> None:
    done = helm("--set", f"namespacesAssignIds={str(assigned).lower()}")
    pods = [
        each["spec"]["template"]["spec"] for each in objects_in(done.stdout) if "template" in each.get("spec", {})
    ]
    ids = {"runAsUser", "runAsGroup", "fsGroup"}
    assert [ids & pod["securityContext"].keys() for pod in pods] == [set() if assigned else ids] * 2
    [operator] = [each for pod in pods for each in pod["containers"] if each["name"] == "operator"]
    environment = {each["name"]: each.get("value") for each in operator["env"]}
    assert environment["SPOTTRAIN_NAMESPACES_ASSIGN_IDS"] == str(assigned).lower()


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["a.b", "7b"])
def test_a_release_whose_name_its_service_cannot_have_is_refused(name: str) -> None:
    done = helm("--name-template", name)
    assert f'The release is named "{name}", with which the name of its Service can\'t start.' in done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize(
    "value",
    [
        "image.repository=localhost:5000/team/spottrain-operator",
        "image.repository=111122223333.dkr.ecr.us-east-1.amazonaws.com/spottrain",
        "image.repository=[fd00::1]:5000/team/spottrain-operator",
        "podMonitor.interval=1m30s",
        "watcher.resources.limits.memory=1Gi",
        "watcher.priorityClassName=null",
        "affinity=null",
        "policies.allowedCapabilities=null",
        "policies.allowedHostPaths=null",
        "policies.allowedTokenAudiences=null",
        "dashboard.labels.grafana_dashboard=null",
        "global.registry=x",
        "enabled=true",
    ],
)
def test_a_right_value_is_accepted(value: str) -> None:
    networks = "jobs.allowedNetworks={efa,tcpx}"
    done = helm("--set", value, "--set", f"podMonitor.enabled=true,dashboard.enabled=true,{networks}")
    assert done.returncode == 0, done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["null", "on"])
def test_names_that_yaml_reads_as_something_else_stay_names(name: str) -> None:
    monitoring = "podMonitor.enabled=true,alerts.enabled=true,dashboard.enabled=true"
    names = f"watchNamespaces.names={{{name}}}"
    done = helm("--namespace", "007", "--name-template", name, "--set", monitoring, "--set-string", names)
    assert done.returncode == 0, done.stderr
    for each in objects_in(done.stdout):
        metadata = each["metadata"]
        assert metadata.get("namespace", "007") in ("007", name), each["kind"]
        assert all(isinstance(text, str) for text in (metadata["name"], *metadata.get("labels", {}).values()))
        assert all(subject["namespace"] == "007" for subject in each.get("subjects", ()))


@pytest.mark.cluster
@pytest.mark.parametrize("preset", sorted(path.name for path in CHART.glob("values.*.yaml")))
def test_a_preset_renders_and_lets_critical_pods_in(preset: str) -> None:
    done = helm("--values", str(CHART / preset))
    assert done.returncode == 0, done.stderr
    objects = {each["kind"]: each for each in objects_in(done.stdout)}
    kinds = ("Deployment", "DaemonSet")
    wanted = [objects[kind]["spec"]["template"]["spec"].get("priorityClassName") for kind in kinds]
    [scope] = objects["ResourceQuota"]["spec"]["scopeSelector"]["matchExpressions"]
    assert scope["values"] == [name for name in wanted if name]
    assert wanted == ["system-cluster-critical", None if preset == "values.local.yaml" else "system-node-critical"]


def test_presets_hold_what_differs_alone() -> None:
    defaults = yaml.safe_load(chart.FILE.read_text())
    for preset in CHART.glob("values.*.yaml"):
        same = [path for path, value in leaves("", yaml.safe_load(preset.read_text())) if value == at(defaults, path)]
        # The local cluster's log level is said there, whatever the default.
        assert set(same) <= {".operator.logLevel"}, preset.name


def leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(f"{path}.{key.replace('.', '_')}", each)
    else:
        yield path, value


def at(values: Any, path: str) -> object:
    for key in path.split(".")[1:]:
        values = values.get(key) if isinstance(values, dict) else None
    return values
