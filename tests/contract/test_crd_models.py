"""The CRD in crds/ is what the models say, and each rule of a model is in it."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError

from minimal_job import MINIMAL
from spottrain_api import crd
from spottrain_api.mistakes import mistakes
from spottrain_api.v1alpha1.checkpoint import Checkpoint
from spottrain_api.v1alpha1.containers import Resources
from spottrain_api.v1alpha1.spec import TrainingJobSpec


def _schemas(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [schema for item in node for schema in _schemas(item)]
    if not isinstance(node, dict):
        return []
    return [node, *(schema for value in node.values() for schema in _schemas(value))]


def test_the_files_and_those_of_the_chart_are_what_the_models_give() -> None:
    written = {f"{name}.yaml": crd.to_yaml(definition) for name, definition in crd.definitions().items()}
    for folder in (crd.CRDS, crd.CRDS.parent / "charts" / "spottrain" / "definitions"):
        assert {path.name: path.read_text() for path in folder.iterdir()} == written, "run `make crds`"


def test_every_rule_of_every_model_is_in_the_schema() -> None:
    schemas = _schemas(yaml.safe_load(crd.CRD_FILE.read_text()))
    written = {rule["rule"] for schema in schemas for rule in schema.get("x-kubernetes-validations", ())}
    wanted = {rule for model in crd.resources().values() for rule, _ in model.cel_rules}
    assert wanted
    assert wanted <= written


def test_the_schema_is_structural() -> None:
    root = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for schema in _schemas(root):
        assert not {"$ref", "anyOf", "$defs", "title"} & schema.keys() or "type" not in schema
        if schema.get("type") == "array":
            assert "items" in schema


def _fields(schema: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Every field below a schema, by its path.

    The items of a list count if they are objects.
    """
    found = {f"{path}.{name}": field for name, field in schema.get("properties", {}).items()}
    found |= {f"{path}[]": schema["items"]} if schema.get("items", {}).get("properties") else {}
    return found | {name: each for below in found for name, each in _fields(found[below], below).items()}


