"""The rights that operator and watcher need.

The chart's roles grant these and no others; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from spottrain_api import crd
from spottrain_api.contract.names import GROUP, PLURAL
from spottrain_api.cost_record import COST_PLURAL
from spottrain_api.history import HISTORY_PLURAL
from spottrain_api.v1alpha1.profile import PROFILE_PLURAL
from spottrain_operator.control_api.certificate_keeper import SECRET_NAME
from spottrain_operator.control_api.cluster_keys import ISSUER_PATH, KEYS_PATH
from spottrain_operator.kube.lease import LEASE_NAME
from spottrain_operator.kube.resources import (
    DEFINITIONS,
    NODE_POOLS,
    POD_GROUPS,
    PRIORITY_CLASSES,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
)
from spottrain_operator.objects.installed import definition_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Verbs on a resource, or on a path of the API server that belongs to none.

    They hold in all namespaces, in those whose jobs the operator leads, or in the operator's own.

    Attributes:
        name: The one object for which they hold. None: all.
    """

    group: str = ""
    resource: str = ""
    path: str = ""
    verbs: tuple[str, ...]
    name: str = ""
    of_jobs: bool = False
    own_namespace: bool = False


READ = ("get", "list", "watch")

RIGHTS: Mapping[str, tuple[Right, ...]] = {
    "operator": (
        Right(group=GROUP, resource=PLURAL, verbs=READ),
        Right(group=GROUP, resource=PLURAL, verbs=("delete",), of_jobs=True),
        Right(group=GROUP, resource=f"{PLURAL}/status", verbs=("update",), of_jobs=True),
        Right(group=GROUP, resource=f"{PLURAL}/finalizers", verbs=("update",), of_jobs=True),
        Right(group=GROUP, resource=HISTORY_PLURAL, verbs=("get", "create", "update"), of_jobs=True),
        Right(group=GROUP, resource=COST_PLURAL, verbs=("get", "list", "create", "update", "delete"), of_jobs=True),
        Right(group=GROUP, resource=PROFILE_PLURAL, verbs=("get",)),
        Right(resource="pods", verbs=READ),
        Right(resource="pods", verbs=("create", "patch", "delete"), of_jobs=True),
        Right(resource="pods", verbs=("list", "patch"), own_namespace=True),
        Right(resource="events", verbs=("create", "list"), of_jobs=True),
        Right(resource="nodes", verbs=READ),
        Right(resource="namespaces", verbs=("get",)),
        Right(group="authentication.k8s.io", resource="tokenreviews", verbs=("create",)),
        *(Right(path=path, verbs=("get",)) for path in (ISSUER_PATH, KEYS_PATH)),
        *(
            Right(group="apiextensions.k8s.io", resource="customresourcedefinitions", verbs=("get",), name=name)
            for name in crd.definitions()
        ),
        Right(group="coordination.k8s.io", resource="leases", verbs=("list",)),
        Right(group="coordination.k8s.io", resource="leases", verbs=("create",), own_namespace=True),
        Right(
            group="coordination.k8s.io",
            resource="leases",
            verbs=("get", "update"),
            name=LEASE_NAME,
            own_namespace=True,
        ),
        Right(resource="secrets", verbs=("get", "update"), name=SECRET_NAME, own_namespace=True),
    ),
    "watcher": (
        Right(resource="nodes", verbs=(*READ, "patch")),
        Right(resource="pods", verbs=READ),
    ),
}


# What the operator needs beside these with the chart's value kueue.enabled.
KUEUE_RIGHTS = (
    Right(group=WORKLOADS.group, resource=WORKLOADS.plural, verbs=READ),
    Right(group=WORKLOADS.group, resource=WORKLOADS.plural, verbs=("create", "delete"), of_jobs=True),
    Right(group=WORKLOADS.group, resource=f"{WORKLOADS.plural}/status", verbs=("update",), of_jobs=True),
    Right(group=WORKLOADS.group, resource=WORKLOAD_PRIORITY_CLASSES.plural, verbs=("get",)),
    Right(group=PRIORITY_CLASSES.group, resource=PRIORITY_CLASSES.plural, verbs=("get", "list")),
    Right(group=DEFINITIONS.group, resource=DEFINITIONS.plural, verbs=("get",), name=definition_of(WORKLOADS)),
)
# And with karpenter.enabled.
KARPENTER_RIGHTS = (
    Right(group=NODE_POOLS.group, resource=NODE_POOLS.plural, verbs=(*READ, "create", "update", "delete")),
    Right(group=DEFINITIONS.group, resource=DEFINITIONS.plural, verbs=("get",), name=definition_of(NODE_POOLS)),
)
# And with jobs.podGroups.
POD_GROUP_RIGHTS = (
    Right(group=POD_GROUPS.group, resource=POD_GROUPS.plural, verbs=("create", "patch"), of_jobs=True),
)


def questions(part: str, namespace: str, watched: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """The attributes of a SelfSubjectAccessReview for each right of a part.

    They are those of a resource, or of a path.

    Args:
        part: Operator or watcher.
        namespace: That of the release.
        watched: Namespaces whose jobs the operator leads. Empty: all.
    """
    for right in RIGHTS[part]:
        resource, _, subresource = right.resource.partition("/")
        where = [namespace] if right.own_namespace else watched if right.of_jobs and watched else [""]
        for verb, place in product(right.verbs, where):
            asked = {
                "group": right.group,
                "resource": resource,
                "subresource": subresource,
                "verb": verb,
                "name": right.name,
                "path": right.path,
                "namespace": place,
            }
            yield {key: value for key, value in asked.items() if value}


def asked(question: Mapping[str, str]) -> str:
    """A question in words: update trainingjobs.spottrain.dev/status."""
    group, subresource = question.get("group"), question.get("subresource")
    if "path" in question:
        return f"{question['verb']} {question['path']}"
    resource = question["resource"] + (f".{group}" if group else "") + (f"/{subresource}" if subresource else "")
    name, namespace = question.get("name"), question.get("namespace")
    return f"{question['verb']} {resource}" + (f" {name}" if name else "") + (f" in {namespace}" if namespace else "")
