"""The streams of `kubectl exec`, `attach`, `cp` and `port-forward`.

This module chooses the command of this machine that serves each request. The program kubelet-streams speaks the
protocols; see local-cluster/controlplane/kubelet-streams. It runs once for each request, under a shim, with the
decrypted connection as its standard input.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from aiohttp import web

from spottrain_local.node.containers import ContainerRuntime, HostCommand, StartError
from spottrain_local.node.pod_worker import PodWorker
from spottrain_local.node.shimmed_processes import ATTACH_SOCKET

logger = logging.getLogger(__name__)

NO_PROGRAM = (
    "This node has no kubelet-streams, which serves exec, attach, cp and port-forward. Stop the cluster, and start "
    "it again with `spottrain local up`, without --no-exec. If KUBEBUILDER_ASSETS is set, unset it first."
)
_MAX_LINE = 2**16

FindPod = Callable[[str, str], PodWorker | None]


class StreamRefusedError(Exception):
    """The request cannot be served; the text says why."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """A request for a stream. Without a container it is for the pod's ports."""

    kind: str
    namespace: str
    pod: str
    container: str = ""
    command: tuple[str, ...] = ()
    stdin: bool = False
    tty: bool = False


def parse_stream_request(target: str) -> StreamRequest | None:
    """Parse the target of an HTTP request: `/exec/NAMESPACE/POD/CONTAINER?command=…`.

    Before the container, there may be the pod's UID.

    Returns:
        None if the request is not for a stream.
    """
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    match [unquote(part) for part in parts.path.split("/")[1:]]:
        case ["exec" | "attach" as kind, namespace, pod, *_, container]:
            return StreamRequest(
                kind=kind,
                namespace=namespace,
                pod=pod,
                container=container,
                command=tuple(query.get("command", ())),
                stdin=query.get("input") == ["1"],
                tty=query.get("tty") == ["1"],
            )
        case ["portForward", namespace, pod, *_]:
            return StreamRequest(kind="portForward", namespace=namespace, pod=pod)
    return None


class StreamServer:
    """Serves the streams of one node."""

    def __init__(self, find_pod: FindPod, runtime: ContainerRuntime, program: Path | None) -> None:
        self._find_pod = find_pod
        self._runtime = runtime
        self._program = program
        self._numbers = count(1)
        self._serving: set[asyncio.Task[None]] = set()

    def start(self, request: StreamRequest, head: bytes, client: asyncio.Transport) -> None:
        """Serve one client beside others, until it, the command or the container ends.

        `head` is what the client has sent.
        """
        task = asyncio.create_task(self._serve(request, head, client))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, request: StreamRequest, head: bytes, client: asyncio.Transport) -> None:
        try:
            pod, command = self._command(request)
            await self._run(request, pod, command, head, client)
        except StreamRefusedError as error:
            _refuse(client, error.status, str(error))
        except Exception:
            logger.exception("%s in pod %s/%s failed", request.kind, request.namespace, request.pod)
            client.abort()

    def _command(self, request: StreamRequest) -> tuple[PodWorker, HostCommand]:
        pod = self._find_pod(request.namespace, request.pod)
        if pod is None:
            raise StreamRefusedError(HTTPStatus.NOT_FOUND, f'pod "{request.pod}" not found')
        if self._program is None:
            raise StreamRefusedError(HTTPStatus.NOT_IMPLEMENTED, NO_PROGRAM)
        if request.kind == "portForward":
            return pod, self._runtime.forward_command(pod.context.sandbox, self._program)
        try:
            run = pod.running(request.container)
        except LookupError as error:
            raise StreamRefusedError(HTTPStatus.BAD_REQUEST, error.args[0]) from error
        program = str(self._program)
        if request.kind == "attach":
            return pod, HostCommand(argv=(program, "attach", ATTACH_SOCKET), env={}, cwd=str(run.directory))
        if not request.command:
            raise StreamRefusedError(HTTPStatus.BAD_REQUEST, "exec needs a command")
        inside = self._runtime.exec_command(run, request.command, stdin=request.stdin, tty=request.tty)
        return pod, replace(inside, argv=(program, "exec", "--", *inside.argv))

    async def _run(
        self, request: StreamRequest, pod: PodWorker, command: HostCommand, head: bytes, client: asyncio.Transport
    ) -> None:
        directory = pod.context.directory / "streams" / str(next(self._numbers))
        ours, its = socket.socketpair()
        try:
            process = await self._runtime.execute(command, directory, its)
        except (StartError, OSError) as error:
            ours.close()
            raise StreamRefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        finally:
            its.close()
        with pod.context.sessions.keep(request.container, process):
            try:
                await _relay(client, ours, head)
            finally:
                process.kill()
                await process.wait()
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _refuse(client: asyncio.Transport, status: HTTPStatus, message: str) -> None:
    body = json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Status",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": status.phrase.replace(" ", ""),
            "code": status.value,
        }
    ).encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    client.write("\r\n".join([*lines, "", ""]).encode() + body)
    client.close()


class _Side(asyncio.Protocol):
    """One side of a relay.

    It sends what it receives to the peer, as fast as the peer takes it.
    """

    def __init__(self, peer: asyncio.Transport) -> None:
        self._peer = peer
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._peer.write(data)

    def pause_writing(self) -> None:
        self._peer.pause_reading()

    def resume_writing(self) -> None:
        self._peer.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._peer.close()
        self.closed.set()


async def _relay(client: asyncio.Transport, program: socket.socket, head: bytes) -> None:
    """Relay between client and program until one of them closes its side.

    Then close the other side.
    """
    loop = asyncio.get_running_loop()
    inside, program_side = await loop.create_unix_connection(lambda: _Side(client), sock=program)
    client_side = _Side(inside)
    inside.write(head)
    client.set_protocol(client_side)
    client.resume_reading()
    if client.is_closing():
        inside.close()
    await program_side.closed.wait()


class ConnectionFront(asyncio.Protocol):
    """Reads the first line of each connection, to find the requests for streams.

    aiohttp serves all other requests. The API server makes a separate connection for each stream.
    """

    def __init__(self, streams: StreamServer, web_server: web.Server) -> None:
        self._streams = streams
        self._web_server = web_server
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._client = transport

    def data_received(self, data: bytes) -> None:
        self._head += data
        line, end, _ = self._head.partition(b"\r\n")
        if not end and len(line) < _MAX_LINE:
            return
        words = line.decode("latin-1").split(" ")
        request = parse_stream_request(words[1]) if len(words) == 3 else None
        if request:
            self._client.pause_reading()
            self._streams.start(request, self._head, self._client)
        else:
            handler = self._web_server()
            self._client.set_protocol(handler)
            handler.connection_made(self._client)
            handler.data_received(self._head)


class KubeletSite:
    """The kubelet's port: an aiohttp application, and streams."""

    def __init__(self, runner: web.AppRunner, streams: StreamServer) -> None:
        self._runner = runner
        self._streams = streams
        self._server: asyncio.Server | None = None

    async def start(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        """Serve the port."""
        await self._runner.setup()
        web_server = self._runner.server
        assert web_server is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ConnectionFront(self._streams, web_server), sock=listening, ssl=tls
        )

    async def cleanup(self) -> None:
        """Close the port, and end the requests that aiohttp serves."""
        if self._server:
            self._server.close()
        with contextlib.suppress(ConnectionError):
            await self._runner.cleanup()
