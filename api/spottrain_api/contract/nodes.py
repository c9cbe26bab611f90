"""How a node's taints and labels announce when, and how, it is taken away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spottrain_api.contract.notices import NoticeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkMeaning:
    """What a taint or label of a node announces, and how long after it the node is gone.

    Attributes:
        is_shutdown: Whether the node shuts down. Then what `shutdown_grace_seconds` knows of it counts instead.
    """

    kind: NoticeKind
    lead_seconds: float
    is_shutdown: bool = False

    def lead_on(self, labels: Mapping[str, str]) -> float:
        """Seconds from the mark until a node with these labels is gone."""
        grace = shutdown_grace_seconds(labels) if self.is_shutdown else None
        return self.lead_seconds if grace is None else grace


# Taints with which termination handlers and autoscalers announce that a node will, or may, be taken away.
TAINTS: Mapping[str, MarkMeaning] = {
    # https://github.com/aws/aws-node-termination-handler (taint-node)
    "aws-node-termination-handler/spot-itn": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=120),
    "aws-node-termination-handler/rebalance-recommendation": MarkMeaning(kind=NoticeKind.REBALANCE, lead_seconds=600),
    "aws-node-termination-handler/asg-lifecycle-termination": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=120),
    "aws-node-termination-handler/scheduled-maintenance": MarkMeaning(kind=NoticeKind.MAINTENANCE, lead_seconds=120),
    # https://karpenter.sh/docs/concepts/disruption/
    "karpenter.sh/disrupted": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=120),
    "karpenter.sh/disruption": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=120),  # before 1.0
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
    "cloud.google.com/impending-node-termination": MarkMeaning(
        kind=NoticeKind.PREEMPT, lead_seconds=15, is_shutdown=True
    ),
    # https://learn.microsoft.com/azure/aks/node-auto-drain
    "remediator.kubernetes.azure.com/unschedulable": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=30),
    # https://kubernetes.io/docs/reference/labels-annotations-taints/
    "node.kubernetes.io/out-of-service": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=0),
    "node.cloudprovider.kubernetes.io/shutdown": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=0),
    # https://github.com/kubernetes/autoscaler (cluster-autoscaler/utils/taints)
    "ToBeDeletedByClusterAutoscaler": MarkMeaning(kind=NoticeKind.MAINTENANCE, lead_seconds=60),
    "DeletionCandidateOfClusterAutoscaler": MarkMeaning(kind=NoticeKind.REBALANCE, lead_seconds=600),
}
# Labels with the value "true" by which clouds announce the same.
NOTICE_LABELS: Mapping[str, MarkMeaning] = {
    # https://docs.coreweave.com/platform/capacity-plans/spot-node-pools: cordoned, labelled, and drained when the
    # warning window ends. The page has only the longest window, seven minutes.
    "qos.coreweave.cloud/pending-preemption": MarkMeaning(kind=NoticeKind.PREEMPT, lead_seconds=120),
}
# A Node that is being deleted stays while finalizers hold it. Karpenter's holds it until its pods have left, as after
# Karpenter's taint.
NODE_DELETION_LEAD_SECONDS = TAINTS["karpenter.sh/disrupted"].lead_seconds
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def accepted_taints(node: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The taints of a Node, without entries that aren't taints.

    Nothing reads their values, which may be anything.
    """
    taints = node.get("spec", {}).get("taints") or ()
    return tuple(
        taint
        for taint in taints
        if isinstance(taint, Mapping)
        and isinstance(taint.get("key"), str)
        and taint.get("effect", "NoSchedule") in _EFFECTS
    )


def announcing_labels(labels: Mapping[str, str]) -> dict[str, MarkMeaning]:
    """Those of a node's labels that announce something, and what."""
    return {key: meaning for key, meaning in NOTICE_LABELS.items() if labels.get(key) == "true"}


EKS_CAPACITY_TYPE = "eks.amazonaws.com/capacityType"
# What the cluster autoscaler says in its place of a managed node group that has no node yet. No node has it.
# https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/cloudprovider/aws/aws_wrapper.go
EKS_TEMPLATE_CAPACITY_TYPE = "capacityType"
KARPENTER_CAPACITY_TYPE = "karpenter.sh/capacity-type"
KARPENTER_NODE_POOL = "karpenter.sh/nodepool"
GKE_SPOT = "cloud.google.com/gke-spot"
GKE_PREEMPTIBLE = "cloud.google.com/gke-preemptible"
# Label and taint of the nodes of a ComputeClass.
# https://cloud.google.com/kubernetes-engine/docs/concepts/about-custom-compute-classes
GKE_COMPUTE_CLASS = "cloud.google.com/compute-class"
AKS_PRIORITY = "kubernetes.azure.com/scalesetpriority"
OKE_PREEMPTIBLE = "oci.oraclecloud.com/oke-is-preemptible"
TOGETHER_COMPUTE_CLASS = "together.ai/compute-class"

