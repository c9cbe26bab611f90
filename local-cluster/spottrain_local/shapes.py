"""Labels, taints and provider ids of nodes of EKS, GKE and AKS.

They are as the clouds' documentation describes them.

Sources: EKS managed node groups (capacityType label), GKE Spot VMs and GPU node pools (labels; GKE itself taints
GPU nodes), AKS spot node pools (label and taint).
"""

import uuid
from dataclasses import dataclass
from typing import Literal

Provider = Literal["eks", "gke", "aks"]
CapacityName = Literal["on-demand", "spot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """An instance type of a cloud; `cpu` and `memory` are Kubernetes quantities."""

    name: str
    gpus: int
    cpu: str
    memory: str


# By the number of GPUs: one and four are L4s, or T4s on AKS; eight are A100s.
INSTANCE_TYPES: dict[Provider, tuple[InstanceType, ...]] = {
    "eks": (
        InstanceType(name="m7i.2xlarge", gpus=0, cpu="8", memory="32Gi"),
        InstanceType(name="g6.2xlarge", gpus=1, cpu="8", memory="32Gi"),
        InstanceType(name="g6.12xlarge", gpus=4, cpu="48", memory="192Gi"),
        InstanceType(name="p4d.24xlarge", gpus=8, cpu="96", memory="1152Gi"),
    ),
    "gke": (
        InstanceType(name="n2-standard-8", gpus=0, cpu="8", memory="32Gi"),
        InstanceType(name="g2-standard-8", gpus=1, cpu="8", memory="32Gi"),
        InstanceType(name="g2-standard-48", gpus=4, cpu="48", memory="192Gi"),
        InstanceType(name="a2-highgpu-8g", gpus=8, cpu="96", memory="680Gi"),
    ),
    "aks": (
        InstanceType(name="Standard_D8s_v5", gpus=0, cpu="8", memory="32Gi"),
        InstanceType(name="Standard_NC8as_T4_v3", gpus=1, cpu="8", memory="56Gi"),
        InstanceType(name="Standard_NC64as_T4_v3", gpus=4, cpu="64", memory="440Gi"),
        InstanceType(name="Standard_ND96asr_v4", gpus=8, cpu="96", memory="900Gi"),
    ),
}
DEFAULT_ZONES: dict[str, str] = {"eks": "us-east-1a", "gke": "us-central1-a", "aks": "eastus-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """The labels and taints that a cloud gives a node."""

    labels: dict[str, str]
    taints: list[dict[str, str]]


def instance_type_with(provider: Provider, gpus: int) -> InstanceType:
    """Return the provider's smallest instance type with that many GPUs.

    If none has as many, return the largest one.
    """
    types = INSTANCE_TYPES[provider]
    return next((each for each in types if each.gpus >= gpus), types[-1])


def node_shape(
    *,
    name: str,
    pool: str,
    provider: Provider,
    capacity_type: CapacityName,
    instance_type: str,
    zone: str,
    gpus: int,
) -> NodeShape:
    """Return the labels and taints of a node in a pool of this provider."""
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "node.kubernetes.io/instance-type": instance_type,
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/region": region_of(provider, zone),
    }
    spot = capacity_type == "spot"
    match provider:
        case "eks":
            labels |= {
                "eks.amazonaws.com/nodegroup": pool,
                "eks.amazonaws.com/capacityType": "SPOT" if spot else "ON_DEMAND",
            }
            return NodeShape(labels=labels, taints=[])
        case "gke":
            return _gke(labels, pool, spot=spot, gpus=gpus)
        case "aks":
            return _aks(labels, pool, spot=spot, gpus=gpus)


def _gke(labels: dict[str, str], pool: str, *, spot: bool, gpus: int) -> NodeShape:
    taints = []
    labels |= {
        "cloud.google.com/gke-nodepool": pool,
        "cloud.google.com/gke-provisioning": "spot" if spot else "standard",
    }
    if spot:
        labels["cloud.google.com/gke-spot"] = "true"
        taints.append({"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"})
    if gpus:
        labels |= {
            "cloud.google.com/gke-accelerator": "nvidia-l4" if gpus <= 4 else "nvidia-tesla-a100",
            "cloud.google.com/gke-accelerator-count": str(gpus),
        }
        taints.append({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"})
    return NodeShape(labels=labels, taints=taints)


def _aks(labels: dict[str, str], pool: str, *, spot: bool, gpus: int) -> NodeShape:
    taints = []
    labels |= {"kubernetes.azure.com/agentpool": pool, "kubernetes.azure.com/mode": "user" if gpus else "system"}
    if gpus:
        labels["kubernetes.azure.com/accelerator"] = "nvidia"
    if spot:
        labels["kubernetes.azure.com/scalesetpriority"] = "spot"
        taints.append({"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"})
    return NodeShape(labels=labels, taints=taints)


def pool_selector(provider: Provider, pool: str) -> dict[str, str]:
    """Return the label with which a workload selects nodes of this pool."""
    keys = {
        "eks": "eks.amazonaws.com/nodegroup",
        "gke": "cloud.google.com/gke-nodepool",
        "aks": "kubernetes.azure.com/agentpool",
    }
    return {keys[provider]: pool}


def region_of(provider: Provider, zone: str) -> str:
    """Return the region of a zone.

    Examples: us-east-1a is in us-east-1, us-central1-a in us-central1, and eastus-1 in eastus.
    """
    return zone.rstrip("abcdefgh") if provider == "eks" else zone.rsplit("-", 1)[0]


def new_instance_id(provider: Provider) -> str:
    """Return a new instance id in the provider's form."""
    unique = uuid.uuid4()
    match provider:
        case "eks":
            return f"i-0{unique.hex[:16]}"
        case "gke":
            return str(unique.int % 10**19)
        case "aks":
            return str(unique)
