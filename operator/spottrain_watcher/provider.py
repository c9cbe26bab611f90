"""Which cloud a node belongs to, from its Node object."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Provider(StrEnum):
    """A cloud whose metadata service is read. OTHER has only the signals of Kubernetes."""

    EC2 = "ec2"
    OTHER = "other"


ENV_PROVIDER = "SPOTTRAIN_PROVIDER"
_NAMES = {"ec2": Provider.EC2, "eks": Provider.EC2, "aws": Provider.EC2}
_EC2_LABEL_DOMAINS = ("eks.amazonaws.com/", "karpenter.k8s.aws/", "alpha.eksctl.io/")


def provider_from_environment(environ: Mapping[str, str]) -> Provider | None:
    """The provider that SPOTTRAIN_PROVIDER names, or None if the variable is not set."""
    name = environ.get(ENV_PROVIDER, "").lower()
    return _NAMES.get(name, Provider.OTHER) if name else None


def detect_provider(node: dict[str, Any]) -> Provider:
    """Detect it from the cloud controller's providerID, or from the labels of EKS and of Karpenter on AWS."""
    if node.get("spec", {}).get("providerID", "").startswith("aws://"):
        return Provider.EC2
    labels = node["metadata"].get("labels") or {}
    is_ec2 = any(label.startswith(_EC2_LABEL_DOMAINS) for label in labels)
    return Provider.EC2 if is_ec2 else Provider.OTHER
