"""The states of a container, and the protocol of the runtime that runs it."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from spottrain_local.node.limits import ContainerLimits
from spottrain_local.node.usage import Usage

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
    """The state of a container that has ended.

    `exit_code` is 128 + signal if a signal ended the process, and 128 if the process never started.
    """

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
class Mount:
    """A file or folder of this machine at a path of a container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerInput:
    """What a container has as its input.

    `once` means that its input ends with that of the first client that attaches.
    """

    stdin: bool = False
    once: bool = False
    tty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSandbox:
    """What the containers of a pod share.

    `directory` is the pod's folder on this machine.
    """

    uid: str
    namespace: str
    hostname: str
    ip: str
    host_network: bool
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRun:
    """One run of a container.

    `directory` holds the run's files: spec and exit record.

    `command` and `args` are those of the pod's spec, with variables replaced. Where both are empty, or `command` is,
    the image has its own. An empty `working_dir` is the image's.
    """

    pod: PodSandbox
    name: str
    image: str
    pull_policy: str = "IfNotPresent"
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str]
    working_dir: str = ""
    mounts: tuple[Mount, ...] = ()
    limits: ContainerLimits = ContainerLimits()
    input: ContainerInput = ContainerInput()
    log_path: Path
    directory: Path
    container_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """A command of this machine.

    Its standard input and output are those of what it stands for.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


class StartError(Exception):
    """The command could not be started; the text says why."""


class SandboxError(Exception):
    """The pod's network cannot be set up yet; the text says why. The node retries."""


class ContainerConfigError(Exception):
    """The container cannot be configured yet; the text says what is missing.

    The node retries.
    """


class ImageError(Exception):
    """The image is not available yet; the text says why.

    `reason` is the kubelet's word. The node retries.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RunningContainer(Protocol):
    """A started container, or a command in one."""

    async def wait(self) -> Terminated:
        """Wait until nothing of it is left."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to its first process."""
        ...

    def kill(self) -> None:
        """Kill everything in it."""
        ...

    def usage(self) -> Usage:
        """Return what its processes use."""
        ...


class StreamSessions:
    """What clients have started in a pod, by the container that they use."""

    def __init__(self) -> None:
        self._sessions: list[tuple[str, RunningContainer]] = []

    @contextlib.contextmanager
    def keep(self, container: str, process: RunningContainer) -> Iterator[None]:
        """Keep a session for the time of a block."""
        entry = (container, process)
        self._sessions.append(entry)
        try:
            yield
        finally:
            self._sessions.remove(entry)

    def end(self, container: str | None = None) -> None:
        """Kill the sessions of a container that has ended, or all of the pod."""
        for name, process in self._sessions:
            if container in (None, name):
                process.kill()


class ContainerRuntime(Protocol):
    """Runs the containers of one node: as processes of this machine, or with podman."""

    @property
    def version(self) -> str:
        """Name and version, as in a Node's status: `podman://4.3.1`."""
        ...

    async def open(self) -> None:
        """Prepare the node. What an earlier node process has left is removed.

        Raises:
            OSError: The node cannot run on this machine; the text says why.
        """
        ...

    def listen(self, ip: str, port: int) -> socket.socket:
        """Return a listening socket at an address of the node."""
        ...

    async def add_pod(self, pod: PodSandbox) -> None:
        """Set up what the pod's containers share. It may exist already.

        Raises:
            SandboxError: It is not possible yet.
        """
        ...

    async def remove_pod(self, pod: PodSandbox) -> None:
        """Remove what the pod's containers shared."""
        ...

    async def prepare(self, run: ContainerRun) -> None:
        """Check that the container can be started so, and make its image available.

        Raises:
            ContainerConfigError: It cannot be started so.
            ImageError: Its image is not available yet.
        """
        ...

    async def start(self, run: ContainerRun) -> RunningContainer:
        """Start a container that is prepared.

        Raises:
            StartError: It could not be started.
        """
        ...

    def exec_command(
        self, run: ContainerRun, command: Sequence[str], *, stdin: bool = False, tty: bool = False
    ) -> HostCommand:
        """Return this machine's command that runs `command` in the container.

        It does what `kubectl exec` does.
        """
        ...

    def forward_command(self, pod: PodSandbox, program: Path) -> HostCommand:
        """Return the command of this machine that forwards to the pod's ports.

        It runs `program` with `forward` and the host that has these ports.
        """
        ...

    async def execute(
        self, command: HostCommand, directory: Path, connection: socket.socket | None = None
    ) -> RunningContainer:
        """Start a command of this machine.

        Its output goes to the file `log` in `directory`. `connection` is its standard input.

        Raises:
            StartError: It could not be started.
        """
        ...

    def recover(self, directory: Path, container_id: str) -> Terminated | None:
        """Return how an earlier node process's run ended, or None without a record."""
        ...
