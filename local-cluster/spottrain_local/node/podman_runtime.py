"""Containers by podman, in network namespaces of the node's own."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spottrain_local.node.containers import (
    ContainerRun,
    HostCommand,
    ImageError,
    PodSandbox,
    SandboxError,
    StartError,
    Terminated,
)
from spottrain_local.node.pod_network import PodNetwork
from spottrain_local.node.podman_arguments import check_user, create_arguments, env_lines, start_failure
from spottrain_local.node.shim import descendants
from spottrain_local.node.shimmed_processes import ShimmedProcess, ShimmedProcesses, recover
from spottrain_local.node.usage import Usage, usage_of_tree
from spottrain_local.podman import NETWORK_LABEL, NODE_LABEL, bridge_name, last_line, remove_leftovers, run
from spottrain_runtime.processes import die_with_parent

logger = logging.getLogger(__name__)

# podman unmounts a container's files after its end.
LINGER_SECONDS = 20.0
_START_POLL_SECONDS = 0.02


class PodmanError(Exception):
    """podman refused; the text is the last line that it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The node of a runtime.

    `network` is the number of its cluster's network; `gateway` serves names.
    """

    name: str
    ip: str
    network: int
    gateway: str


class PodmanContainer:
    """A container whose first process has an id on this machine, too."""

    def __init__(self, name: str, ended: asyncio.Future[Terminated], pid: int) -> None:
        self._name = name
        self._ended = ended
        self._pid = pid
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            self._pidfd = os.pidfd_open(pid)

    async def wait(self) -> Terminated:
        ended = await asyncio.shield(self._ended)
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
        out_of_memory = False
        with contextlib.suppress(PodmanError):
            state = await podman("container", "inspect", "--format={{.State.OOMKilled}}", self._name)
            out_of_memory = state.strip() == "true"
        await _remove(self._name)
        if not out_of_memory:
            return ended
        return Terminated(
            exit_code=ended.exit_code,
            reason="OOMKilled",
            started_at=ended.started_at,
            finished_at=ended.finished_at,
            container_id=ended.container_id,
        )

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        # With a container's first process, the kernel ends all others.
        self._signal(signal.SIGKILL)

    def usage(self) -> Usage:
        return usage_of_tree(self._pid)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)


class PodmanExec:
    """A command in a container.

    Only what it started in the container gets signals. If podman's own processes were killed, the container's end
    would wait for them.
    """

    def __init__(self, process: ShimmedProcess) -> None:
        self._process = process

    async def wait(self) -> Terminated:
        return await self._process.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        if not self._signal(signal.SIGKILL):
            self._process.kill()

    def usage(self) -> Usage:
        return self._process.usage()

    def _signal(self, number: signal.Signals) -> bool:
        own = os.readlink("/proc/self/ns/pid")
        inside = [pid for pid in descendants(self._process.shim_pid) if _pid_namespace(pid) not in ("", own)]
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(inside)


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""  # It has just ended.


class PodmanRuntime:
    """Runs containers with podman.

    `podman start` runs under a shim, so that a killed node takes them with it.
    """

    def __init__(self, node: NodeIdentity) -> None:
        self._node = node
        self._network = PodNetwork(bridge=bridge_name(node.network), node=node.name)
        self._processes = ShimmedProcesses()
        self._version = run("podman", "--version").split()[-1]

    @property
    def version(self) -> str:
        return f"podman://{self._version}"

    async def open(self) -> None:
        await asyncio.to_thread(remove_leftovers, self._node.network, self._node.name)
        await asyncio.to_thread(self._network.add, self._node.ip)

    def listen(self, ip: str, port: int) -> socket.socket:
        return self._network.listen(ip, port)

    async def add_pod(self, pod: PodSandbox) -> None:
        folder = pod.directory / "etc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{pod.ip} {pod.hostname}\n")
        domains = " ".join((f"{pod.namespace}.svc.cluster.local", "svc.cluster.local", "cluster.local"))
        (folder / "resolv.conf").write_text(f"nameserver {self._node.gateway}\nsearch {domains}\noptions ndots:5\n")
        if not pod.host_network:
            try:
                await asyncio.to_thread(self._network.add, pod.ip, pod.uid)
            except OSError as error:
                raise SandboxError(str(error)) from error

    async def remove_pod(self, pod: PodSandbox) -> None:
        if not pod.host_network:
            await asyncio.to_thread(self._network.remove, pod.uid)

    async def prepare(self, run: ContainerRun) -> None:
        user = None if run.pull_policy == "Always" else await _image_user(run.image)
        if user is None:
            if run.pull_policy == "Never":
                text = f'Container image "{run.image}" is not present with pull policy of Never'
                raise ImageError("ErrImageNeverPull", text)
            try:
                await podman("pull", "--quiet", run.image)
            except PodmanError as error:
                raise ImageError("ErrImagePull", str(error)) from error
            user = await _image_user(run.image)
        check_user(run.limits, user or "")

    async def start(self, run: ContainerRun) -> PodmanContainer:
        run.directory.mkdir(parents=True, exist_ok=True)
        name, env_file, pid_file = self._name(run), run.directory / "env", run.directory / "pid"
        env_file.touch(mode=0o600)
        env_file.write_text(env_lines(run.env))
        labels = {NETWORK_LABEL: str(self._node.network), NODE_LABEL: self._node.name}
        namespace = self._network.namespace("" if run.pod.host_network else run.pod.uid)
        arguments = create_arguments(run, name=name, namespace=namespace, env_file=env_file, labels=labels)
        try:
            await podman(*arguments[:1], f"--pidfile={pid_file}", *arguments[1:])
        except PodmanError as error:
            raise StartError(start_failure(str(error), run.env)) from error
        process = await self._processes.start(
            _command("start", "--attach", "--sig-proxy=false", *_interactive(run.input.stdin), name),
            directory=run.directory,
            log_path=run.log_path,
            container_id=run.container_id,
            linger_seconds=LINGER_SECONDS,
            attach=run.input,
        )
        ended = asyncio.ensure_future(process.wait())
        try:
            pid = await _started(ended, pid_file)
        except asyncio.CancelledError:
            process.kill()
            raise
        if pid is None:
            message = _take_last_line(run.log_path)
            await _remove(name)
            raise StartError(start_failure(message, run.env))
        return PodmanContainer(name, ended, pid)

    def _name(self, run: ContainerRun) -> str:
        cluster, pod = bridge_name(self._node.network), run.pod.uid[:8]
        return f"{cluster}.{self._node.name}.{pod}.{run.name}.{run.directory.name}"

    def exec_command(
        self, run: ContainerRun, command: Sequence[str], *, stdin: bool = False, tty: bool = False
    ) -> HostCommand:
        terminal = ["--tty"] if tty else []
        return _command("exec", *_interactive(stdin), *terminal, self._name(run), *command)

    def forward_command(self, pod: PodSandbox, program: Path) -> HostCommand:
        namespace = self._network.namespace("" if pod.host_network else pod.uid)
        argv = ("nsenter", f"--net={namespace}", str(program), "forward", "localhost")
        return HostCommand(argv=argv, env=dict(os.environ), cwd="/")

    async def execute(
        self, command: HostCommand, directory: Path, connection: socket.socket | None = None
    ) -> PodmanExec:
        process = await self._processes.start(
            command, directory=directory, log_path=directory / "log", connection=connection
        )
        return PodmanExec(process)

    def recover(self, directory: Path, container_id: str) -> Terminated | None:
        return recover(directory, container_id)


def _interactive(stdin: bool) -> list[str]:
    return ["--interactive"] if stdin else []


def _command(*arguments: str) -> HostCommand:
    return HostCommand(argv=("podman", *arguments), env=dict(os.environ), cwd="/")


async def podman(*arguments: str) -> str:
    """Run podman and return its output.

    Raises:
        PodmanError: It refused.
    """
    process = await asyncio.create_subprocess_exec(
        "podman",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    output, errors = await process.communicate()
    if process.returncode:
        raise PodmanError(last_line(errors.decode(errors="replace")))
    return output.decode(errors="replace")


async def _remove(name: str) -> None:
    """Remove a container that has ended.

    If that fails, the node's next start or end does it.
    """
    try:
        await podman("rm", "--force", "--ignore", "--time=0", name)
    except PodmanError as error:
        logger.warning("the container %s is not removed: %s", name, error)


async def _image_user(image: str) -> str | None:
    """Return the user of an image of this machine, or None if it is not there.

    Raises:
        ImageError: The name is invalid.
    """
    try:
        return (await podman("image", "inspect", "--format={{.Config.User}}", image)).strip()
    except PodmanError as error:
        if "invalid reference format" in str(error):
            text = f'Failed to apply default image tag "{image}": invalid reference format'
            raise ImageError("InvalidImageName", text) from error
        return None


async def _started(ended: asyncio.Future[Terminated], pid_file: Path) -> int | None:
    """Wait until the container has a first process, and return its id.

    None if the container ended without one.
    """
    while True:
        over = ended.done()
        if pid_file.exists() and (text := pid_file.read_text()):
            return int(text)
        if over:
            return None
        await asyncio.wait({ended}, timeout=_START_POLL_SECONDS)


def _take_last_line(log_path: Path) -> str:
    """Return the last line of a log that has only podman's words, and empty it."""
    lines = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
    log_path.unlink(missing_ok=True)
    return last_line(lines[-1].split(" ", 3)[-1]) if lines else "podman printed nothing"
