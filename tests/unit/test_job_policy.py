"""The chart's policy for users of jobs knows every field that names an object.

Whether it refuses them is checked on a real API server, in test_chart_user_policies.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from spottrain_api.crd import CRD_FILE
from spottrain_local.install import chart_folder

NAMES_AN_OBJECT = re.compile(r"(Ref|Name|Names|Secrets?|[Cc]laims?|Account|Class|ConfigMap|Driver)(\[\])?$")

# Fields that name an object, and how the policy reads them.
USED = {
    **{
        f"{container}env[].valueFrom.{kind}KeyRef": f"each.?{kind}KeyRef.?name"
        for container in ("", "podTemplate.initContainers[].", "podTemplate.sidecars[].")
        for kind in ("configMap", "secret")
    },
    "podTemplate.serviceAccountName": "template.?serviceAccountName",
    "podTemplate.priorityClassName": "template.?priorityClassName",
    "podTemplate.imagePullSecrets": "template.?imagePullSecrets",
    "podTemplate.volumes[].configMap": "each.?configMap.?name",
    "podTemplate.volumes[].secret": "each.?secret.?secretName",
    "podTemplate.volumes[].persistentVolumeClaim": "each.?persistentVolumeClaim.?claimName",
    "podTemplate.volumes[].ephemeral": "has(each.ephemeral)",
    "podTemplate.volumes[].csi": "each.?csi.?driver",
    "podTemplate.runtimeClassName": "template.?runtimeClassName",
    "podTemplate.resourceClaims": "template.?resourceClaims",
    "podTemplate.resourceClaims[].resourceClaimName": "each.?resourceClaimName",
    "podTemplate.resourceClaims[].resourceClaimTemplateName": "each.?resourceClaimTemplateName",
}
# Fields that look as if they did, and why they need no right.
FREE = {
    "capacity.pools[].nodeClass": "the administrator lets jobs name any, with karpenter.enabled",
    "podTemplate.schedulerName": "no object: a scheduler that has this name takes the pod",
    "podTemplate.volumes[].emptyDir": "a folder of the pod",
    "resources.claims": "entries of podTemplate.resourceClaims",
    "deepspeed.config": "settings of DeepSpeed, in the trainer",
}


def references(schema: dict[str, Any], path: str = "") -> set[str]:
    """Paths of the fields that may name an object.

    Their names say so, or anything may be in them.
    """
    free = schema.get("x-kubernetes-preserve-unknown-fields", False)
    found = {path} if free or NAMES_AN_OBJECT.search(path) else set()
    below = {f"{path}.{name}".lstrip("."): each for name, each in schema.get("properties", {}).items()}
    below |= {f"{path}[]": schema["items"]} if "items" in schema else {}
    return found.union(*(references(each, name) for name, each in below.items()))


def test_the_policy_knows_every_field_that_names_an_object() -> None:
    root = yaml.safe_load(CRD_FILE.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found = {path for path in references(root["properties"]["spec"]) if not path.endswith("[]")}
    known = USED.keys() | FREE.keys()
    assert found - known == set(), "ask for a right in the chart's job-policy.yaml, or say in FREE why none is needed"
    assert known - found == set(), "these fields are gone"


@pytest.mark.parametrize("field", ["dataSource", "dataSourceRef"])
def test_the_policy_reads_what_a_claim_for_each_pod_is_filled_from(field: str) -> None:
    policy = (chart_folder() / "templates" / "job-policy.yaml").read_text()
    assert f"each.?ephemeral.?volumeClaimTemplate.?spec.?{field})" in policy


@pytest.mark.parametrize("path", USED)
def test_the_policy_reads_the_field(path: str) -> None:
    policy = (chart_folder() / "templates" / "job-policy.yaml").read_text()
    assert USED[path] in policy
    if ".".join(path.split(".")[:2]) in ("podTemplate.initContainers[]", "podTemplate.sidecars[]"):
        assert f"template.?{path.split('.')[1].removesuffix('[]')}." in policy
