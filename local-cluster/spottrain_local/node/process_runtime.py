"""Containers as processes of this machine."""

import socket
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from spottrain_local.node.containers import ContainerConfigError, ContainerRun, HostCommand, PodSandbox, Terminated
from spottrain_local.node.process_environment import (
    Surroundings,
    process_arguments,
    process_command,
    process_environment,
    working_directory,
)
from spottrain_local.node.shimmed_processes import ShimmedProcess, ShimmedProcesses, recover


class ProcessRuntime:
    """Runs containers as processes.

    Images are ignored; limits and securityContext are not enforced. `args` without `command` are the command, as with
    an image that has no entrypoint.
    """

    def __init__(self, processes: ShimmedProcesses, around: Surroundings | None = None) -> None:
        self._processes = processes
        self._around = around or Surroundings()

    @property
    def version(self) -> str:
        return f"process://{metadata.version('spottrain')}"

    async def open(self) -> None:
        """Everything that an earlier node process started has ended with it."""

    def listen(self, ip: str, port: int) -> socket.socket:
        return socket.create_server((ip, port), backlog=128)

    async def add_pod(self, pod: PodSandbox) -> None:
        for name in ("home", "tmp"):
            (pod.directory / name).mkdir(parents=True, exist_ok=True)

    async def remove_pod(self, pod: PodSandbox) -> None:
        """The pod's folders are the node's, which removes them with its logs."""

    async def prepare(self, run: ContainerRun) -> None:
        if not run.command and not run.args:
            raise ContainerConfigError(
                f"container {run.name!r} has no command. This node has no images, so set command in the pod's spec"
            )

    async def start(self, run: ContainerRun) -> ShimmedProcess:
        return await self._processes.start(
            process_command(run, self._around),
            directory=run.directory,
            log_path=run.log_path,
            container_id=run.container_id,
            attach=run.input,
        )

    def exec_command(
        self, run: ContainerRun, command: Sequence[str], *, stdin: bool = False, tty: bool = False
    ) -> HostCommand:
        return HostCommand(
            argv=process_arguments(tuple(command), run.mounts),
            env=process_environment(run, self._around),
            cwd=working_directory(run, self._around),
        )

    def forward_command(self, pod: PodSandbox, program: Path) -> HostCommand:
        return HostCommand(argv=(str(program), "forward", pod.ip), env={}, cwd="/")

    async def execute(
        self, command: HostCommand, directory: Path, connection: socket.socket | None = None
    ) -> ShimmedProcess:
        return await self._processes.start(
            command, directory=directory, log_path=directory / "log", connection=connection
        )

    def recover(self, directory: Path, container_id: str) -> Terminated | None:
        return recover(directory, container_id)
