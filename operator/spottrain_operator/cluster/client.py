"""What the operator needs of Kubernetes, as narrow protocols.

Objects pass as the JSON of the Kubernetes API (`Manifest`); `observe.py` turns them into values. Two
implementations pass the same contract tests: `kubernetes_client.py`, and the one in memory that tests use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

Manifest = dict[str, Any]


class ClusterError(Exception):
    """The API server refused or could not be reached; trying again later may help."""


class ConflictError(ClusterError):
    """The object was changed since it was read (optimistic lock), or has another uid than expected."""


class AlreadyExistsError(ClusterError):
    """An object of that name is there already."""


class RefusedError(ClusterError):
    """The API server has looked at the object, and refuses it."""


class InvalidObjectError(RefusedError):
    """For what the object says: a rule of Kubernetes or an admission webhook is against it."""


class ForbiddenError(RefusedError):
    """For what the cluster is: something that the object names is missing, a quota is used up, the namespace's policy
    is against it, or who has to be asked doesn't answer."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JobKey:
    """Names one TrainingJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """Who presented a token: one pod, by name and uid."""

    namespace: str
    pod: str
    uid: str


class ClusterClient(Protocol):
    """Jobs, pods, nodes and events. Reads are fresh, never from a cache.

    Every method raises ClusterError when the API server fails or can't be reached. What is not there is None
    or left out when read, and already done when deleted.
    """

    async def get_job(self, key: JobKey) -> Manifest | None: ...

    async def list_jobs(self) -> list[Manifest]:
        """Those of all namespaces."""
        ...

    async def replace_job_status(self, job: Manifest) -> Manifest:
        """Write `job["status"]` alone and return the new object; ConflictError if the job has changed since."""
        ...

    async def delete_job(self, key: JobKey, *, uid: str) -> None: ...

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]: ...

    async def create_pod(self, pod: Manifest) -> None:
        """AlreadyExistsError if the name is taken, InvalidObjectError if it is refused for what it is,
        ForbiddenError if it is for what the cluster is."""
        ...

    async def delete_pod(self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        """Delete that very pod; a pod of the same name with another uid is left alone."""
        ...

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]: ...

    async def create_event(self, event: Manifest) -> None: ...

    async def newest_event(self, namespace: str, *, uid: str) -> Manifest | None:
        """The newest event about the object with that uid."""
        ...


class TokenReviewer(Protocol):
    """Tells whose token it is."""

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        """The pod to which the token is bound; None if it isn't valid for that audience."""
        ...


class LeaseClient(Protocol):
    """One coordination.k8s.io Lease, for leader election."""

    async def read_lease(self, namespace: str, name: str) -> Manifest | None: ...

    async def write_lease(self, lease: Manifest) -> Manifest:
        """Create it, or replace it where it has a resourceVersion; ConflictError if someone was faster."""
        ...


class ConfigMapClient(Protocol):
    """ConfigMaps that the operator keeps beside its jobs."""

    async def read_config_map(self, namespace: str, name: str) -> Manifest | None: ...

    async def write_config_map(self, config_map: Manifest) -> Manifest:
        """Create it, or replace it where it has a resourceVersion; ConflictError if someone was faster."""
        ...
