"""The process beside the agent that holds replicated shards, of its own ranks and of a peer's.

`python -m spottrain_agent.replica_store CONTROL LISTEN`, with two socket descriptors.

CONTROL connects it with the agent. The agent writes the generation's token, one line each time it changes. This
process answers with a line that lists the steps that it holds, and writes such a line again whenever they change.

LISTEN serves HTTP to ranks, with the token as bearer:

    PUT  /<generation>/<sequence>/<name>    an object of a replicated step; the answer has its cost in processor time
    POST /held                              HeldShards: all objects of these ranks are there
    GET  /<generation>/<sequence>/<name>    the object, or a `Range` of it

The process outlives generations and does not import torch. If the pod runs out of memory, it is the first to be
killed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pydantic import ValidationError

from spottrain_api.contract.names import PROCESSOR_SECONDS
from spottrain_api.contract.replicas import HeldShards
from spottrain_runtime.processes import die_with_parent

# While a step is replicated, the previous one must stay complete.
NUM_KEPT = 2
_TIMEOUT_SECONDS = 30.0
_PIECE_BYTES = 1 << 20  # other threads get their turn between two pieces
_PATH = re.compile(r"/(\d+)/(\d+)/([\w.-]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")

Place = tuple[int, int]
"""Generation and sequence of a replicated step."""


class ReplicaStore:
    """Objects of the newest replicated steps. A step counts for a rank once all of the rank's objects are there."""

    def __init__(self, on_change: Callable[[tuple[HeldShards, ...]], None]) -> None:
        self._on_change = on_change
        self._objects: dict[Place, dict[str, bytearray]] = {}
        self._steps: dict[Place, HeldShards] = {}
        self._spare: list[bytearray] = []
        self._lock = threading.Lock()

    def allocate(self, size: int) -> bytearray:
        """Memory for an object, reused from an older step if the size fits.

        Fresh pages cost more than copying the bytes.

        Raises:
            MemoryError: The memory is used up.
        """
        with self._lock:
            fitting = next((spare for spare in self._spare if len(spare) == size), None)
            if fitting is not None:
                self._spare = [spare for spare in self._spare if spare is not fitting]
        return bytearray(size) if fitting is None else fitting

    def put(self, place: Place, name: str, data: bytearray) -> None:
        with self._lock:
            self._objects.setdefault(place, {})[name] = data

    def get(self, place: Place, name: str) -> bytearray | None:
        with self._lock:
            return self._objects.get(place, {}).get(name)

    def hold(self, step: HeldShards) -> None:
        """Note that the objects of these ranks are complete, and drop steps that are too old."""
        with self._lock:
            place = (step.generation, step.sequence)
            known = self._steps.get(place)
            ranks = {*step.ranks, *(known.ranks if known is not None else ())}
            self._steps[place] = step.model_copy(update={"ranks": tuple(sorted(ranks))})
            oldest = sorted(self._steps)[-NUM_KEPT:][0]
            self._steps = {kept: self._steps[kept] for kept in sorted(self._steps) if kept >= oldest}
            if over := [place for place in self._objects if place < oldest]:
                # A rank that still reads one of these detects the change by its checksums.
                self._spare = [data for place in over for data in self._objects.pop(place).values()]
            self.report()

    def report(self) -> None:
        """Report the steps that are held."""
        self._on_change(tuple(self._steps.values()))


class ReplicaServer(ThreadingHTTPServer):
    """Serves a store of replicas to whoever has the token."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, listen: socket.socket, store: ReplicaStore) -> None:
        super().__init__(listen.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen
        self.store = store
        self.token = ""
        self.server_activate()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection: a peer may go away at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _TIMEOUT_SECONDS
    server: ReplicaServer

    def do_PUT(self) -> None:
        started = time.thread_time()
        data = self._body()
        match = _PATH.fullmatch(self.path)
        if data is None:
            return
        if match is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        self.server.store.put((int(match[1]), int(match[2])), match[3], data)
        self._answer(HTTPStatus.NO_CONTENT, headers={PROCESSOR_SECONDS: f"{time.thread_time() - started:.6f}"})

    def do_POST(self) -> None:
        data = self._body()
        if data is None:
            return
        try:
            self.server.store.hold(HeldShards.from_json(bytes(data)))
        except ValidationError:
            self._answer(HTTPStatus.BAD_REQUEST)
        else:
            self._answer(HTTPStatus.NO_CONTENT)

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        match = _PATH.fullmatch(self.path)
        found = self.server.store.get((int(match[1]), int(match[2])), match[3]) if match is not None else None
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        part = _RANGE.fullmatch(self.headers.get("Range", ""))
        view = memoryview(found)
        self._answer(HTTPStatus.OK, view[int(part[1]) : int(part[2]) + 1] if part is not None else view)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the pod's log belongs to the user."""

    def _body(self) -> bytearray | None:
        """The body of the request. None if it isn't allowed or didn't arrive whole."""
        if not self._is_allowed():
            return None
        try:
            data = self.server.store.allocate(int(self.headers.get("Content-Length", "0")))
        except (ValueError, MemoryError):
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE)
            return None
        view, filled = memoryview(data), 0
        while filled < len(data):
            length = self.rfile.readinto(view[filled : filled + _PIECE_BYTES])
            if not length:
                self.close_connection = True
                return None
            filled += length
        return data

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if self.server.token and hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return True
        self._refuse(HTTPStatus.FORBIDDEN)
        return False

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer without reading the body, so that the connection can't be used again."""
        self.close_connection = True
        self._answer(status)

    def _answer(
        self, status: HTTPStatus, body: memoryview | bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for begin in range(0, len(body), _PIECE_BYTES):  # the timeout holds for each of them
            self.wfile.write(body[begin : begin + _PIECE_BYTES])


def serve(control: socket.socket, listen: socket.socket) -> None:
    """Serve until the agent closes CONTROL."""
    sending = threading.Lock()

    def report(held: tuple[HeldShards, ...]) -> None:
        with sending:
            control.sendall(json.dumps([step.model_dump(by_alias=True) for step in held]).encode() + b"\n")

    store = ReplicaStore(report)
    server = ReplicaServer(listen, store)
    threading.Thread(target=server.serve_forever, name="replicas", daemon=True).start()
    with contextlib.suppress(ConnectionError):
        for line in control.makefile("r"):
            server.token = line.strip()
            store.report()


def main() -> None:
    die_with_parent()
    # Replicas may go first: training continues without them.
    Path("/proc/self/oom_score_adj").write_text("1000")
    serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))


if __name__ == "__main__":
    main()