# The labels, with their values, that clouds and autoscalers put on nodes that may be taken back. The chart's value
# spotLabels adds others: CoreWeave, for example, gives nodes of a spot pool only the labels that the pool names.
SPOT_LABELS: Mapping[str, str] = {
    EKS_CAPACITY_TYPE: "SPOT",  # https://docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html
    KARPENTER_CAPACITY_TYPE: "spot",  # https://karpenter.sh/docs/concepts/scheduling/
    GKE_SPOT: "true",  # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
    GKE_PREEMPTIBLE: "true",  # their predecessors: https://cloud.google.com/kubernetes-engine/docs/how-to/preemptible-vms
    AKS_PRIORITY: "spot",  # https://learn.microsoft.com/azure/aks/spot-node-pool
    OKE_PREEMPTIBLE: "true",  # https://docs.oracle.com/iaas/Content/ContEng/Tasks/contengusingpreemptiblecapacity.htm
    TOGETHER_COMPUTE_CLASS: "preemptible",  # https://docs.together.ai/docs/preemptible-compute
}
# Nodes that the cloud takes back after so many seconds at the latest, by the label with the value "true" of each.
# https://cloud.google.com/compute/docs/instances/preemptible
LONGEST_LIFE_SECONDS: Mapping[str, float] = {GKE_PREEMPTIBLE: 86_400.0}
# So long before, the end of a node's life is announced: a replacement needs minutes, and a kubelet that has nothing
# new to say writes its Node, which wakes the watcher, every five.
END_OF_LIFE_LEAD_SECONDS = 1200.0
# Seconds that the kubelet gives pods when the node shuts down. Set by whoever sets up a pool of nodes, or by the
# watcher of a node whose metadata has the kubelet's configuration.
LABEL_SHUTDOWN_GRACE = "spottrain.dev/shutdown-grace-seconds"
# Set by whoever sets up a pool of nodes: seconds by which the cloud's notice comes before that shutdown.
LABEL_NOTICE_AHEAD = "spottrain.dev/notice-ahead-seconds"
# Of a pod that names none, by Kubernetes.
DEFAULT_GRACE_SECONDS = 30.0
# A day. Longer ones are mistakes, and the longest can't be added to a time.
LONGEST_GRACE_SECONDS = 86_400.0

# Seconds that nodes with these labels give pods by default, whatever grace period the pods ask for.
# GKE: 15 for pods, then 15 for critical ones. A pool may ask for more, up to 120, from 1.35 on.
# https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
_PROVIDERS_SHUTDOWN_GRACE = {GKE_SPOT: 15.0, GKE_PREEMPTIBLE: 15.0}
# Reason of a pod's DisruptionTarget condition when its node shuts down.
_BY_SHUTDOWN = "TerminationByKubelet"


def shutdown_grace_seconds(labels: Mapping[str, str]) -> float | None:
    """Seconds that the shutdown of the node leaves its pods; None if nothing limits a pod's own grace period.

    A label that can't be is ignored.
    """
    stated = _seconds(labels, LABEL_SHUTDOWN_GRACE)
    if stated is not None:
        return stated
    known = (grace for label, grace in _PROVIDERS_SHUTDOWN_GRACE.items() if labels.get(label) == "true")
    return min(known, default=None)


def notice_ahead_seconds(labels: Mapping[str, str]) -> float:
    """Seconds from the cloud's notice of a preemption until the node shuts down. A label that can't be is ignored."""
    return _seconds(labels, LABEL_NOTICE_AHEAD) or 0.0


def _seconds(labels: Mapping[str, str], label: str) -> float | None:
    stated = labels.get(label, "")
    return float(stated) if stated.isdecimal() and float(stated) <= LONGEST_GRACE_SECONDS else None


def eviction_grace_seconds(grace_seconds: float, reason: str | None, labels: Mapping[str, str]) -> float:
    """Seconds from a pod's DisruptionTarget condition until the pod is killed.

    Whoever evicts the pod may leave it less: its deletionTimestamp, which comes after the condition, says so.

    Args:
        grace_seconds: The pod's terminationGracePeriodSeconds.
        reason: The condition's reason.
        labels: The labels of the pod's node.
    """
    asked = min(max(grace_seconds, 0.0), LONGEST_GRACE_SECONDS)
    left = shutdown_grace_seconds(labels) if reason == _BY_SHUTDOWN else None
    return asked if left is None else min(asked, left)
