"""The CustomResourceDefinitions.

That of TrainingJobs is generated from the models in v1alpha1.
`python -m spottrain_api.crd` writes them to crds/. A contract test fails if a file and the models disagree.
Source of the rules for structural schemas:
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from spottrain_api.contract.message import Message
from spottrain_api.contract.names import API_VERSION, GROUP, KIND, PLURAL, VERSION
from spottrain_api.cost_record import COST_KIND, COST_PLURAL, CostRecord
from spottrain_api.history import HISTORY_FIELD, HISTORY_KIND, HISTORY_PLURAL, MAX_HISTORY_CHARACTERS
from spottrain_api.settings.resource import Resource
from spottrain_api.v1alpha1.profile import PROFILE_KIND, PROFILE_PLURAL, ProfileSpec
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import PRINTER_COLUMNS, TrainingJobStatus

NAME = f"{PLURAL}.{GROUP}"
HISTORY_NAME = f"{HISTORY_PLURAL}.{GROUP}"
CRDS = Path(__file__).parents[2] / "crds"
CRD_FILE = CRDS / f"{NAME}.yaml"
# A pod's name is its job's name and a number. It is also a label's value, which has 63 characters at most.
MAX_NAME = 50
# With a CRD, all its objects would go: `helm uninstall` leaves it.
KEPT = {"helm.sh/resource-policy": "keep"}
# Keys of JSON schema that a structural schema doesn't allow, or that repeat what it says already.
DROPPED_KEYS = frozenset({"title", "$defs", "additionalProperties", "default"})


def custom_resource_definition() -> dict[str, Any]:
    """The CRD of TrainingJobs as the API server accepts it."""
    version = {
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": path, "priority": priority}
            for name, type_, path, priority in PRINTER_COLUMNS
        ],
        "schema": {"openAPIV3Schema": _root_schema()},
    }
    return _definition(KIND, PLURAL, {"shortNames": ["tj"], "categories": ["all"]}, version)


def history_definition() -> dict[str, Any]:
    """The CRD of the histories of jobs, which the operator alone writes."""
    schema = {
        "type": "object",
        "description": "The course of the TrainingJob of the same name, for `spottrain report`. The operator writes "
        "it.",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            HISTORY_FIELD: {
                "type": "string",
                "maxLength": MAX_HISTORY_CHARACTERS,
                "description": "The points of the course as CSV, oldest first: Unix time, step, loss, tokens per "
                "second, generation, on-demand members, spot members, newest committed step, phase.",
            },
        },
    }
    return _definition(HISTORY_KIND, HISTORY_PLURAL, {"shortNames": ["tjh"]}, {"schema": {"openAPIV3Schema": schema}})


def profile_definition() -> dict[str, Any]:
    """The CRD of the profiles that administrators give to jobs."""
    schema = {
        "type": "object",
        "description": "What jobs that name this profile take from it: image, pools, prices and tolerations that "
        "they don't name themselves, and limits.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(ProfileSpec),
        },
    }
    version = {"schema": {"openAPIV3Schema": schema}}
    return _definition(PROFILE_KIND, PROFILE_PLURAL, {"shortNames": ["tp"]}, version, scope="Cluster")


def cost_definition() -> dict[str, Any]:
    """The CRD of the records of what jobs cost, which the operator alone writes."""
    record = structural_schema(CostRecord)
    schema = {
        "type": "object",
        "description": "What a TrainingJob cost, day by day, for `spottrain cost`. The operator writes it, and it "
        "stays when the job is deleted.",
        "required": record["required"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **record["properties"],
        },
    }
    return _definition(COST_KIND, COST_PLURAL, {"shortNames": ["tjc"]}, {"schema": {"openAPIV3Schema": schema}})


def definitions() -> dict[str, dict[str, Any]]:
    """All CRDs by their names."""
    found = (custom_resource_definition(), history_definition(), cost_definition(), profile_definition())
    return {each["metadata"]["name"]: each for each in found}


def _definition(
    kind: str, plural: str, more_names: dict[str, Any], version: dict[str, Any], *, scope: str = "Namespaced"
) -> dict[str, Any]:
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "annotations": KEPT},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": names | more_names,
            "versions": [{"name": VERSION, "served": True, "storage": True} | version],
        },
    }


def _root_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "A training run on a mix of on-demand and spot nodes: `spec` is what the user asks for, "
        "`status` is what the operator reports.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(TrainingJobSpec),
            "status": structural_schema(TrainingJobStatus),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {MAX_NAME}",
                "message": f"metadata.name is longer than {MAX_NAME} characters; pods are named after it: shorten it",
            }
        ],
    }


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI v3 structural schema of a model.

    It has no $ref and no anyOf, and its defaults are ones that the API server can apply. The caller may change it.
    """
    return copy.deepcopy(_structural_schema(model))


