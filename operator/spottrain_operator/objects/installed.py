"""Which versions of a resource a cluster serves that may lack it."""

from __future__ import annotations

from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.resources import DEFINITIONS, Resource


def definition_of(resource: Resource) -> str:
    """The name of the resource's CRD."""
    return f"{resource.plural}.{resource.group}"


async def served_versions(cluster: Cluster, resource: Resource) -> list[str]:
    """The versions in which the cluster serves the resource. Empty: it isn't installed."""
    definition = await cluster.get(DEFINITIONS, definition_of(resource))
    if definition is None:
        return []
    return [each["name"] for each in definition["spec"]["versions"] if each["served"]]
