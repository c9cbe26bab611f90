"""The states of a container, and the protocol of the runtime that runs it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

ContainerKind = Literal["init", "sidecar", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Not running. `reason` is the kubelet's word, `message` is a sentence."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Running since `started_at` (RFC 3339)."""

    started_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """Ended. `exit_code` is 128 + signal for a process that a signal ended, 128 for one that never started."""

    exit_code: int
    reason: str
    message: str = ""
    signal: int = 0
    started_at: str = ""
    finished_at: str = ""
    container_id: str = ""


ContainerState = Waiting | Running | Terminated


@dataclass(slots=True, kw_only=True)
class ContainerRecord:
    """The state of one container of a pod, for the pod's status."""

    name: str
    image: str
    kind: ContainerKind = "main"
    state: ContainerState = field(default_factory=lambda: Waiting(reason="ContainerCreating"))
    last: Terminated | None = None
    restart_count: int = 0
    started: bool = False
    ready: bool = False
    container_id: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether it ended with exit code 0."""
        return isinstance(self.state, Terminated) and self.state.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRun:
    """One run of a container's command. `directory` holds the run's files: spec and exit record."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    log_path: Path
    directory: Path
    container_id: str


class StartError(Exception):
    """The command could not be started; the text says why."""


class RunningContainer(Protocol):
    """A started container."""

    async def wait(self) -> Terminated:
        """Wait until nothing of the container is left."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process."""
        ...

    def kill(self) -> None:
        """Kill everything in the container."""
        ...


class ContainerRuntime(Protocol):
    """Starts containers. One implementation runs them as processes of this machine."""

    async def start(self, run: ContainerRun) -> RunningContainer:
        """Start a container.

        Raises:
            StartError: It could not be started.
        """
        ...

    def recover(self, directory: Path, container_id: str) -> Terminated | None:
        """Return how a run of an earlier node process ended, or None if there is no record."""
        ...
