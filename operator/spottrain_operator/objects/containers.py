"""The containers of a trainer pod: the trainer's, and those beside it. None gets more rights than it needs.

Each asks for CPU and memory, so that no pod is the first to be evicted, and a ResourceQuota on requests accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping

from spottrain_api.contract.assignments import CapacityType
from spottrain_api.contract.names import (
    ENV_CAPACITY_TYPE,
    ENV_CONTROL_DIR,
    ENV_GPUS,
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
    TRAINER_CONTAINER,
)
from spottrain_api.v1alpha1.containers import RUN_DIR, SHM_DIR, TMP_DIR, TOKEN_DIR, Container
from spottrain_api.v1alpha1.pod_template import PodTemplate
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.kube.resources import Manifest
from spottrain_operator.objects.control_address import ControlAddress
from spottrain_operator.objects.networks import Preset, preset_of
from spottrain_operator.objects.placement import Site
from spottrain_runtime.logs import ENV_LOG_FORMAT

ENV_RUN_ROOT = "SPOTTRAIN_RUN_ROOT"
# So small that they fit onto the smallest nodes with as many GPUs: pods have their nodes to themselves, in general.
CPU_PER_PROCESS, GIB_PER_PROCESS = 1, 4
REQUESTS_BESIDE = {"cpu": "100m", "memory": "128Mi"}
RESTRICTED: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def trainer(
    spec: TrainingJobSpec,
    *,
    job: str,
    namespace: str,
    capacity_type: CapacityType,
    control: ControlAddress,
    site: Site,
) -> Manifest:
    """The container that the agent and the ranks run in."""
    preset = preset_of(spec.pod_template.network)
    resources = _resources(spec)
    gpus = resources.get("limits", {}).get(GPU)
    container: Manifest = {
        "name": TRAINER_CONTAINER,
        "image": spec.image,
        "command": ["python", "-m", "spottrain_agent"],
        "env": _environment(
            spec,
            preset.env if preset is not None else {},
            {
                ENV_JOB: job,
                ENV_NAMESPACE: namespace,
                ENV_CAPACITY_TYPE: capacity_type.value,
                ENV_WATCHER_PORT: str(site.watcher_port),
                ENV_LOG_FORMAT: site.log_format.value,
                **({ENV_GPUS: str(gpus)} if gpus is not None else {}),
            },
        ),
        "resources": resources,
        "securityContext": _rights(preset)
        | ({"readOnlyRootFilesystem": True} if spec.pod_template.read_only_root_filesystem else {}),
        "volumeMounts": [
            {"name": "spottrain-run", "mountPath": RUN_DIR},
            {"name": "spottrain-token", "mountPath": TOKEN_DIR, "readOnly": True},
            {"name": "spottrain-shm", "mountPath": SHM_DIR},
            *(preset.mounts if preset is not None else ()),
            *([{"name": "spottrain-tmp", "mountPath": TMP_DIR}] if needs_tmp(spec.pod_template) else []),
            *(mount.to_dict() for mount in spec.pod_template.volume_mounts),
        ],
        # The end of the agent's log becomes the pod's message: the sentence that says why it failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if spec.pod_template.image_pull_policy:
        container["imagePullPolicy"] = spec.pod_template.image_pull_policy
    return container


def beside(spec: TrainingJobSpec) -> list[Manifest]:
    """The init containers.

    Those that Kubernetes restarts are the sidecars, which start first.
    """
    template = spec.pod_template
    preset = preset_of(template.network)
    sidecars = [
        *(({"resources": {"requests": REQUESTS_BESIDE}} | each) for each in (preset.sidecars if preset else ())),
        *(_beside(each) for each in template.sidecars),
    ]
    return [
        *(each | {"restartPolicy": "Always"} for each in sidecars),
        *(_beside(each) for each in template.init_containers),
    ]


def _beside(container: Container) -> Manifest:
    written = container.to_dict()
    return {key: value for key, value in written.items() if value} | {
        "resources": _with_requests(container.resources.to_dict(), REQUESTS_BESIDE),
        "securityContext": RESTRICTED,
    }


def needs_tmp(template: PodTemplate) -> bool:
    """Whether the pod needs a volume for /tmp.

    It does if nothing can be written to the image's /tmp, and the job mounts no volume there.
    """
    return template.read_only_root_filesystem and TMP_DIR not in {
        mount.mount_path for mount in template.volume_mounts
    }


def _rights(preset: Preset | None) -> Manifest:
    if preset is None:
        return RESTRICTED
    capabilities = RESTRICTED["capabilities"] | ({"add": list(preset.capabilities)} if preset.capabilities else {})
    return RESTRICTED | {"runAsUser": 0, "runAsNonRoot": False, "capabilities": capabilities}


# What a job without resources asks for: one for each process.
GPU = "nvidia.com/gpu"


def _resources(spec: TrainingJobSpec) -> Manifest:
    gpus = {"limits": {GPU: str(spec.processes_per_node)}}
    return _with_requests(gpus if spec.resources is None else spec.resources.to_dict(), _default_requests(spec))


def _default_requests(spec: TrainingJobSpec) -> dict[str, str]:
    processes = spec.processes_per_node
    return {"cpu": str(CPU_PER_PROCESS * processes), "memory": f"{GIB_PER_PROCESS * processes}Gi"}


def unwritten_requests(spec: TrainingJobSpec) -> Mapping[str, str]:
    """The trainer's requests that the job doesn't write: the defaults."""
    written: Manifest = {} if spec.resources is None else spec.resources.to_dict()
    given = (written.get("limits") or {}).keys() | (written.get("requests") or {}).keys()
    return {name: amount for name, amount in _default_requests(spec).items() if name not in given}


def _with_requests(resources: Manifest, defaults: Mapping[str, str]) -> Manifest:
    """The resources with requests for CPU and memory.

    Kubernetes itself takes a limit as the request.
    """
    limits = resources.get("limits") or {}
    requests = {name: amount for name, amount in defaults.items() if name not in limits}
    requests |= resources.get("requests") or {}
    return {key: value for key, value in (resources | {"requests": requests}).items() if value}


def _environment(spec: TrainingJobSpec, network: Mapping[str, str], own: Mapping[str, str]) -> list[Manifest]:
    """Environment of the container.

    Ours comes last: Kubernetes takes the later one of two with the same name.
    """
    # A user id that the image doesn't know has no home and no name, and compiler caches look for both.
    defaults = {"HOME": RUN_DIR, "USER": "spottrain", **network}
    chosen = {variable.name for variable in spec.env}
    values = {
        **own,
        ENV_TOKEN_FILE: f"{TOKEN_DIR}/token",
        ENV_CONTROL_DIR: TOKEN_DIR,
        ENV_RUN_ROOT: RUN_DIR,
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
