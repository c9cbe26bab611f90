"""The agent's side of replicas: it runs the process that holds them, if a generation asks for it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys

from spottrain_agent.ports import ReservedPort
from spottrain_agent.processes import Reaper
from spottrain_api.contract.replicas import HeldShards

logger = logging.getLogger(__name__)

RESTART_DELAY_SECONDS = 0.5
ANSWER_SECONDS = 5.0


class ReplicaProcess:
    """Starts `replica_store` with the first token, and again if it dies. Its replicas are lost then."""

    def __init__(self, reaper: Reaper, address: str) -> None:
        self._reaper = reaper
        self._port = ReservedPort(address)
        self._token = ""
        self._wanted = asyncio.Event()
        self._answered = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self.pid: int | None = None
        self.held: tuple[HeldShards, ...] = ()

    @property
    def port(self) -> int:
        return self._port.number

    async def open(self, token: str) -> None:
        """Admit only the ranks of the generation with this token.

        If that fails, they train without replicas on this member.
        """
        self._token = token
        self._answered.clear()
        self._wanted.set()
        if self._writer is not None:
            self._writer.write(f"{token}\n".encode())
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._answered.wait()
        except TimeoutError:
            logger.warning(
                "the process that holds replicas did not start in %.0f s; training continues without it",
                ANSWER_SECONDS,
            )

    async def run(self) -> None:
        """Keep the process alive from the first `open`, until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                await self._run_once()
            except OSError as error:
                # Processes or open files are short, which may pass. Ranks train without replicas meanwhile.
                logger.warning("the process that holds replicas can't start: %s", error)
            await asyncio.sleep(RESTART_DELAY_SECONDS)

    async def _run_once(self) -> None:
        process, ours = self._spawn()
        self.pid = process.pid
        ended = self._reaper.ended(process.pid)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        try:
            self._writer.write(f"{self._token}\n".encode())
            while line := await reader.readline():
                self.held = tuple(HeldShards.model_validate(step) for step in json.loads(line))
                self._answered.set()
            process.returncode = await ended
            logger.warning(
                "the process that holds replicas ended with exit code %s; starting it again, empty",
                process.returncode,
            )
        finally:
            self._writer.close()
            self._writer, self.pid, self.held = None, None, ()

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._port.descriptor)
        process = subprocess.Popen(
            [sys.executable, "-m", "spottrain_agent.replica_store", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        return process, ours
