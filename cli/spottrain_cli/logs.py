"""`spottrain logs`: the log of a rank's pod, across generations."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

from spottrain_api.contract.assignments import Member
from spottrain_api.v1alpha1.status import FINISHED_PHASES, GenerationStatus, Phase, TrainingJobStatus
from spottrain_cli.api_access import UserError, answers
from spottrain_cli.job_view import JobReader

POLL_SECONDS = 0.5
# A connection that ends while the pod is still wanted is opened again after this time.
RECONNECT_SECONDS = 1.0
# Once the job has ended, a pod that says nothing for so long is followed no further.
LAST_LINES_SECONDS = 5.0
# How far the clocks of a node and of the operator may differ, where a pod is followed for a part of its life.
CLOCKS_DIFFER = timedelta(seconds=5)
UNSEEN = "No operator has looked at the job yet. If that lasts, `spottrain status` says what to check."
WAITS = "The job waits for its first generation."
_BEGINNING = datetime.min.replace(tzinfo=UTC)
_END = datetime.max.replace(tzinfo=UTC)


class LogSource(Protocol):
    """What the followed job looks like now, and the logs of its pods."""

    def status(self) -> TrainingJobStatus:
        """Read the status of the job.

        Raises:
            UserError: The job doesn't exist.
            Unanswered: The API server doesn't answer.
        """
        ...

    def lines(self, pod: str, since: datetime) -> Iterator[tuple[datetime, str]]:
        """Yield the lines of the pod with their times, from about `since` on.

        They end when the connection or the pod ends.

        Raises:
            UserError: The log can't be read now.
        """
        ...


@dataclass(slots=True, eq=False)
class PodLog:
    """The log of one pod.

    A thread of its own puts the lines into `received`: each once, over any number of connections.
    """

    source: LogSource
    pod: str
    since: datetime
    received: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    trouble: str = ""
    _until: datetime = _END
    _wanted: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._wanted.set()
        self._thread = threading.Thread(target=self._read, name=f"log of {self.pod}", daemon=True)
        self._thread.start()

    def leave(self, until: datetime = _END) -> None:
        """Open no new connection, and end with the lines of `until`."""
        self._until = until
        self._wanted.clear()

    def has_ended(self, *, within: float) -> bool:
        """Wait up to `within` seconds for the end of the connection that is open."""
        if self._thread is not None:
            self._thread.join(within)
        return self._thread is None or not self._thread.is_alive()

    def _read(self) -> None:
        while True:
            try:
                known = self.since
                for at, line in self.source.lines(self.pod, known):
                    if at > self._until:
                        return
                    if at > known:
                        self.since = max(at, self.since)
                        self.received.put(line)
                self.trouble = ""
            except UserError as error:
                self.trouble = str(error)
            if not self._wanted.is_set():
                return
            time.sleep(RECONNECT_SECONDS)


class Follower:
    """Prints the logs of the wanted members of the newest generation.

    The members' pods may change.
    """

    def __init__(
        self,
        source: LogSource,
        *,
        wanted: Callable[[Member], bool],
        prefix: bool,
        write: Callable[[str], None],
        remark: Callable[[str], None],
    ) -> None:
        """Follow a job.

        Args:
            source: Where status and logs come from.
            wanted: Which members of a generation to follow.
            prefix: Whether each line starts with the name of its pod.
            write: Prints a line of a log.
            remark: Prints what this command has to say itself.
        """
        self._source = source
        self._wanted = wanted
        self._prefix = prefix
        self._write = write
        self._remark = remark
        self._logs: dict[str, PodLog] = {}
        # Logs of pods that are no longer wanted, to print what they said while they were.
        self._leaving: list[PodLog] = []
        self._generation: int | None = None
        self._said = ""

    def run(self) -> Phase:
        """Follow the job to its end, and return its last phase.

        Raises:
            UserError: The job doesn't exist, no member of its generation is wanted, or the API server doesn't answer.
        """
        statuses = answers(self._source.status, every=POLL_SECONDS, remark=self._remark)
        while True:
            status = next(statuses)
            unended = [log for log in self._leaving if not log.has_ended(within=0)]
            self._print([*self._leaving, *self._logs.values()])
            self._leaving = unended
            if status.generation is None:
                self._say(status.message or (UNSEEN if status == TrainingJobStatus() else WAITS))
            elif status.generation.number != self._generation:
                self._follow(status.generation)
            if status.phase in FINISHED_PHASES:
                return self._finish(status)

    def _follow(self, generation: GenerationStatus) -> None:
        if not generation.members:
            raise UserError(
                f"This version of spottrain does not understand the members of generation {generation.number}, which "
                "a newer operator may have written: upgrade spottrain on this machine to see their logs."
            )
        members = [member for member in generation.members if self._wanted(member)]
        if not members and self._generation is None:
            highest = max(member.node_rank for member in generation.members)
            raise UserError(f"Generation {generation.number} has no such member: its node ranks are 0 to {highest}.")
        pods = {member.pod: member.node_rank for member in members}
        for pod in self._logs.keys() - pods.keys():
            self._leaving.append(self._logs.pop(pod))
            self._leaving[-1].leave(until=generation.started_at + CLOCKS_DIFFER)
        for pod in pods.keys() - self._logs.keys():
            # The first pods are shown from their start, later ones from the generation that they joined.
            since = _BEGINNING if self._generation is None else generation.started_at - CLOCKS_DIFFER
            self._logs[pod] = PodLog(self._source, pod, since)
            self._logs[pod].start()
        self._generation = generation.number
        places = ", ".join(f"node rank {rank} on {pod}" for rank, pod in sorted((r, p) for p, r in pods.items()))
        self._say(f"Generation {generation.number}: {places or 'no such member'}.")

    def _finish(self, status: TrainingJobStatus) -> Phase:
        for log in self._logs.values():
            log.leave()
        for log in self._leaving:
            self._print_to_its_end(log)
        for log in self._logs.values():
            self._print_to_its_end(log)
            if log.trouble:
                self._remark(log.trouble)
        self._remark(f"{status.phase.value}: {status.message}")
        return status.phase

    def _print_to_its_end(self, log: PodLog) -> None:
        """Print the rest of a log, however long it is, unless its pod falls silent."""
        heard_at = time.monotonic()
        while not log.has_ended(within=POLL_SECONDS / 5) and time.monotonic() - heard_at < LAST_LINES_SECONDS:
            if self._print([log]):
                heard_at = time.monotonic()
        self._print([log])

    def _print(self, logs: Iterable[PodLog]) -> bool:
        """Print what was received. Return whether there was anything."""
        printed = False
        for log in logs:
            while not log.received.empty():
                line = log.received.get()
                self._write(f"[{log.pod}] {line}" if self._prefix else line)
                printed = True
        return printed

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._remark(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogs:
    """The LogSource of a job on a cluster."""

    reader: JobReader
    namespace: str
    job: str

    def status(self) -> TrainingJobStatus:
        return self.reader.status(self.namespace, self.job)

    def lines(self, pod: str, since: datetime) -> Iterator[tuple[datetime, str]]:
        return self.reader.log_lines(self.namespace, pod, None if since == _BEGINNING else since)
