"""The resources of Kubernetes that the operator uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from spottrain_api.contract.names import GROUP, PLURAL, VERSION
from spottrain_api.cost_record import COST_PLURAL
from spottrain_api.history import HISTORY_PLURAL
from spottrain_api.v1alpha1.profile import PROFILE_PLURAL

Manifest = dict[str, Any]
"""The JSON of an object, as the Kubernetes API has it."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects.

    Attributes:
        group: Its API group. Empty: the core group.
        version: The version of the group.
        plural: Its name in paths.
        namespaced: Whether its objects are in namespaces.
    """

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "") -> str:
        """The path of an object, or of all objects, perhaps in a namespace."""
        group = f"/apis/{self.group}" if self.group else "/api"
        inside = ("namespaces", quote(namespace, safe="")) if namespace else ()
        return "/".join((group, self.version, *inside, self.plural, *((quote(name, safe=""),) if name else ())))

    def __str__(self) -> str:
        return self.plural


PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes", namespaced=False)
EVENTS = Resource("", "v1", "events")
SECRETS = Resource("", "v1", "secrets")
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
JOBS = Resource(GROUP, VERSION, PLURAL)
HISTORIES = Resource(GROUP, VERSION, HISTORY_PLURAL)
COSTS = Resource(GROUP, VERSION, COST_PLURAL)
PROFILES = Resource(GROUP, VERSION, PROFILE_PLURAL, namespaced=False)
DEFINITIONS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies")
NODE_POOLS = Resource("karpenter.sh", "v1", "nodepools", namespaced=False)
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads")
WORKLOAD_PRIORITY_CLASSES = Resource("kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", namespaced=False)
POD_GROUPS = Resource("scheduling.k8s.io", "v1beta1", "podgroups")
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", namespaced=False)
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False)
