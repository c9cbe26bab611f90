"""Whether the cluster autoscaler, for a group without a node, expects that a job's pods fit its nodes.

It compares a pod with a node that it makes up. The labels below are what its code gives to one on AWS
(`buildNodeFromTemplate` in cluster-autoscaler/cloudprovider/aws/aws_manager.go, and `getManagedNodegroupInfo` in
aws_wrapper.go): those of each instance, what EKS's tags on the group say, what DescribeNodegroup says, and tags
`k8s.io/cluster-autoscaler/node-template/label/…`.
"""

from __future__ import annotations

from typing import Any

import pytest

from minimal_job import MINIMAL
from spottrain_api.contract.assignments import CapacityType
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.objects.placement import fits, node_affinity, of_nodes

OD, SPOT = CapacityType.ON_DEMAND, CapacityType.SPOT
INSTANCE = {
    "kubernetes.io/arch": "amd64",
    "kubernetes.io/os": "linux",
    "kubernetes.io/hostname": "spot-asg-1",
    "node.kubernetes.io/instance-type": "g6.2xlarge",
    "topology.kubernetes.io/region": "us-east-1",
    "topology.kubernetes.io/zone": "us-east-1a",
    "topology.ebs.csi.aws.com/zone": "us-east-1a",
}
EKS_TAGS = {"cluster-name": "spottrain", "nodegroup-name": "spot"}
DESCRIBED = {"amiType": "AL2023_x86_64_NVIDIA", "diskSize": "100", "k8sVersion": "1.36"}
MANAGED = INSTANCE | EKS_TAGS | DESCRIBED
POOL = {"name": "a", "capacityType": "spot", "provider": "eks"}


def group(kind: str, **labels: str) -> dict[str, str]:
    """The template of a managed node group, with its labels."""
    return MANAGED | {"capacityType": kind} | labels


def expected(labels: dict[str, str], capacity_type: CapacityType, *pools: dict[str, Any]) -> bool:
    spec = TrainingJobSpec.model_validate(MINIMAL | {"capacity": {"pools": list(pools)}})
    required = node_affinity(spec, capacity_type, None)["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
    return any(all(fits(each, labels) for each in term) for term in terms)


@pytest.mark.parametrize(
    ("labels", "takes"),
    [
        (group("SPOT"), {SPOT}),
        (group("ON_DEMAND"), {OD}),
        (INSTANCE | {"eks.amazonaws.com/capacityType": "SPOT"}, {SPOT}),
        (INSTANCE, set()),
    ],
    ids=["spot", "on-demand", "not described, with the tag", "not described, without tags"],
)
def test_a_group_without_a_node_is_known_by_how_its_nodes_are_bought(
    labels: dict[str, str], takes: set[CapacityType]
) -> None:
    assert {each for each in CapacityType if expected(labels, each)} == takes


@pytest.mark.parametrize(
    ("kind", "capacity_type", "described"),
    [("spot", SPOT, "SPOT"), ("on-demand", OD, "ON_DEMAND"), ("reserved", OD, "CAPACITY_BLOCK")],
)
def test_so_is_the_group_of_a_pool(kind: str, capacity_type: CapacityType, described: str) -> None:
    pool = POOL | {"capacityType": kind}
    for each in ("SPOT", "ON_DEMAND", "CAPACITY_BLOCK"):
        assert expected(group(each), capacity_type, pool) is (each == described)


def test_a_pools_own_label_is_one_of_the_group_or_a_tag() -> None:
    pool = POOL | {"nodeSelector": {"team.example/pool": "g6"}}
    assert expected(group("SPOT", **{"team.example/pool": "g6"}), SPOT, pool)
    assert not expected(group("SPOT"), SPOT, pool)
    custom = pool | {"provider": "custom"}
    assert expected(INSTANCE | {"team.example/pool": "g6"}, SPOT, custom)
    assert not expected(INSTANCE, SPOT, custom)


def test_kueue_sees_the_terms_of_nodes_alone() -> None:
    """To it, a term without a label of its flavors fits each of them: on-demand and spot quota would be one."""
    spec = TrainingJobSpec.model_validate(MINIMAL | {"capacity": {"pools": [POOL]}})
    found = of_nodes(node_affinity(spec, SPOT, None))["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = found["nodeSelectorTerms"]
    assert [each["key"] for each in term["matchExpressions"]] == ["eks.amazonaws.com/capacityType"]


@pytest.mark.parametrize("provider", ["karpenter", "gke", "aks", "oke", "together"])
def test_other_providers_pools_take_no_such_group(provider: str) -> None:
    assert not expected(group("SPOT"), SPOT, POOL | {"provider": provider})
