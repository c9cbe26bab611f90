"""The manifest of a trainer pod.

It is a pure function of the job, the place and the operator's address.

Pods pass the `restricted` Pod Security Standard, unless the job asks for a network that needs more and that the
administrator allows. They get no Kubernetes credentials, only a token that the operator alone accepts. They are never
restarted in place: a crashed agent is a failed pod, which the operator replaces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import (
    ANNOTATION_POOL,
    ANNOTATION_POOL_HASH,
    API_VERSION,
    KIND,
    LABEL_CAPACITY_TYPE,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_SEQUENCE,
    LABEL_TEMPLATE_HASH,
    MANAGED_BY,
    TOKEN_AUDIENCE,
)
from spottrain_api.v1alpha1.pod_template import PodTemplate
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.facts.pools import pool_hash
from spottrain_operator.core.model import STARTING
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.resources import PODS, Manifest
from spottrain_operator.objects.containers import beside, needs_tmp, trainer
from spottrain_operator.objects.control_address import CONTROL_FILES, ControlAddress
from spottrain_operator.objects.networks import preset_of
from spottrain_operator.objects.placement import DEFAULT_SITE, Site, affinity, spread, tolerations

# The kubelet renews a projected token after four fifths of its lifetime.
TOKEN_EXPIRATION_SECONDS = 3600
# Restricted pods may not run as root, and most images name no other user.
USER_ID = 1000
OWN_IDS = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
# A proxy in front of the ranks' connections costs throughput, and the agent's token would pass through it.
NO_MESH_LABELS = {"sidecar.istio.io/inject": "false", "istio.io/dataplane-mode": "none"}
NO_MESH_ANNOTATIONS = {"linkerd.io/inject": "disabled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """The job that a pod belongs to."""

    namespace: str
    name: str
    uid: str


# Fields of the spec that `build_pod` puts into the pod, without those for its placement.
_BUILT_IN = {"image", "env", "resources", "processes_per_node", "pod_template"}


def template_hash(spec: TrainingJobSpec) -> str:
    """Hash of what the spec says about pods.

    If it changes, running pods are outdated.

    Settings that ranks get with each generation don't count: a drain is enough to change them, and new pods would
    have to start. Defaults are left out, so that an operator with a new optional field doesn't replace the pods of
    all jobs.
    """
    content = spec.model_dump(mode="json", include=_BUILT_IN, exclude_defaults=True)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def build_pod(
    job: JobRef,
    spec: TrainingJobSpec,
    *,
    name: str,
    sequence: int,
    capacity_type: CapacityType,
    pool: str | None,
    control: ControlAddress,
    avoided: Sequence[str] = (),
    group: str = "",
    site: Site = DEFAULT_SITE,
) -> Manifest:
    """Build the manifest of the pod `name`, in the PodGroup `group` if any. It lands on none of the nodes `avoided`.

    Raises:
        ValueError: The job's pools have no place for this capacity type.
    """
    template = spec.pod_template
    own_labels = {
        LABEL_JOB: job.name,
        LABEL_JOB_UID: job.uid,
        LABEL_CAPACITY_TYPE: capacity_type.value,
        LABEL_SEQUENCE: str(sequence),
        LABEL_TEMPLATE_HASH: template_hash(spec),
        LABEL_MANAGED_BY: MANAGED_BY,
    }
    pod_spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": template.termination_grace_period_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            **({} if site.assigns_ids else OWN_IDS),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": affinity(spec, capacity_type, pool, job_uid=job.uid, avoided=avoided, site=site),
        "tolerations": tolerations(spec, capacity_type, pool, site),
        "containers": [
            trainer(
                spec,
                job=job.name,
                namespace=job.namespace,
                capacity_type=capacity_type,
                control=control,
                site=site,
            )
        ],
        "volumes": _volumes(spec),
    }
    optional = {
        "initContainers": beside(spec),
        "schedulerName": template.scheduler_name,
        "schedulingGroup": {"podGroupName": group} if group else {},
        "topologySpreadConstraints": spread(template, job_uid=job.uid),
        "resourceClaims": [claim.to_dict() for claim in template.resource_claims],
        "nodeSelector": template.node_selector,
        "serviceAccountName": template.service_account_name,
        "imagePullSecrets": list(template.image_pull_secrets),
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
    }
    pod_spec |= {key: value for key, value in optional.items() if value}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": _no_mesh(NO_MESH_LABELS, template) | template.labels | own_labels,
            "annotations": _annotations(template)
            | control.annotations
            | _pool_annotations(spec, capacity_type, pool),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": job.name,
                    "uid": job.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": pod_spec,
    }


def _annotations(template: PodTemplate) -> dict[str, str]:
    preset = preset_of(template.network)
    network = dict(preset.annotations) if preset is not None else {}
    return {**STARTING, **_no_mesh(NO_MESH_ANNOTATIONS, template), **template.annotations, **network}


def _pool_annotations(spec: TrainingJobSpec, capacity_type: CapacityType, pool: str | None) -> dict[str, str]:
    known = pool_hash(spec, capacity_type, pool)
    return {ANNOTATION_POOL: pool, ANNOTATION_POOL_HASH: known} if pool and known else {}


def _no_mesh(defaults: dict[str, str], template: PodTemplate) -> dict[str, str]:
    """Those `defaults` that keep a service mesh out of the pod.

    The template's own settings take precedence.
    """
    return {key: value for key, value in defaults.items() if key not in template.labels | template.annotations}


def _volumes(spec: TrainingJobSpec) -> list[Manifest]:
    preset = preset_of(spec.pod_template.network)
    token = {
        "serviceAccountToken": {
            "path": "token",
            "audience": TOKEN_AUDIENCE,
            "expirationSeconds": TOKEN_EXPIRATION_SECONDS,
        }
    }
    return [
        {"name": "spottrain-run", "emptyDir": {}},
        {"name": "spottrain-token", "projected": {"sources": [token, CONTROL_FILES]}},
        # Data loaders and NCCL need more shared memory than the 64 MB of container runtimes.
        {"name": "spottrain-shm", "emptyDir": _shared_memory(spec)},
        *([{"name": "spottrain-tmp", "emptyDir": {}}] if needs_tmp(spec.pod_template) else []),
        *(preset.volumes if preset is not None else ()),
        *(volume.to_dict() for volume in spec.pod_template.volumes),
    ]


def _shared_memory(spec: TrainingJobSpec) -> Manifest:
    limit = spec.resources.limits.get("memory") if spec.resources is not None else None
    size = spec.pod_template.shm_size or limit
    return {"medium": "Memory"} | ({"sizeLimit": size} if size else {})


async def annotate_pod(
    cluster: Cluster, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
) -> Manifest | None:
    """Set annotations of a pod, or remove them (None).

    Returns:
        The pod, or None if it is gone.
    """
    patch = {"metadata": {"annotations": dict(annotations)}}
    return await cluster.patch(PODS, name, patch, namespace=namespace, uid=uid)
