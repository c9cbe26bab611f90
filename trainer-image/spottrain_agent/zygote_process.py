"""The agent's side of the zygote: it keeps one running, and asks it to start generations."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from spottrain_agent.launcher import LaunchRequest
from spottrain_agent.processes import Reaper

logger = logging.getLogger(__name__)

RESTART_DELAY_SECONDS = 0.5
# A zygote that dies over a request takes two attempts: one for the lost answer, one for its end.
LAUNCH_ATTEMPTS = 5


class LaunchFailed(Exception):
    """No process could be started for a generation. The message is for the user."""


class StartedProcess(Protocol):
    """A child of this process. The reaper collects it, not its `Popen`."""

    pid: int
    returncode: int | None


# Starts a zygote. Returns it and our end of its socket.
SpawnZygote = Callable[[], tuple[StartedProcess, socket.socket]]


class ZygoteProcess:
    """Runs zygotes, a new one whenever one dies. It sends launch requests to the living one."""

    def __init__(self, reaper: Reaper, on_change: Callable[[], None], spawn: SpawnZygote) -> None:
        self._reaper = reaper
        self._spawn = spawn
        self._on_change = on_change
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ready = asyncio.Event()
        self._error: str | None = None
        self._was_warm = False
        self._launching = asyncio.Lock()
        self._exchange: asyncio.Task[int | None] | None = None
        self.pid: int | None = None

    @property
    def is_warm(self) -> bool:
        return self._streams is not None

    async def run(self) -> None:
        """Keep a zygote alive until cancelled.

        Raises:
            LaunchFailed: None of the first `LAUNCH_ATTEMPTS` could start, or import torch.
        """
        num_cold = 0
        while num_cold < LAUNCH_ATTEMPTS or self._was_warm:
            try:
                await self._run_once()
            except OSError as error:
                # Processes or open files are short, which may pass. Ranks may train meanwhile.
                self._error = f"The pod can't start another process: {error}."
                logger.warning(self._error)
            num_cold += 1
            # Wake up a launch that waits, so that it counts the attempt.
            self._ready.set()
            await asyncio.sleep(RESTART_DELAY_SECONDS)
        raise self._failure()

    async def launch(self, request: LaunchRequest) -> int:
        """Start torchrun for a generation.

        It waits until the zygote is warm. If the zygote dies over the request, the next one gets it.

        Returns:
            The launcher's process id. It is a child of this process.

        Raises:
            LaunchFailed: No zygote could start it.
        """
        async with self._launching:
            for _ in range(LAUNCH_ATTEMPTS):
                pid = await self._launch_once(request)
                if pid is not None:
                    return pid
        raise self._failure()

    async def settle(self) -> None:
        """Wait until no request is under way. After a cancelled launch, its process exists by then, or never will."""
        if self._exchange is not None:
            await asyncio.wait({self._exchange})

    async def _launch_once(self, request: LaunchRequest) -> int | None:
        await self._ready.wait()
        if self._streams is None:
            self._ready.clear()
            return None
        streams = self._streams
        self._exchange = asyncio.create_task(_ask(*streams, request))
        pid = await asyncio.shield(self._exchange)
        if pid is None and self._streams is streams:
            # It is dead, even if its end isn't known yet: don't ask it again.
            self._ready.clear()
        return pid

    async def _run_once(self) -> None:
        process, ours = self._spawn()
        self.pid = process.pid
        ended = self._reaper.ended(process.pid)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            await self._greet(reader, writer)
            exit_code = await ended
            process.returncode = exit_code
            logger.warning("the zygote ended with exit code %s; starting a new one", exit_code)
        finally:
            self._streams = None
            self.pid = None
            writer.close()
            self._on_change()

    def _failure(self) -> LaunchFailed:
        return LaunchFailed(
            self._error
            or f"The processes of the generation could not start in {LAUNCH_ATTEMPTS} attempts. "
            "Read the pod's log for the reason."
        )

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        greeting = json.loads(line) if line else {}
        error = greeting.get("error")
        if error is not None and error != self._error:
            logger.error(error)
        self._error = error
        if greeting.get("warm"):
            self._streams = (reader, writer)
            self._was_warm = True
            self._ready.set()
            self._on_change()


def spawn_zygote() -> tuple[StartedProcess, socket.socket]:
    """Start a zygote in an interpreter of its own."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "spottrain_agent.zygote", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=_environment(),
    )
    theirs.close()
    return process, ours


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: LaunchRequest) -> int | None:
    try:
        writer.write(request.to_json().encode() + b"\n")
        await writer.drain()
        reply = await reader.readline()
    except OSError:
        return None
    return int(json.loads(reply)["pid"]) if reply else None


def _environment() -> dict[str, str]:
    """The zygote's environment: settings that must be there before torch is imported."""
    environment = dict(os.environ)
    # Thread pools don't survive a fork. The ranks then use the number that they are given (threads.py).
    environment["OMP_NUM_THREADS"] = "1"
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # torchrun counts the GPUs. Through NVML, that leaves no CUDA state behind that a fork would break.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # The local cluster gives pods the names of Services by libnss_wrapper, which refuses the IPv6-mapped look-up of
    # an address. torch's store starts with such a look-up, so that the ranks would never connect.
    if "libnss_wrapper" in environment.get("LD_PRELOAD", ""):
        del environment["LD_PRELOAD"]
    return environment
