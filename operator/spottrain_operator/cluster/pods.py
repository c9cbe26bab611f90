"""The manifest of a trainer pod: a pure function of the job, the place and the operator's address.

Pods pass the `restricted` Pod Security Standard. They get no Kubernetes credentials, only a token that the operator
alone accepts. They are never restarted in place: a crashed agent is a failed pod, which the operator replaces.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from spottrain_api.contract import (
    API_VERSION,
    ENV_CAPACITY_TYPE,
    ENV_CONTROL_URL,
    ENV_GRACE_SECONDS,
    ENV_HOST_IP,
    ENV_JOB,
    ENV_NAMESPACE,
    ENV_NODE_NAME,
    ENV_POD_IP,
    ENV_POD_NAME,
    ENV_POD_UID,
    ENV_TOKEN_FILE,
    ENV_WATCHER_PORT,
    GROUP,
    KIND,
    LABEL_CAPACITY_TYPE,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_MANAGED_BY,
    LABEL_SEQUENCE,
    LABEL_TEMPLATE_HASH,
    MANAGED_BY,
    TOKEN_AUDIENCE,
    TRAINER_CONTAINER,
    CapacityType,
)
from spottrain_api.v1alpha1 import TrainingJobSpec
from spottrain_operator.cluster.client import Manifest
from spottrain_operator.cluster.placement import DEFAULT_SITE, Site, node_affinity, tolerations

ANNOTATION_POOL = f"{GROUP}/pool"
RUN_ROOT = "/run/spottrain"
ENV_RUN_ROOT = "SPOTTRAIN_RUN_ROOT"
TOKEN_DIR = "/var/run/secrets/spottrain"
# The kubelet renews a projected token after four fifths of its lifetime.
TOKEN_EXPIRATION_SECONDS = 3600
# Restricted pods may not run as root, and most images name no other user.
USER_ID = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """The job that a pod belongs to."""

    namespace: str
    name: str
    uid: str


# Fields of the spec that `build_pod` puts into the pod, without those for its placement.
_BUILT_IN = {"image", "env", "resources", "processes_per_node", "pod_template"}


def template_hash(spec: TrainingJobSpec) -> str:
    """Hash of what the spec says about pods. If it changes, running pods are outdated.

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
    control_url: str,
    site: Site = DEFAULT_SITE,
) -> Manifest:
    """Build the manifest of the pod `name`.

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
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {
            "nodeAffinity": node_affinity(spec, capacity_type, pool, site),
            "podAntiAffinity": _one_pod_a_node(job),
        },
        "tolerations": tolerations(spec, capacity_type, pool, site),
        "containers": [_container(job, spec, capacity_type, control_url, site)],
        "volumes": _volumes(spec),
    }
    optional = {
        "nodeSelector": template.node_selector,
        "serviceAccountName": template.service_account_name,
        "imagePullSecrets": list(template.image_pull_secrets),
        "priorityClassName": template.priority_class_name,
    }
    pod_spec |= {key: value for key, value in optional.items() if value}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": template.labels | own_labels,
            "annotations": template.annotations | ({ANNOTATION_POOL: pool} if pool else {}),
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


def _one_pod_a_node(job: JobRef) -> Manifest:
    term = {
        "labelSelector": {"matchLabels": {LABEL_JOB_UID: job.uid}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _container(
    job: JobRef, spec: TrainingJobSpec, capacity_type: CapacityType, control_url: str, site: Site
) -> Manifest:
    container: Manifest = {
        "name": TRAINER_CONTAINER,
        "image": spec.image,
        "command": ["python", "-m", "spottrain_agent"],
        "env": _environment(job, spec, capacity_type, control_url, site),
        "resources": _resources(spec),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "spottrain-run", "mountPath": RUN_ROOT},
            {"name": "spottrain-token", "mountPath": TOKEN_DIR, "readOnly": True},
            {"name": "spottrain-shm", "mountPath": "/dev/shm"},
            *(mount.to_dict() for mount in spec.pod_template.volume_mounts),
        ],
        # The end of the agent's log becomes the pod's message: the sentence that says why it failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if spec.pod_template.image_pull_policy:
        container["imagePullPolicy"] = spec.pod_template.image_pull_policy
    return container


def _resources(spec: TrainingJobSpec) -> Manifest:
    if spec.resources is None:
        return {"limits": {"nvidia.com/gpu": str(spec.processes_per_node)}}
    return spec.resources.to_dict()


def _environment(
    job: JobRef, spec: TrainingJobSpec, capacity_type: CapacityType, control_url: str, site: Site
) -> list[Manifest]:
    """Environment of the container. Ours comes last: Kubernetes takes the later one of two with the same name."""
    # A user id that the image doesn't know has no home and no name, and compiler caches look for both.
    defaults = {"HOME": RUN_ROOT, "USER": "spottrain"}
    chosen = {variable.name for variable in spec.env}
    values = {
        ENV_CONTROL_URL: control_url,
        ENV_TOKEN_FILE: f"{TOKEN_DIR}/token",
        ENV_RUN_ROOT: RUN_ROOT,
        ENV_JOB: job.name,
        ENV_NAMESPACE: job.namespace,
        ENV_CAPACITY_TYPE: capacity_type.value,
        ENV_WATCHER_PORT: str(site.watcher_port),
        ENV_GRACE_SECONDS: str(spec.pod_template.termination_grace_period_seconds),
    }
    fields = {
        ENV_POD_NAME: "metadata.name",
        ENV_POD_UID: "metadata.uid",
        ENV_POD_IP: "status.podIP",
        ENV_NODE_NAME: "spec.nodeName",
        ENV_HOST_IP: "status.hostIP",
    }
    return [
        *({"name": name, "value": value} for name, value in defaults.items() if name not in chosen),
        *(variable.to_dict() for variable in spec.env),
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def _volumes(spec: TrainingJobSpec) -> list[Any]:
    token = {
        "serviceAccountToken": {
            "path": "token",
            "audience": TOKEN_AUDIENCE,
            "expirationSeconds": TOKEN_EXPIRATION_SECONDS,
        }
    }
    return [
        {"name": "spottrain-run", "emptyDir": {}},
        {"name": "spottrain-token", "projected": {"sources": [token]}},
        # Data loaders and NCCL need more shared memory than the 64 MB of container runtimes.
        {"name": "spottrain-shm", "emptyDir": {"medium": "Memory"}},
        *(volume.to_dict() for volume in spec.pod_template.volumes),
    ]
