"""Commands of this machine, each under a shim (see shim.py).

The shim leaves nothing behind and records the output.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spottrain_local.node import shim
from spottrain_local.node.containers import ContainerInput, HostCommand, StartError, Terminated
from spottrain_local.node.usage import Usage, usage_below

logger = logging.getLogger(__name__)

LOG_MAX_BYTES = 50 * 2**20
# Unix socket of a container's shim, in the directory of its run.
ATTACH_SOCKET = "attach"
_SHIM = str(Path(shim.__file__))


class ShimmedProcess:
    """A command's shim, and what it reports."""

    def __init__(self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, container_id: str) -> None:
        self._popen = popen
        self._reader = reader
        self._container_id = container_id
        self.shim_pid = popen.pid

    async def started(self) -> None:
        """Wait until the command runs.

        Raises:
            StartError: It could not be started.
        """
        message = await self._message()
        if "started" in message:
            return
        await self.wait()
        raise StartError(message.get("failed", "The process that starts containers was killed."))

    async def wait(self) -> Terminated:
        record = await self._message()
        # The shim closes its output when it ends. From here on it only has to be reaped.
        await self._reader.read()
        self._popen.wait()
        return terminated(record, self._container_id)

    async def _message(self) -> dict[str, Any]:
        line = await self._reader.readline()
        return dict(json.loads(line)) if line else {}

    def terminate(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(shim.KILL_ALL)

    def usage(self) -> Usage:
        return usage_below(self.shim_pid)


class ShimmedProcesses:
    """Starts commands of this machine.

    `owns_process` means that this process starts nothing else. It then becomes the subreaper of what it starts: if a
    shim itself is killed, the processes that it leaves become children of this one, and are killed, too.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self._owns_process = owns_process
        if owns_process:
            shim.become_subreaper()
        self._shims: set[int] = set()
        self._clearing: set[asyncio.Task[None]] = set()

    async def start(
        self,
        command: HostCommand,
        *,
        directory: Path,
        log_path: Path,
        container_id: str = "",
        linger_seconds: float = 0.0,
        attach: ContainerInput | None = None,
        connection: socket.socket | None = None,
    ) -> ShimmedProcess:
        """Start a command.

        `directory` gets its spec and exit record, which `recover` reads.

        When the command has ended, what it started has `linger_seconds` to end by itself.

        `attach` lets clients attach to the command by `ATTACH_SOCKET`, and gives it its input. Otherwise its standard
        input is `connection`, or nothing.

        Raises:
            StartError: It could not be started.
        """
        directory.mkdir(parents=True, exist_ok=True)
        spec = directory / "spec.json"
        spec.touch(mode=0o600)
        content = {
            "argv": command.argv,
            "env": command.env,
            "cwd": command.cwd,
            "log": str(log_path),
            "exit": str(directory / "exit.json"),
            "logMaxBytes": LOG_MAX_BYTES,
            "lingerSeconds": linger_seconds,
            "stdin": "inherit" if connection else "null",
        }
        if attach:
            kind = "terminal" if attach.tty else "pipe" if attach.stdin else "null"
            content |= {"stdin": kind, "attach": ATTACH_SOCKET, "stdinOnce": attach.once}
        spec.write_text(json.dumps(content))
        popen = _start_shim(spec, connection)
        self._shims.add(popen.pid)
        process = ShimmedProcess(popen, await _reader(popen, self._ended), container_id)
        try:
            await process.started()
        except asyncio.CancelledError:
            process.kill()
            raise
        return process

    def _ended(self, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        self._shims.discard(popen.pid)
        if self._owns_process and (strays := self._strays()):
            logger.warning("a shim was killed; killing what it left (%d)", len(strays))
            task = asyncio.create_task(self._kill_strays())
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)

    def _strays(self) -> list[int]:
        return shim.descendants(os.getpid(), spare=frozenset(self._shims))

    async def _kill_strays(self) -> None:
        while strays := self._strays():
            shim.kill_each(strays)
            await asyncio.sleep(0.01)
            for pid in strays:
                _reap(pid)


def recover(directory: Path, container_id: str) -> Terminated | None:
    """Return how an earlier node process's command ended, or None without a record."""
    try:
        return terminated(json.loads((directory / "exit.json").read_text()), container_id)
    except (OSError, ValueError):
        return None


def _start_shim(spec: Path, connection: socket.socket | None) -> subprocess.Popen[bytes]:
    """Start a shim, and fork on this thread.

    The kernel sends the parent death signal when the *thread* that forked ends.
    """
    with open(spec.with_name("shim.err"), "ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", _SHIM, str(spec), str(os.getpid())],
            stdin=connection.fileno() if connection else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={"LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # The child of a different orphan. It becomes ours when that one is gone.


def terminated(record: dict[str, Any], container_id: str = "") -> Terminated:
    """Return the state for an exit record.

    An empty record means that the shim was killed.
    """
    if "startError" in record:
        reason, message = "StartError", record["startError"]
    elif not record:
        reason, message = "Error", "The container's processes were killed from outside."
    else:
        reason, message = ("Error" if record["exitCode"] else "Completed"), ""
    now = shim.timestamp()
    return Terminated(
        exit_code=record.get("exitCode", 137),
        signal=record.get("signal", 9),
        reason=reason,
        message=message,
        started_at=record.get("startedAt", now),
        finished_at=record.get("finishedAt", now),
        container_id=container_id,
    )


class _ShimProtocol(asyncio.StreamReaderProtocol):
    """Notices that the shim has closed its output, which means that it has ended."""

    def __init__(self, reader: asyncio.StreamReader, ended: Callable[[], None]) -> None:
        super().__init__(reader)
        self._ended = ended

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()
        super().connection_lost(error)


async def _reader(
    popen: subprocess.Popen[bytes], ended: Callable[[subprocess.Popen[bytes]], None]
) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: _ShimProtocol(reader, lambda: ended(popen)), popen.stdout
    )
    return reader
