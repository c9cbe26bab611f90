"""Which cloud a node belongs to, from its Node object."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Provider(StrEnum):
    """A cloud whose metadata server is read.

    OTHER has only the signals of Kubernetes.
    """

    EC2 = "ec2"
    GCE = "gce"
    AZURE = "azure"
    OTHER = "other"


class UnknownProvider(Exception):
    """SPOTTRAIN_PROVIDER names no provider that is known."""


ENV_PROVIDER = "SPOTTRAIN_PROVIDER"
_NAMES = {
    "ec2": Provider.EC2,
    "eks": Provider.EC2,
    "aws": Provider.EC2,
    "gce": Provider.GCE,
    "gke": Provider.GCE,
    "azure": Provider.AZURE,
    "aks": Provider.AZURE,
    "other": Provider.OTHER,
}
# Start of the providerID that each cloud's controller gives, and domains of labels that only its nodes have.
_PROVIDER_IDS = {"aws://": Provider.EC2, "gce://": Provider.GCE, "azure://": Provider.AZURE}
_LABEL_DOMAINS = {
    "eks.amazonaws.com/": Provider.EC2,
    "karpenter.k8s.aws/": Provider.EC2,
    "alpha.eksctl.io/": Provider.EC2,
    "cloud.google.com/gke-": Provider.GCE,
    "kubernetes.azure.com/": Provider.AZURE,
    "karpenter.azure.com/": Provider.AZURE,
}


def provider_from_environment(environ: Mapping[str, str]) -> Provider | None:
    """The provider that SPOTTRAIN_PROVIDER names, or None if the variable is not set.

    Raises:
        UnknownProvider: It names another one.
    """
    name = environ.get(ENV_PROVIDER, "")
    if name and name.lower() not in _NAMES:
        raise UnknownProvider(
            f"{ENV_PROVIDER}: {name!r} is not a provider. Set one of {', '.join(_NAMES)} in the chart's value "
            "watcher.env, or nothing to have it found by the node's provider id and labels."
        )
    return _NAMES[name.lower()] if name else None


def detect_provider(node: Mapping[str, Any]) -> Provider:
    """Detect the provider of a node.

    The cloud controller's providerID names it, or labels of EKS, Karpenter, GKE and AKS do.
    """
    provider_id = node.get("spec", {}).get("providerID", "")
    by_id = (provider for start, provider in _PROVIDER_IDS.items() if provider_id.startswith(start))
    labels = node["metadata"].get("labels") or {}
    by_label = (
        provider for domain, provider in _LABEL_DOMAINS.items() if any(label.startswith(domain) for label in labels)
    )
    return next(by_id, None) or next(by_label, Provider.OTHER)
