"""Narrow protocols for the operator's access to Kubernetes.

Objects are the JSON of the Kubernetes API (`Manifest`), which `observe.py` turns into values. Two implementations
pass the same contract tests: `kubernetes_client.py`, and the one in memory that tests use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.resources import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIssuer:
    """Who signs the tokens of service accounts.

    Attributes:
        name: The claim `iss` of its tokens.
        keys: Its public keys, as a JSON Web Key Set.
    """

    name: str
    keys: Manifest


def is_gone(deleted: Manifest) -> bool:
    """Whether the answer to a deletion says that the object is gone.

    Otherwise it terminates: it has a grace period, or finalizers.
    """
    meta = deleted["metadata"]
    return meta.get("deletionGracePeriodSeconds") == 0 and not meta.get("finalizers")


class ClusterClient(Protocol):
    """Access to jobs, pods, nodes and events.

    A read shows at least everything that this client has written before.

    Every method raises ClusterError if the API server fails or can't be reached. A read of an object that doesn't
    exist returns None, or a list without it. A deletion of such an object succeeds.
    """

    async def get_job(self, key: JobKey) -> Manifest | None: ...

    async def list_jobs(self) -> Iterable[Manifest]:
        """The jobs of all namespaces. Read them one by one: there may be thousands."""
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

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]:
        """The pods with these labels, of which the job's name is one."""
        ...

    async def create_pod(self, pod: Manifest) -> Manifest:
        """Create a pod.

        Returns:
            The pod.

        Raises:
            AlreadyExistsError: The name is taken.
            InvalidObjectError: Refused for the pod's content.
            ForbiddenError: Refused for the state of the cluster.
        """
        ...

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        """Delete this pod, but no other one of the same name: its uid has to match.

        Returns:
            The pod, which terminates or is gone now (see `is_gone`). None if it was gone before.
        """
        ...

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        """Set annotations of a pod, or remove them (None).

        A different pod of the same name stays as it is.

        Returns:
            The pod, or None if it is gone.

        Raises:
            RefusedError: The operator has no right to it, or a webhook or a policy forbids it.
        """
        ...

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]: ...

    async def create_event(self, event: Manifest) -> None: ...

    async def events_about(self, namespace: str, *, uid: str) -> list[Manifest]:
        """Events about the object with this uid, the newest last."""
        ...


class PodLabelClient(Protocol):
    """The operator's own pods."""

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]: ...

    async def label_pod(self, namespace: str, name: str, *, labels: Mapping[str, str | None]) -> None:
        """Set labels of a pod, or remove them (None). A pod that is gone stays so."""
        ...


class Kind(StrEnum):
    """What a watch follows.

    Of pods, it is those that bear the operator's label and name a job.
    """

    JOBS = "jobs"
    PODS = "pods"
    NODES = "nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects of a kind at one version."""

    items: tuple[Manifest, ...]
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


class WatchClient(Protocol):
    """Lists and watches, for caches."""

    async def list_kind(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        labels: Mapping[str, str] | None = None,
        keep: Callable[[Manifest], Manifest] = lambda item: item,
    ) -> Listing:
        """List the objects at the newest version.

        They come from all namespaces and have any labels, unless `namespace` or `labels` is given. `keep` returns,
        for each object as it arrives, what the list holds of it.
        """
        ...

    def watch_kind(self, kind: Kind, version: int) -> AsyncIterator[WatchEvent]:
        """What happens after a version, in order. It ends when the server ends the watch.

        Raises:
            ExpiredError: The version is too old.
            ClusterError: The API server failed or can't be reached.
        """
        ...


class TokenReviewer(Protocol):
    """Finds out which pod a token belongs to."""

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        """The pod to which the token is bound; None if the token isn't valid for this audience."""
        ...


class IssuerClient(Protocol):
    """Reads who signs the tokens of service accounts."""

    async def read_issuer(self) -> TokenIssuer: ...


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


class SecretClient(Protocol):
    """The Secret of the control API."""

    async def read_secret(self, namespace: str, name: str) -> Manifest | None: ...

    async def write_secret(self, secret: Manifest) -> Manifest:
        """Create it, or replace it if it has a resourceVersion.

        Raises:
            ConflictError: Another writer was faster.
        """
        ...


class NetworkPolicyClient(Protocol):
    """The NetworkPolicies that the operator creates beside its jobs."""

    async def create_network_policy(self, policy: Manifest) -> None:
        """Create a NetworkPolicy.

        Raises:
            AlreadyExistsError: The name is taken.
            RefusedError: The operator has no right to it, or a webhook or a policy forbids it.
        """
        ...


class HistoryClient(Protocol):
    """The TrainingJobHistories that the operator keeps beside its jobs."""

    async def read_history(self, key: JobKey) -> Manifest | None: ...

    async def write_history(self, history: Manifest) -> Manifest:
        """Create it, or replace it if it has a resourceVersion.

        Raises:
            ConflictError: Another writer was faster.
        """
        ...


class DefinitionClient(Protocol):
    """CustomResourceDefinitions."""

    async def read_definition(self, name: str) -> Manifest | None:
        """The CRD of this name.

        Raises:
            ForbiddenError: The operator may not read it.
        """
        ...
