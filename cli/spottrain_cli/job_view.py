"""A TrainingJob with its pods, events and history, read from the Kubernetes API."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from spottrain_api.contract.names import GROUP, LABEL_CAPACITY_TYPE, LABEL_JOB_UID, PLURAL, TRAINER_CONTAINER, VERSION
from spottrain_api.cost_record import COST_PLURAL, CostRecord
from spottrain_api.history import HISTORY_FIELD, HISTORY_PLURAL, HistoryPoint
from spottrain_api.tolerant import Path, dotted, read_known
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_cli.api_access import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Forbidden,
    NotThere,
    UserError,
    connect,
    sentences,
)
from spottrain_runtime.wording import listed, printable

# An operator that runs writes a new job's status in a second or two.
UNSEEN_SECONDS = 10.0
NO_CRDS = (
    "The cluster does not know TrainingJobs: the chart is not installed (docs/tutorial/cluster.md), or KUBECONFIG "
    "names a different cluster."
)

NO_COSTS = (
    "The cluster keeps no records of costs (TrainingJobCosts): its chart is older than this command. Upgrade the "
    "release, or see what single jobs cost with `kubectl get tj`."
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    """One pod of a job.

    Attributes:
        capacity_type: On-demand or spot.
        state: Its phase, the reason why it waits, or Starting while its agent loads torch.
    """

    name: str
    node: str
    capacity_type: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSummary:
    """One Kubernetes event about the job. Lists of them end with the newest."""

    at: datetime
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """A job at one moment.

    Attributes:
        history: Empty unless it was requested.
        not_understood: Paths of the fields in the status that a newer operator wrote and this version cannot read.
        forbidden: What else the user may not read: pods, events, history.
    """

    namespace: str
    name: str
    spec: dict[str, Any]
    created_at: datetime
    status: TrainingJobStatus
    uid: str = ""
    pods: tuple[PodSummary, ...] = ()
    events: tuple[EventSummary, ...] = ()
    history: tuple[HistoryPoint, ...] = ()
    not_understood: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def understands(self, part: str) -> bool:
        """Return whether this version could read all of a part of the status.

        An example of a part is `phase`.
        """
        path = f"status.{part}"
        return not any(field == path or field.startswith((f"{path}.", f"{path}[")) for field in self.not_understood)

    @property
    def phase(self) -> str:
        """Phase as it is shown."""
        return self.status.phase.value if self.understands("phase") else "Unknown"

    @property
    def advice(self) -> str:
        """Sentences about `not_understood` and `forbidden`, with what to do.

        Empty if everything was read and understood.
        """
        sentences = []
        if self.not_understood:
            sentences.append(
                f"This version of spottrain does not understand {listed(self.not_understood)}, which a newer "
                "operator may have written: upgrade spottrain on this machine to see all of the job."
            )
        if self.forbidden:
            sentences.append(
                f"You may not read the job's {listed(self.forbidden)}. `kubectl auth can-i --list -n "
                f"{self.namespace}` shows your rights."
            )
        return " ".join(sentences)


def unseen_sentence(jobs: Iterable[JobSnapshot], at: datetime) -> str:
    """Which of the jobs no operator has looked at, and what to check.

    Empty if there are none, or if they were created a moment ago.
    """
    unseen = [
        f"{job.namespace}/{job.name}"
        for job in jobs
        if job.status == TrainingJobStatus() and (at - job.created_at).total_seconds() > UNSEEN_SECONDS
    ]
    if not unseen:
        return ""
    return (
        f"No operator has looked at {listed(unseen)} yet. Its pod has to be ready: `kubectl get pods -A -l "
        "app.kubernetes.io/component=operator`. If there is none, it is scaled to 0 "
        "(`kubectl get deploy -A`), or the chart is not installed (docs/tutorial/cluster.md). Otherwise "
        "see its log: it may lack rights, or not lead this namespace (the chart's watchNamespaces)."
    )


class JobReader:
    """Reads jobs with the credentials of a kubeconfig. Default: kubectl's own rules.

    `namespace` is the one given, or that of the kubeconfig's context, otherwise `default`. Every method raises
    Unanswered if the API server does not answer, and UserError if it refuses.
    """

    def __init__(self, kubeconfig: str | None = None, namespace: str | None = None) -> None:
        # The import takes half a second, and only the commands that read a job need it.
        from kubernetes import client

        connected, found = connect(kubeconfig)
        self.namespace = namespace or found
        # Typed, they give `object` for what is JSON, and every field of a pod may be None.
        self._objects: Any = client.CustomObjectsApi(connected)
        self._core: Any = client.CoreV1Api(connected)
        self._patience = {"_request_timeout": (CONNECT_SECONDS, READ_SECONDS)}

    def jobs(self, namespace: str | None) -> list[JobSnapshot]:
        """Read all jobs of a namespace, or of all namespaces if it is None.

        Their pods and events are left out. The jobs are in order of name.
        """
        listed = self._listed(PLURAL, namespace, NO_CRDS)
        return sorted((_snapshot(job) for job in listed), key=lambda job: (job.namespace, job.name))

    def cost_records(self, namespace: str | None) -> list[tuple[str, CostRecord]]:
        """Read what jobs cost, also those that are deleted, each with its namespace.

        Raises:
            UserError: The cluster has no such records.
        """
        found = self._listed(COST_PLURAL, namespace, NO_COSTS)
        return [(each["metadata"]["namespace"], read_known(CostRecord, _printable(each))[0]) for each in found]

    def read(self, namespace: str, name: str, *, with_history: bool = False) -> JobSnapshot:
        """Read a job with its pods and events.

        Those that the user may not read are left out, and named.

        Raises:
            UserError: There is no such job.
        """
        job = self._job(namespace, name)
        uid = job["metadata"]["uid"]
        forbidden: list[str] = []

        def permitted(what: str, read: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
            try:
                with sentences():
                    return read()
            except Forbidden:
                forbidden.append(what)
                return ()

        return replace(
            _snapshot(job),
            pods=permitted("pods", lambda: self._pods(namespace, uid)),
            events=permitted("events", lambda: self._events(namespace, uid)),
            history=permitted("history", lambda: self._history(namespace, name, uid)) if with_history else (),
            forbidden=tuple(forbidden),
        )

    def status(self, namespace: str, name: str) -> TrainingJobStatus:
        """Read what this version understands of a job's status.

        Raises:
            UserError: There is no such job.
        """
        return _status(self._job(namespace, name))[0]

    def log_lines(self, namespace: str, pod: str, since: datetime | None) -> Iterator[tuple[datetime, str]]:
        """Follow the log of a trainer pod, as lines with their times.

        It ends when the connection or the pod ends.

        Args:
            namespace: The pod's namespace.
            pod: Its name.
            since: Lines that are much older are left out. None: all lines.

        Raises:
            UserError: There is no such pod, or it has no log yet.
        """
        gone = f"Pod {pod} is gone, and its log with it."
        with sentences(missing=gone), contextlib.closing(self._log(namespace, pod, since)) as response:
            # The lines of the client's own function lack a last one without a line break.
            for line in response:
                at, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
                try:
                    time_of_line = datetime.fromisoformat(at)
                except ValueError as error:  # a line that broke off, or a sentence of the kubelet
                    raise UserError(f"The log of {pod} can't be read now: {printable(f'{at} {text}')}") from error
                yield time_of_line, text

    def _listed(self, plural: str, namespace: str | None, missing: str) -> list[dict[str, Any]]:
        """All objects of a kind in a namespace, or in all of them."""
        with sentences(missing=missing):
            if namespace is None:
                found = self._objects.list_cluster_custom_object(GROUP, VERSION, plural, **self._patience)
            else:
                found = self._objects.list_namespaced_custom_object(
                    GROUP, VERSION, namespace, plural, **self._patience
                )
        items: list[dict[str, Any]] = _object(found)["items"]
        return items

    def _job(self, namespace: str, name: str) -> dict[str, Any]:
        with sentences(missing=_missing(namespace, name)):
            return _object(
                self._objects.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, **self._patience)
            )

    def _log(self, namespace: str, pod: str, since: datetime | None) -> Any:
        """Open the log of a trainer pod.

        The client's own method has only `sinceSeconds`, which depends on this machine's clock.
        """
        from kubernetes.client.exceptions import ApiException

        query = {"container": TRAINER_CONTAINER, "follow": "true", "timestamps": "true"}
        if since is not None:
            query["sinceTime"] = since.isoformat(timespec="seconds")
        request = self._core.api_client.param_serialize(
            "GET",
            "/api/v1/namespaces/{namespace}/pods/{pod}/log",
            path_params={"namespace": namespace, "pod": pod},
            query_params=[*query.items()],
            auth_settings=["BearerToken"],
        )
        # A script may print nothing for hours.
        answer = self._core.api_client.call_api(*request, _request_timeout=(CONNECT_SECONDS, None))
        if answer.status != 200:
            answer.read()
            raise ApiException(http_resp=answer)
        return answer.response

    def _pods(self, namespace: str, uid: str) -> tuple[PodSummary, ...]:
        pods = self._core.list_namespaced_pod(
            namespace, label_selector=f"{LABEL_JOB_UID}={uid}", **self._patience
        ).items
        return tuple(
            PodSummary(
                name=pod.metadata.name,
                node=pod.spec.node_name or "",
                capacity_type=pod.metadata.labels.get(LABEL_CAPACITY_TYPE, ""),
                state=pod_state(pod),
            )
            for pod in pods
        )

    def _events(self, namespace: str, uid: str) -> tuple[EventSummary, ...]:
        events = self._core.list_namespaced_event(
            namespace, field_selector=f"involvedObject.uid={uid}", **self._patience
        ).items
        summaries = [
            EventSummary(
                at=event.event_time or event.last_timestamp or event.metadata.creation_timestamp,
                type=event.type or "Normal",
                reason=printable(event.reason or ""),
                message=printable(event.message or ""),
            )
            for event in events
        ]
        return tuple(sorted(summaries, key=lambda event: event.at))

    def _history(self, namespace: str, name: str, uid: str) -> tuple[HistoryPoint, ...]:
        try:
            with sentences(missing=f"{name} has no history yet."):
                stored = self._objects.get_namespaced_custom_object(
                    GROUP, VERSION, namespace, HISTORY_PLURAL, name, **self._patience
                )
        except NotThere:
            return ()
        if all(owner["uid"] != uid for owner in stored["metadata"].get("ownerReferences", ())):
            return ()  # Of an earlier job of this name.
        rows = csv.reader(io.StringIO(stored.get(HISTORY_FIELD, "")))
        try:
            return tuple(HistoryPoint.from_row(row) for row in rows if row)
        except (ValueError, csv.Error) as error:
            raise UserError(
                f"The history of {name} is damaged: {error}. `kubectl delete {HISTORY_PLURAL} {name} -n {namespace}` "
                "deletes it; a job that runs gets a new one."
            ) from error


def _snapshot(job: dict[str, Any]) -> JobSnapshot:
    status, unknown = _status(job)
    return JobSnapshot(
        namespace=job["metadata"]["namespace"],
        name=job["metadata"]["name"],
        uid=job["metadata"]["uid"],
        spec=job["spec"],
        created_at=datetime.fromisoformat(job["metadata"]["creationTimestamp"]),
        status=status,
        not_understood=tuple(f"status.{dotted(path)}" for path in unknown),
    )


def _status(job: dict[str, Any]) -> tuple[TrainingJobStatus, tuple[Path, ...]]:
    """What this version understands of a job's status, and the paths of the rest.

    A terminal can show all of it.
    """
    return read_known(TrainingJobStatus, _printable(job.get("status") or {}))


def _printable(content: Any) -> Any:
    if isinstance(content, dict):
        return {printable(key): _printable(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_printable(value) for value in content]
    return printable(content) if isinstance(content, str) else content


def _object(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise UserError(
            "The address in the kubeconfig answers with a page in place of an object: it is no API server, or a "
            "proxy before it wants a new login."
        )
    return answer


def _missing(namespace: str, name: str) -> str:
    return f"There is no TrainingJob {name} in namespace {namespace}. `kubectl get tj -A` lists them."


def pod_state(pod: Any) -> str:
    if pod.metadata.deletion_timestamp:
        return "Terminating"
    for container in pod.status.container_statuses or ():
        if container.state.waiting and container.state.waiting.reason:
            return printable(container.state.waiting.reason)
        if container.state.running and not container.ready:
            return "Starting"
    return str(pod.status.phase)


def now() -> datetime:
    """Current time of the CLI."""
    return datetime.now(UTC)