def _all_fields() -> dict[str, dict[str, Any]]:
    root = yaml.safe_load(crd.CRD_FILE.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = {part: root["properties"][part] for part in ("spec", "status")}
    found = parts | {name: field for part, schema in parts.items() for name, field in _fields(schema, part).items()}
    assert {"spec.checkpoint.uri", "spec.env[].name", "status.transitions[].at"} <= found.keys()
    return found


def test_bounds_that_a_crd_cannot_have_are_refused() -> None:
    class Slow(BaseModel):
        seconds: Annotated[float, Field(gt=0)]

    with pytest.raises(ValueError, match="write ge= or le="):
        crd.structural_schema(Slow)


def test_a_text_with_the_name_of_a_model_has_no_rules_of_it() -> None:
    class Place(BaseModel):
        pool: str

    assert crd.resources()["Pool"].cel_rules
    assert "x-kubernetes-validations" not in crd.structural_schema(Place)["properties"]["pool"]


def test_every_field_says_what_it_is() -> None:
    def says_nothing(text: str) -> bool:
        return len(text.split()) < 3 or not text.endswith(".")

    assert [path for path, field in _all_fields().items() if says_nothing(field.get("description", ""))] == []


# What the description of a field names whose own name ends so.
UNITS = {
    "Seconds": "second",
    "PerSecond": "per second",
    "PerHour": "per hour",
    "Bytes": "byte",
    "Steps": "step",
    "At": "time",
    "Time": "time",
    "Since": "time",
}


def test_a_field_that_is_measured_names_its_unit() -> None:
    fields = {
        (path, unit): field["description"].lower()
        for path, field in _all_fields().items()
        for ending, unit in UNITS.items()
        if path.endswith(ending)
    }
    assert {unit for _, unit in fields} >= {"second", "per hour", "step", "time"}
    assert [path for (path, unit), text in fields.items() if unit not in text] == []


def test_an_optional_field_of_the_spec_says_its_default_once() -> None:
    fields = _all_fields()
    optional = {
        f"{path}.{name}": field["description"]
        for path, schema in fields.items()
        for name, field in schema.get("properties", {}).items()
        if path.startswith("spec") and name not in schema.get("required", ())
    }
    assert [path for path, text in optional.items() if text.count("Default: ") > 1] == []
    scalars = {path: text for path, text in optional.items() if fields[path].get("type") != "object"}
    assert scalars["spec.runPolicy.hangTimeoutSeconds"].endswith(" Default: 600.")
    assert [path for path, text in scalars.items() if "Default: " not in text] == []


def test_the_default_that_a_model_gives_ends_the_description() -> None:
    given = {path: field for path, field in _all_fields().items() if "default" in field and field["default"] != {}}
    for path, field in given.items():
        default = field["default"] if isinstance(field["default"], str) else json.dumps(field["default"])
        assert not default or field["description"].endswith(f"Default: {default}."), path


def test_a_minimal_job_gets_every_default() -> None:
    spec = TrainingJobSpec.model_validate(MINIMAL)
    assert spec.nodes.min == 1
    assert spec.run_policy.failure_budget == 3
    assert spec.to_dict()["batch"] == {"global": 8, "micro": 1, "multipleOf": 1}


def resources_of(**limits: Any) -> Resources:
    spec = TrainingJobSpec.model_validate(MINIMAL | {"resources": {"limits": limits}})
    assert spec.resources is not None
    return spec.resources


def test_an_amount_is_a_number_or_text_as_in_a_pod() -> None:
    assert resources_of(cpu=8, memory="16Gi").limits == {"cpu": "8", "memory": "16Gi"}
    assert resources_of(cpu=8) == resources_of(cpu="8"), "quotes are no edit"
    template = MINIMAL | {"podTemplate": {"shmSize": 1_000_000_000}}
    assert TrainingJobSpec.model_validate(template).pod_template.shm_size == "1000000000"


@pytest.mark.parametrize(("amount", "shown"), [(0.5, "0.5"), (True, "true")])
def test_an_amount_that_is_neither_is_refused_with_a_sentence(amount: Any, shown: str) -> None:
    with pytest.raises(ValidationError) as error:
        resources_of(cpu=amount)
    assert mistakes(error.value) == (
        f"resources.limits.cpu: {shown} is neither a whole number nor text; write an amount such as 500m, 8 or 16Gi."
    )


@pytest.mark.parametrize(
    ("uri", "good"),
    [
        ("s3://bucket", True),
        ("gs://bucket/runs/a", True),
        ("az://container/runs/a", True),
        ("az:///runs", False),
        ("file:///folder", True),
        ("gs:///runs", False),
        ("ftp://host/x", False),
        ("file://", False),
        ("s3://bucket/run?lr=1", False),
        ("file:///folder/run#1", False),
    ],
)
def test_the_rules_for_checkpoint_uris(uri: str, good: bool) -> None:
    rules = [rule for rule, _ in Checkpoint.cel_rules if rule.startswith("self.uri.matches")]
    patterns = [rule.partition("'")[2].rpartition("'")[0] for rule in rules]
    assert all(re.search(pattern, uri) for pattern in patterns) is good


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"strategy": "magic"}, id="unknown-strategy"),
        pytest.param({"nodes": {"max": 0}}, id="no-nodes"),
        pytest.param({"batch": {"global": 0}}, id="no-batch"),
        pytest.param({"colour": "red"}, id="unknown-field"),
        pytest.param({"checkpoint": {"uri": "s3://b", "interval": "often"}}, id="interval"),
        pytest.param({"capacity": {"currency": "euro"}}, id="currency"),
    ],
)
def test_a_bad_job_is_refused_by_the_models_too(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingJobSpec.model_validate(MINIMAL | change)
