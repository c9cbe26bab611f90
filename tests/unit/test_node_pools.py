"""The NodePools that a job's pools ask for."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from minimal_job import MINIMAL
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import JobView
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.node_pools import node_pool_view, node_pools

EC2 = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "gpu"}
SPOT: dict[str, Any] = {
    "name": "g5 spot",
    "capacityType": "spot",
    "provider": "karpenter",
    "nodeSelector": {"karpenter.k8s.aws/instance-family": "g5", "example.com/team": "gpt"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "weight": 50,
    "nodeClass": EC2,
}


def job(*pools: dict[str, Any], name: str = "gpt", uid: str = "u1", **spec: Any) -> JobView:
    asked = MINIMAL | {"capacity": {"pools": list(pools)}} | spec
    return JobView(
        namespace="team",
        name=name,
        uid=uid,
        spec=TrainingJobSpec.model_validate(asked),
        metadata_generation=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def only(*pools: dict[str, Any], **job_changes: Any) -> Manifest:
    [made] = node_pools(job(*pools, **job_changes)).values()
    return made


def test_a_pool_with_a_node_class_has_a_node_pool() -> None:
    made = only(SPOT, {"name": "theirs", "capacityType": "on-demand", "provider": "karpenter"})
    name, content = made["metadata"]["name"], made["metadata"]["labels"].pop("spottrain.dev/content")
    assert name.startswith("gpt-")
    assert content
    assert made == {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/managed-by": "spottrain",
                "spottrain.dev/namespace": "team",
                "spottrain.dev/job": "gpt",
                "spottrain.dev/job-uid": "u1",
            },
        },
        "spec": {
            "weight": 50,
            "limits": {"nodes": "4"},
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "5m"},
            "template": {
                "spec": {
                    "nodeClassRef": EC2,
                    "requirements": [
                        {"key": "example.com/team", "operator": "In", "values": ["gpt"]},
                        {"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["g5"]},
                        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]},
                    ],
                    "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
                    "expireAfter": "Never",
                }
            },
        },
    }


@pytest.mark.parametrize(
    ("tolerations", "taints"),
    [
        ([], None),
        ([{"operator": "Exists"}], None),
        (
            [{"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 60}, {"key": "a", "value": "b"}],
            [
                {"key": "a", "effect": "NoExecute", "value": "b"},
                {"key": "a", "effect": "NoSchedule", "value": "b"},
            ],
        ),
        (
            [{"key": "a"}, {"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
            [{"key": "a", "effect": "NoSchedule"}],
        ),
    ],
    ids=["none", "any key", "with value", "twice"],
)
def test_its_nodes_have_the_taints_that_the_pods_tolerate(tolerations: list[Any], taints: list[Any] | None) -> None:
    made = only(SPOT | {"tolerations": tolerations})
    assert made["spec"]["template"]["spec"].get("taints") == taints


@pytest.mark.parametrize("kind", ["on-demand", "reserved"])
def test_its_nodes_are_bought_as_the_pools(kind: str) -> None:
    made = only({"name": "a", "capacityType": kind, "provider": "karpenter", "nodeClass": EC2})
    [requirement] = made["spec"]["template"]["spec"]["requirements"]
    assert requirement == {"key": "karpenter.sh/capacity-type", "operator": "In", "values": [kind]}


def test_a_pool_without_weight_gets_no_more_nodes_and_keeps_those_that_it_has() -> None:
    other = SPOT | {"name": "other"}
    made = node_pools(job(SPOT | {"weight": 0}, other)).values()
    first, second = (each["spec"] for each in made)
    assert (first["limits"], "weight" in first) == ({"nodes": "0"}, False)
    assert (second["limits"], second["weight"]) == ({"nodes": "4"}, 50)


def test_replacements_before_the_notice_count_among_its_nodes() -> None:
    made = only(spec_pools := SPOT, capacity={"pools": [spec_pools], "spot": {"maxPrewarmed": 2}})
    assert made["spec"]["limits"] == {"nodes": "6"}


def name_of(*pools: dict[str, Any], **changes: Any) -> str:
    name: str = only(*pools, **changes)["metadata"]["name"]
    return name


def test_its_name_is_a_labels_value_and_stays_unless_it_has_to_be_another_object() -> None:
    name = name_of(SPOT)
    assert name_of(SPOT | {"weight": 1, "nodeSelector": {}}) == name
    assert name_of(SPOT | {"nodeClass": EC2 | {"name": "other"}}) == name
    for other in (
        name_of(SPOT | {"name": "other"}),
        name_of(SPOT | {"nodeClass": EC2 | {"kind": "NodeClass"}}),
        name_of(SPOT, uid="u2"),
    ):
        assert other != name
    long = name_of(SPOT, name=f"{'a' * 39}.{'b' * 20}")
    assert (len(long), long[:41]) == (50, f"{'a' * 39}-{long[40]}")


def test_a_change_of_what_it_is_to_be_changes_its_content() -> None:
    def content(view: JobView) -> set[str]:
        return {each["metadata"]["labels"]["spottrain.dev/content"] for each in node_pools(view).values()}

    before = content(job(SPOT))
    assert content(job(SPOT)) == before
    assert content(job(SPOT, nodes={"max": 8})) != before
    assert content(replace(job(SPOT), metadata_generation=2)) == before


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (None, ""),
        ([{"type": "Ready", "status": "True", "reason": "Ready", "message": ""}], ""),
        ([{"type": "Ready", "status": "Unknown", "reason": "Awaiting", "message": "m"}], ""),
        ([{"type": "Other", "status": "False", "reason": "R", "message": "m"}], ""),
        ([{"type": "Ready", "status": "False", "reason": "Unready", "message": "no node class"}], "no node class"),
        ([{"type": "Ready", "status": "False", "reason": "Unready"}], "Unready"),
    ],
)
def test_what_karpenter_says_of_it(conditions: list[Any] | None, expected: str) -> None:
    labels = {"spottrain.dev/content": "c"}
    found = {"metadata": {"name": "n", "uid": "u", "labels": labels}, "status": {"conditions": conditions}}
    assert node_pool_view(found).not_ready == expected
