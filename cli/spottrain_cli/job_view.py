"""What the CLI shows of a TrainingJob, read from the Kubernetes API in one go."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from urllib3.exceptions import HTTPError

from spottrain_api.contract import GROUP, LABEL_CAPACITY_TYPE, LABEL_JOB, PLURAL, VERSION
from spottrain_api.history import HISTORY_KEY, HistoryPoint, history_name
from spottrain_api.tolerant import dotted, read_known
from spottrain_api.v1alpha1 import TrainingJobStatus
from spottrain_api.wording import listed


class UserError(Exception):
    """Something that the user can mend; the text is a sentence that says how."""


class NotThere(UserError):
    """What was asked for doesn't exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    """One pod of a job: `capacity_type` is on-demand or spot, `state` the phase, or why it waits."""

    name: str
    node: str
    capacity_type: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSummary:
    """One Kubernetes event about the job, newest last in lists."""

    at: datetime
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """A job as it is now; `history` is empty unless asked for.

    `not_understood` has the paths of what a newer operator wrote into the status and this version can't read.
    """

    namespace: str
    name: str
    spec: dict[str, Any]
    created_at: datetime
    status: TrainingJobStatus
    pods: tuple[PodSummary, ...] = ()
    events: tuple[EventSummary, ...] = ()
    history: tuple[HistoryPoint, ...] = ()
    not_understood: tuple[str, ...] = ()

    def understands(self, part: str) -> bool:
        """Whether all of this part of the status was read, such as `phase` or `generation`."""
        path = f"status.{part}"
        return not any(field == path or field.startswith((f"{path}.", f"{path}[")) for field in self.not_understood)

    @property
    def phase(self) -> str:
        """The phase for people."""
        return self.status.phase.value if self.understands("phase") else "Unknown"

    @property
    def advice(self) -> str:
        """What to do about `not_understood`; empty if there is nothing."""
        if not self.not_understood:
            return ""
        return (
            f"This version of spottrain doesn't understand {listed(self.not_understood)}, which a newer operator may "
            "have written: upgrade spottrain on this machine to see all of the job."
        )


class JobReader:
    """Reads jobs with the credentials of a kubeconfig (default: kubectl's own rules). UserError: it can't."""

    def __init__(self, kubeconfig: str | None = None) -> None:
        # Half a second, for which the commands that read no job need not wait.
        from kubernetes import client, config

        try:
            api_client = config.new_client_from_config(config_file=kubeconfig)
        except config.ConfigException as error:
            raise UserError(
                f"No cluster to talk to: {error}. Set KUBECONFIG, or start one with `spottrain local up`."
            ) from error
        self._objects = client.CustomObjectsApi(api_client)
        self._core = client.CoreV1Api(api_client)

    def names(self, namespace: str) -> list[str]:
        """The names of the namespace's jobs."""
        with _sentences():
            jobs = self._objects.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL)
        return sorted(job["metadata"]["name"] for job in jobs["items"])

    def read(self, namespace: str, name: str, *, with_history: bool = False) -> JobSnapshot:
        """The job with its pods and events. UserError: there is no such job."""
        missing = f"There is no TrainingJob {name} in namespace {namespace}. `kubectl get tj -A` lists them."
        with _sentences():
            with _sentences(missing=missing):
                job = self._objects.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
            status, unknown = read_known(TrainingJobStatus, job.get("status") or {})
            return JobSnapshot(
                namespace=namespace,
                name=name,
                spec=job["spec"],
                created_at=datetime.fromisoformat(job["metadata"]["creationTimestamp"]),
                status=status,
                pods=self._pods(namespace, name),
                events=self._events(namespace, job["metadata"]["uid"]),
                history=self._history(namespace, name) if with_history else (),
                not_understood=tuple(f"status.{dotted(path)}" for path in unknown),
            )

    def _pods(self, namespace: str, name: str) -> tuple[PodSummary, ...]:
        pods = self._core.list_namespaced_pod(namespace, label_selector=f"{LABEL_JOB}={name}").items
        return tuple(
            PodSummary(
                name=pod.metadata.name,
                node=pod.spec.node_name or "",
                capacity_type=pod.metadata.labels.get(LABEL_CAPACITY_TYPE, ""),
                state=_pod_state(pod),
            )
            for pod in pods
        )

    def _events(self, namespace: str, uid: str) -> tuple[EventSummary, ...]:
        events = self._core.list_namespaced_event(namespace, field_selector=f"involvedObject.uid={uid}").items
        summaries = [
            EventSummary(
                at=event.last_timestamp or event.event_time or event.metadata.creation_timestamp,
                type=event.type or "Normal",
                reason=event.reason or "",
                message=event.message or "",
            )
            for event in events
        ]
        return tuple(sorted(summaries, key=lambda event: event.at))

    def _history(self, namespace: str, name: str) -> tuple[HistoryPoint, ...]:
        try:
            with _sentences(missing=f"{name} has no history yet."):
                stored = self._core.read_namespaced_config_map(history_name(name), namespace)
        except NotThere:
            return ()
        rows = csv.reader(io.StringIO((stored.data or {}).get(HISTORY_KEY, "")))
        return tuple(HistoryPoint.from_row(row) for row in rows if row)


@contextlib.contextmanager
def _sentences(missing: str | None = None) -> Iterator[None]:
    """Errors of the API as UserErrors; NotThere with `missing` where the API knows no such object."""
    from kubernetes.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        if missing is not None and error.status == 404:
            raise NotThere(missing) from error
        raise UserError(f"The API server refused: {error.reason} ({error.status}).") from error
    except HTTPError as error:
        raise UserError(
            "The API server can't be reached. Is the cluster up (`spottrain local status`), and does KUBECONFIG name "
            f"it? ({error})"
        ) from error


def _pod_state(pod: Any) -> str:
    if pod.metadata.deletion_timestamp:
        return "Terminating"
    for container in pod.status.container_statuses or ():
        if container.state.waiting and container.state.waiting.reason:
            return str(container.state.waiting.reason)
    return str(pod.status.phase)


def now() -> datetime:
    """The CLI's clock."""
    return datetime.now(UTC)
