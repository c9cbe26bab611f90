"""The protocol of the operator's access to Kubernetes: a few verbs over a resource.

Objects are the JSON of the Kubernetes API (`Manifest`), which `observe.py` turns into values. Three implementations
pass the same contract tests: `kubernetes_cluster.py`, the caches of `watched_cluster.py`, and the one in memory that
tests use. What is specific to a resource is a function over the protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from spottrain_operator.kube.errors import AlreadyExistsError, ConflictError
from spottrain_operator.kube.resources import Manifest, Resource

Labels = Mapping[str, str | None]
"""Selects the objects with these labels. None: the label has any value but the empty one."""
Fields = Mapping[str, str]
"""Selects the objects with these values at paths, such as `metadata.name`. The API server knows few paths."""
Keep = Callable[[Manifest], Manifest]
"""Returns, for each object of a list as it arrives, what the list holds of it."""
ALL: Mapping[str, str] = {}
"""Selects all objects."""


def as_it_is(item: Manifest) -> Manifest:
    """Keep the whole object."""
    return item


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Objects of a resource at one version.

    Attributes:
        items: The objects. A cache parses each when its turn comes, so read them one by one, and once.
        version: The version of the cluster at which they were so.
    """

    items: Iterable[Manifest]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """What has happened to an object.

    Attributes:
        object: None: this is a bookmark, and everything up to `version` was shown.
    """

    object: Manifest | None
    version: int
    deleted: bool = False


class Cluster(Protocol):
    """Reads and writes objects.

    A read shows at least everything that this client has written before.

    Every method raises ClusterError if the API server fails or can't be reached, and RefusedError if the operator has
    no right to the request, or a webhook or a policy forbids it. The namespace of an object of a resource that isn't
    namespaced is empty.
    """

    async def get(self, resource: Resource, name: str, *, namespace: str = "") -> Manifest | None:
        """The object; None if it doesn't exist."""
        ...

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str = "",
        labels: Labels = ALL,
        fields: Fields = ALL,
        keep: Keep = as_it_is,
    ) -> Listing:
        """The selected objects of a namespace or, without one, of all namespaces."""
        ...

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Create an object, or ask a question that is asked like this.

        Returns:
            The object.

        Raises:
            AlreadyExistsError: The name is taken.
            InvalidObjectError: Refused for the object's content.
            ForbiddenError: Refused for the state of the cluster.
        """
        ...

    async def patch(
        self, resource: Resource, name: str, patch: Manifest, *, namespace: str = "", uid: str = ""
    ) -> Manifest | None:
        """Merge a patch into an object (RFC 7386).

        With a `uid`, a different object of the same name stays as it is.

        Returns:
            The object, or None if it is gone.
        """
        ...

    async def replace(self, resource: Resource, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Write an object as it is here or, with the subresource `status`, only its status.

        Returns:
            The new object.

        Raises:
            ConflictError: The object has changed since it was read, or is gone.
        """
        ...

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        """Delete this object, but no other one of the same name: its uid has to match.

        Returns:
            The answer; None if the object was gone before. Of a pod, it is the pod, which terminates or is gone now
            (see `is_gone`). Of a job, it may say nothing.
        """
        ...

    def watch(self, resource: Resource, version: int, *, labels: Labels = ALL) -> AsyncIterator[WatchEvent]:
        """What happens to selected objects after a version, in order. It ends when the server ends the watch.

        Raises:
            ExpiredError: The version is too old.
        """
        ...


def is_gone(deleted: Manifest) -> bool:
    """Whether the answer to the deletion of a pod says that the pod is gone.

    Otherwise it terminates: it has a grace period, or finalizers.
    """
    meta = deleted["metadata"]
    return meta.get("deletionGracePeriodSeconds") == 0 and not meta.get("finalizers")


async def write(cluster: Cluster, resource: Resource, manifest: Manifest) -> Manifest:
    """Create an object that has no resourceVersion yet; replace one that has.

    Raises:
        ConflictError: Another writer was faster.
    """
    if "resourceVersion" in manifest["metadata"]:
        return await cluster.replace(resource, manifest)
    try:
        return await cluster.create(resource, manifest)
    except AlreadyExistsError as error:
        raise ConflictError(str(error)) from error
