"""Labels, annotations and taints that the project writes or reads."""

from __future__ import annotations

from spottrain_api.contract.names import (
    ANNOTATION_CONTROL_CA,
    ANNOTATION_CONTROL_URL,
    ANNOTATION_DO_NOT_DISRUPT,
    ANNOTATION_NOTICE,
    ANNOTATION_POOL,
    ANNOTATION_POOL_HASH,
    ANNOTATION_SAFE_TO_EVICT,
    ANNOTATION_WATCHED,
    ANNOTATION_WATCHER,
    LABEL_CAPACITY_TYPE,
    LABEL_CONTENT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_LEADER,
    LABEL_MANAGED_BY,
    LABEL_NAMESPACE,
    LABEL_PART,
    LABEL_QUEUE,
    LABEL_QUEUE_PRIORITY,
    LABEL_SEQUENCE,
    LABEL_TEMPLATE_HASH,
    MANAGED_BY,
    TAINT_PREEMPTION,
)
from spottrain_api.contract.nodes import LABEL_NOTICE_AHEAD, LABEL_SHUTDOWN_GRACE, NOTICE_LABELS, TAINTS
from spottrain_api.contract.notices import NoticeKind

from .markdown import code, entry

NAMES: tuple[tuple[str, str, str], ...] = (
    (LABEL_JOB, "label of pods", "Name of the job."),
    (
        LABEL_JOB_UID,
        "label of pods",
        "UID of the job: a job that was deleted and created again has another.",
    ),
    (LABEL_CAPACITY_TYPE, "label of pods", "`on-demand` or `spot`: which nodes the pod asks for."),
    (LABEL_SEQUENCE, "label of pods", "Number of the pod within its job. No number is used twice."),
    (LABEL_TEMPLATE_HASH, "label of pods", "Hash of the pod template: shows which pods an edit replaces."),
    (
        ANNOTATION_POOL,
        "annotation of pods",
        "Name of the pool (`capacity.pools`) whose nodes the pod asks for.",
    ),
    (
        ANNOTATION_POOL_HASH,
        "annotation of pods",
        "Hash of that pool's labels and tolerations: shows which waiting pods an edit replaces.",
    ),
    (LABEL_QUEUE, "label of jobs", "LocalQueue of Kueue that the job waits in. Set by users."),
    (LABEL_QUEUE_PRIORITY, "label of jobs", "WorkloadPriorityClass of the job in its queue. Set by users."),
    (
        LABEL_PART,
        "label of Workloads",
        "`minimum`: the Workload asks for the nodes of nodes.min. `more`: for one beyond.",
    ),
    (
        LABEL_CONTENT,
        "label of Workloads and NodePools",
        "Hash of what the job asks Kueue or Karpenter for. An edit that changes it asks anew.",
    ),
    (LABEL_NAMESPACE, "label of NodePools", "Namespace of the job for whose pool the operator has made it."),
    (LABEL_MANAGED_BY, "label of pods", f"Always `{MANAGED_BY}`."),
    (
        LABEL_LEADER,
        "label of the operator's pods",
        "`true` on the pod that leads. The Service of the control API selects it.",
    ),
    (
        ANNOTATION_DO_NOT_DISRUPT,
        "annotation of pods",
        "`true` on a member's pod: Karpenter doesn't consolidate its node. `10m` on a new pod: Karpenter 1.12 or "
        "newer doesn't for ten minutes. The operator removes it on a notice. "
        "`podTemplate.annotations` takes precedence.",
    ),
    (
        ANNOTATION_SAFE_TO_EVICT,
        "annotation of pods",
        "`false` on a member's pod: the cluster autoscaler doesn't scale its node down. The operator removes it on a "
        "notice. `podTemplate.annotations` takes precedence.",
    ),
    (
        ANNOTATION_CONTROL_URL,
        "annotation of pods",
        "Address of the control API, which the agent follows. Set by the operator.",
    ),
    (
        ANNOTATION_CONTROL_CA,
        "annotation of pods",
        "Authorities (PEM) that the agent trusts at that address. Set by the operator.",
    ),
    (
        "sidecar.istio.io/inject",
        "label of pods",
        "`false`, and `istio.io/dataplane-mode=none`, unless podTemplate has the key: Istio stays out of the pods.",
    ),
    (
        "linkerd.io/inject",
        "annotation of pods",
        "`disabled`, unless podTemplate has the key: Linkerd stays out of the pods.",
    ),
    (
        ANNOTATION_WATCHED,
        "annotation of the operator's lease",
        "The namespaces whose jobs the operator leads, as JSON. No other release leads jobs there.",
    ),
    (ANNOTATION_NOTICE, "annotation of nodes", "The notice as JSON. The watcher sets and removes it."),
    (
        ANNOTATION_WATCHER,
        "annotation of nodes",
        "By it, agents know the watcher of their node. The watcher sets it when it starts, and on a Node that is "
        "registered anew.",
    ),
    (
        LABEL_SHUTDOWN_GRACE,
        "label of nodes",
        "Seconds that the kubelet gives pods when the node shuts down. On GKE, the watcher sets it from the "
        "kubelet's configuration. Set it on a node pool elsewhere. Default: 15 on GKE's spot nodes, otherwise "
        "unknown.",
    ),
    (
        LABEL_NOTICE_AHEAD,
        "label of nodes",
        "Seconds by which Compute Engine announces a preemption before it shuts the node down, as its VM asks for in "
        "`preemptionNoticeDuration`. Set it on the node pool. Default: 0.",
    ),
    (TAINT_PREEMPTION, "taint of nodes", "Keeps new pods off a node that has a notice. Set by the watcher."),
)

_KINDS = {
    NoticeKind.PREEMPT: "The node goes; members on it drain.",
    NoticeKind.MAINTENANCE: "The node goes; members on it drain.",
    NoticeKind.REBALANCE: "The node may go; no member drains for it.",
    NoticeKind.EVICT: "A pod goes; it drains.",
}


def names() -> str:
    """An entry for each."""
    return "\n".join(entry(name, text, kind) for name, kind, text in NAMES)


def taints() -> str:
    """An entry for each taint or label of other programs that counts as a notice."""
    return "\n".join(
        entry(name, _KINDS[each.kind], f"notice {code(each.kind.value)}", f"{each.lead_seconds:g} s ahead")
        for name, each in ({**TAINTS, **NOTICE_LABELS}).items()
    )