@cache
def _structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    return _inline(schema, schema.get("$defs", {}))


def _inline(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        definition = definitions[node["$ref"].rsplit("/", 1)[1]]
        own = {key: value for key, value in node.items() if key != "$ref"}
        return _inline({**definition, **own, **_with_values(definition, own)}, definitions)
    if "anyOf" in node:  # Optional: for the API server the field is absent, never null.
        (option,) = (option for option in node["anyOf"] if option.get("type") != "null")
        own = {key: value for key, value in node.items() if key != "anyOf"}
        return _inline({**option, **own}, definitions)
    if exclusive := {"exclusiveMinimum", "exclusiveMaximum"} & node.keys():
        raise ValueError(
            f"{node.get('title')}: {exclusive} of numbers are not for CRDs: write ge= or le= instead of gt= or lt="
        )
    # The API server drops empty properties. Without them, what it serves is what this module says.
    dropped = DROPPED_KEYS if node.get("properties") else DROPPED_KEYS | {"properties"}
    result = {key: value for key, value in node.items() if key not in dropped}
    # A text may have the name of a model, as `pool` has.
    rules = _cel_rules(node.get("title")) if "properties" in node else []
    if rules:
        result["x-kubernetes-validations"] = rules
    if "properties" in result:
        result["properties"] = {key: _inline(value, definitions) for key, value in node["properties"].items()}
    if "items" in node:
        result["items"] = _inline(node["items"], definitions)
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = _inline(node["additionalProperties"], definitions)
    return _described(_with_default(result, node), node.get("default"))


def _with_default(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The schema with its default, if there is one.

    The default of an object is {}: the API server applies the defaults inside it. An empty list is left out, as it
    means the same as none.
    """
    if node.get("default") not in (None, []):
        schema = {**schema, "default": {} if schema.get("type") == "object" else node["default"]}
    return schema


def _with_values(definition: dict[str, Any], own: dict[str, Any]) -> dict[str, str]:
    """The description of a field that holds an enum.

    It is the field's own, followed by the meaning of the values.
    """
    _, _, values = definition.get("description", "").partition("\n\n")
    if "enum" not in definition or "description" not in own or not values:
        return {}
    return {"description": f"{own['description']}\n\n{values}"}


def _described(schema: dict[str, Any], default: Any) -> dict[str, Any]:
    """The schema with its description as `kubectl explain` shows it.

    Wrapped lines are joined, except for the items of a list, and the default comes at the end.
    """
    if "description" not in schema:
        return schema
    text = re.sub(r"(?<!\n)\n(?!\n|- )\s*", " ", schema["description"])
    if schema.get("type") != "object" and default not in (None, "") and "Default: " not in text:
        value = default if isinstance(default, str) else json.dumps(default) if default != [] else "none"
        text += ("\n\n" if "\n" in text else " ") + f"Default: {value}."
    return {**schema, "description": text}


def resources(base: type[Resource] = Resource) -> dict[str, type[Resource]]:
    """The models of which a spec consists, by name."""
    found = {model.__name__: model for model in base.__subclasses__() if not issubclass(model, Message)}
    return {name: each for model in found.values() for name, each in resources(model).items()} | found


def _cel_rules(title: str | None) -> list[dict[str, str]]:
    model = resources().get(title or "")
    return [{"rule": rule, "message": message} for rule, message in model.cel_rules] if model is not None else []


def to_yaml(definition: dict[str, Any]) -> str:
    """The text of a CRD's file in crds/."""
    header = f"# Written by `make crds` from the models of {API_VERSION}; don't edit.\n"
    return header + yaml.safe_dump(definition, sort_keys=False, width=118, allow_unicode=True)


if __name__ == "__main__":
    for file_name, definition in definitions().items():
        (CRDS / f"{file_name}.yaml").write_text(to_yaml(definition))
