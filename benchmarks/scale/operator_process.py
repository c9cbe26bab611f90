"""The operator as a process, and what it costs."""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil

import spottrain_api
import spottrain_operator
import spottrain_runtime
from benchmarks.operator_environment import operator_environment
from benchmarks.ports import free_ports
from benchmarks.scale.api_server import NAMESPACE
from spottrain_api.contract.names import FILE_CONTROL_CA, FILE_CONTROL_URL, PATH_ASSIGNMENT
from spottrain_local.node.api import ApiClient
from spottrain_local.processes import ProcessSpec, start_process
from spottrain_operator.control_api.certificate_keeper import SECRET_NAME

SOURCES = [str(Path(module.__path__[0]).parent) for module in (spottrain_runtime, spottrain_api, spottrain_operator)]


class OperatorProcess:
    """The process `python -m spottrain_operator` against one API server.

    It can be killed and started again.
    """

    def __init__(
        self,
        kubeconfig: Path,
        client: ApiClient,
        folder: Path,
        namespace: str = NAMESPACE,
        main: Callable[[], int] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Prepare the process.

        `main` runs in a fork of this process instead of the command. This saves the imports of each start. `python`
        runs the command. It needs only the packages of the operator's image.
        """
        self._namespace = namespace
        self._main = main
        self._command = (python, "-m", "spottrain_operator")
        port, health_port, metrics_port = free_ports(3)
        self.url = f"https://127.0.0.1:{port}"
        self.health_url = f"http://127.0.0.1:{health_port}"
        # What the kubelet writes for agents.
        self.address_folder = folder / "control"
        self.address_folder.mkdir()
        self._client = client
        self.log_file = folder / "operator.log"
        self._env = {
            **operator_environment(
                kubeconfig, namespace, port=port, health_port=health_port, metrics_port=metrics_port
            ),
            # Other operators may lead other namespaces.
            "SPOTTRAIN_WATCH_NAMESPACES": namespace,
            "SPOTTRAIN_LOG_LEVEL": "WARNING",
            "PYTHONPATH": os.pathsep.join(SOURCES),
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        os.environ.pop("KUBERNETES_SERVICE_HOST", None)
        spec = ProcessSpec(
            name="operator", argv=self._command, main=self._main, log_file=self.log_file, env=self._env
        )
        self._process = await start_process(spec)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def cost(self) -> tuple[float, float, int]:
        """The present time, its processor seconds so far, and its resident bytes."""
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        times = process.cpu_times()
        return time.monotonic(), times.user + times.system, process.memory_info().rss

    async def until_ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it leads and serves."""
        while True:
            try:
                async with session.get(f"{self.health_url}/readyz") as answer:
                    if answer.status == 200:
                        return await self._write_address()
            except aiohttp.ClientError:
                pass
            assert self._process is not None
            if self._process.returncode is not None:
                raise RuntimeError(f"the operator has ended; its log: {self.log_file.read_text()[-2000:]}")
            await asyncio.sleep(0.05)

    @property
    def authority(self) -> str:
        """What agents trust, in PEM."""
        return (self.address_folder / FILE_CONTROL_CA).read_text()

    async def _write_address(self) -> None:
        secret = await self._client.get(f"/api/v1/namespaces/{self._namespace}/secrets/{SECRET_NAME}")
        (self.address_folder / FILE_CONTROL_CA).write_bytes(base64.b64decode(secret["data"]["ca.crt"]))
        (self.address_folder / FILE_CONTROL_URL).write_text(self.url)

    async def until_assigned(self, session: aiohttp.ClientSession, token: str) -> None:
        """Wait until the operator has an assignment for the pod with this token.

        By then, it has decided on the pod's job.
        """
        headers, trust = {"Authorization": f"Bearer {token}"}, ssl.create_default_context(cadata=self.authority)
        while True:
            try:
                async with session.get(self.url + PATH_ASSIGNMENT, headers=headers, ssl=trust) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):  # a busy operator may take longer than the session waits
                pass
            await asyncio.sleep(0.1)
