"""The CRD in crds/ is what the models say, and each rule of a model is in it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from spottrain_api import crd, v1alpha1
from spottrain_api.v1alpha1 import TrainingJobSpec

MINIMAL: dict[str, Any] = {
    "image": "trainer",
    "entrypoint": {"script": "train.py"},
    "nodes": {"max": 4},
    "batch": {"global": 8},
    "checkpoint": {"uri": "s3://bucket/run"},
}


def _schemas(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [schema for item in node for schema in _schemas(item)]
    if not isinstance(node, dict):
        return []
    return [node, *(schema for value in node.values() for schema in _schemas(value))]


def test_the_file_is_what_the_models_give() -> None:
    assert crd.CRD_FILE.read_text() == crd.to_yaml(), "run `make crds`"


def test_the_chart_installs_the_same_crd() -> None:
    chart = crd.CRD_FILE.parents[1] / "charts" / "spottrain" / "crds" / crd.CRD_FILE.name
    assert chart.read_text() == crd.CRD_FILE.read_text(), "run `make crds`"


def test_every_rule_of_every_model_is_in_the_schema() -> None:
    schemas = _schemas(yaml.safe_load(crd.CRD_FILE.read_text()))
    written = {rule["rule"] for schema in schemas for rule in schema.get("x-kubernetes-validations", ())}
    models = [model for _, model in inspect.getmembers(v1alpha1, inspect.isclass) if hasattr(model, "cel_rules")]
    wanted = {rule for model in models for rule, _ in model.cel_rules}
    assert wanted
    assert wanted <= written


def test_the_schema_is_structural() -> None:
    root = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for schema in _schemas(root):
        assert not {"$ref", "anyOf", "$defs", "title"} & schema.keys() or "type" not in schema
        if schema.get("type") == "array":
            assert "items" in schema


def test_a_minimal_job_gets_every_default() -> None:
    spec = TrainingJobSpec.model_validate(MINIMAL)
    assert spec.nodes.min == 1
    assert spec.run_policy.failure_budget == 3
    assert spec.to_dict()["batch"] == {"global": 8, "micro": 1}


@pytest.mark.parametrize(
    ("uri", "good"),
    [
        ("s3://bucket", True),
        ("gs://bucket/runs/a", True),
        ("file:///folder", True),
        ("gs:///runs", False),
        ("ftp://host/x", False),
        ("file://", False),
    ],
)
def test_the_rule_for_checkpoint_uris(uri: str, good: bool) -> None:
    rule = next(rule for rule, _ in v1alpha1.Checkpoint.cel_rules if "matches" in rule)
    pattern = rule.partition("'")[2].rpartition("'")[0]
    assert (re.search(pattern, uri) is not None) is good


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"strategy": "magic"}, id="unknown-strategy"),
        pytest.param({"nodes": {"max": 0}}, id="no-nodes"),
        pytest.param({"batch": {"global": 0}}, id="no-batch"),
        pytest.param({"colour": "red"}, id="unknown-field"),
        pytest.param({"checkpoint": {"uri": "s3://b", "interval": "often"}}, id="interval"),
    ],
)
def test_a_bad_job_is_refused_by_the_models_too(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingJobSpec.model_validate(MINIMAL | change)
