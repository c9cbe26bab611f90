"""Narrow protocols for the operator's access to Kubernetes.

Objects are the JSON of the Kubernetes API (`Manifest`), which `observe.py` turns into values. Two implementations
pass the same contract tests: `kubernetes_client.py`, and the one in memory that tests use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Manifest = dict[str, Any]


class ClusterError(Exception):
    """The API server failed or could not be reached. A later attempt may succeed."""


class ConflictError(ClusterError):
    """The object has changed since it was read, or has a different uid.

    The API server's optimistic lock refused the write.
    """


class AlreadyExistsError(ClusterError):
    """An object of that name exists already."""


class RefusedError(ClusterError):
    """The API server has read the object, and refuses it."""


class InvalidObjectError(RefusedError):
    """The API server refused the object for its content.

    A rule of Kubernetes or an admission webhook forbids it.
    """


class ForbiddenError(RefusedError):
    """Refused for the state of the cluster.

    Something that the object names is missing, a quota is used up, the namespace's policy forbids it, or a webhook
    doesn't answer.
    """


class NoPoolError(RefusedError):
    """The job's pools have no place for a pod.

    The message is a sentence for the user.
    """


class NotAllowedError(RefusedError):
    """The administrator doesn't allow what the job asks for.

    The message is a sentence for the user.
    """


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JobKey:
    """Names one TrainingJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """The pod that presented a token."""

    namespace: str
    pod: str
    uid: str


class ClusterClient(Protocol):
    """Jobs, pods, nodes and events. Reads are fresh, never from a cache.

    Every method raises ClusterError if the API server fails or can't be reached. To read an object that doesn't exist
    gives None, or a list without it. To delete one succeeds.
    """

    async def get_job(self, key: JobKey) -> Manifest | None: ...

    async def list_jobs(self) -> list[Manifest]:
        """The jobs of all namespaces."""
        ...

    async def replace_job_status(self, job: Manifest) -> Manifest:
        """Write `job["status"]`, and nothing else.

        Returns:
            The new object.

        Raises:
            ConflictError: The job has changed since it was read.
        """
        ...

    async def delete_job(self, key: JobKey, *, uid: str) -> None: ...

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]: ...

    async def create_pod(self, pod: Manifest) -> None:
        """Create a pod.

        Raises:
            AlreadyExistsError: The name is taken.
            InvalidObjectError: Refused for the pod's content.
            ForbiddenError: Refused for the state of the cluster.
        """
        ...

    async def delete_pod(self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        """Delete this pod, but no other one of the same name: its uid has to match."""
        ...

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> None:
        """Set annotations of a pod, or remove them (None).

        A different pod of the same name stays as it is.

        Raises:
            RefusedError: The operator may not do that.
        """
        ...

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]: ...

    async def create_event(self, event: Manifest) -> None: ...

    async def newest_event(self, namespace: str, *, uid: str) -> Manifest | None:
        """The newest event about the object with this uid."""
        ...


class PodLabelClient(Protocol):
    """The operator's own pods."""

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]: ...

    async def label_pod(self, namespace: str, name: str, *, labels: Mapping[str, str | None]) -> None:
        """Set labels of a pod, or remove them (None). A pod that is gone stays so."""
        ...


class TokenReviewer(Protocol):
    """Finds out which pod a token belongs to."""

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        """The pod to which the token is bound.

        None if the token isn't valid for this audience.
        """
        ...


class LeaseClient(Protocol):
    """coordination.k8s.io Leases, for leader election."""

    async def read_lease(self, namespace: str, name: str) -> Manifest | None: ...

    async def list_leases(self, name: str) -> list[Manifest]:
        """The leases of this name in all namespaces."""
        ...

    async def write_lease(self, lease: Manifest) -> Manifest:
        """Create it, or replace it if it has a resourceVersion.

        Raises:
            ConflictError: Another writer was faster.
        """
        ...


class NamespaceClient(Protocol):
    """Namespaces and their labels."""

    async def get_namespace(self, name: str) -> Manifest | None: ...


class HistoryClient(Protocol):
    """The TrainingJobHistories that the operator keeps beside its jobs."""

    async def read_history(self, key: JobKey) -> Manifest | None: ...

    async def write_history(self, history: Manifest) -> Manifest:
        """Create it, or replace it if it has a resourceVersion.

        Raises:
            ConflictError: Another writer was faster.
        """
        ...
