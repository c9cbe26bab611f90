"""A proxy before a real object store that plays the faults of a cloud.

It is a pytest plugin.

Everything reaches the store unchanged, signatures included, until `fault` is set. A test sets it here, and another
process by GET /-/fault/NAME.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit
from urllib.request import urlopen

# Name of a fault -> the status, and the code as S3 has it.
ANSWERS = {
    "throttles": (503, "SlowDown"),
    "limits": (429, "TooManyRequests"),
    "denies": (403, "AccessDenied"),
    "vanishes": (404, "NoSuchBucket"),
    "full": (507, "XMinioStorageFull"),
    # Azure's alone.
    "retains": (409, "BlobImmutableDueToPolicy"),
}
# The codes of Azure for the same.
OF_AZURE = {
    "SlowDown": "ServerBusy",
    "AccessDenied": "AuthorizationPermissionMismatch",
    "NoSuchBucket": "ContainerNotFound",
}
# Bodies with a right length that are not what was asked for.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "halves": lambda content: content[: len(content) // 2],
    "alters": lambda content: content[:-2] + bytes(2),
    "pads": lambda content: content + b"?",
}
CONTROL = "/-/fault/"
# Ways of servers that speak S3's protocol in part. They concern requests of one kind, and others are forwarded.
_CHECKSUMS = ("x-amz-checksum-", "x-amz-sdk-checksum-algorithm", "x-amz-trailer")
_CONDITIONS = ("if-match", "if-none-match")
# Headers of requests that such servers ignore.
_IGNORED: dict[str, Collection[str]] = {"ignores conditions": _CONDITIONS, "ignores ranges": ("range",)}
DAWDLE_SECONDS = 2.0


class FaultyProxy(ThreadingHTTPServer):
    """A proxy that forwards to `upstream` (a URL), or plays `fault`.

    `fault` is a key of ANSWERS, a way of servers that know S3 in part (`_refusal`, and "ignores conditions"), "drops"
    (the connection), "hangs" (until the client hangs up), "cuts" (an answer in the middle of its body), "dawdles"
    (takes a body steadily, but little at a time for the first DAWDLE_SECONDS), one of DAMAGES, "errs" (an error
    with status 200), "redirects" (to the upstream), "turns around" (redirects to itself), "ignores ranges", or "" for
    no fault. It holds for `times` requests of paths that contain `within`.
    """

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        split = urlsplit(upstream)
        self.upstream = split.netloc
        self.url = f"http://127.0.0.1:{self.server_port}{split.path}"
        self._lock = threading.Lock()
        self.headers_of_bodies: set[str] = set()
        """Names, in lower case, of the headers that came with bodies."""
        self.play("")

    def play(self, fault: str, times: int = 1 << 30, within: str = "") -> None:
        with self._lock:
            self.fault, self.times, self.within = fault, times, within

    def fault_of(self, path: str) -> str:
        with self._lock:
            if self.within not in path:
                return ""
            self.times -= 1
            return self.fault if self.times >= 0 else ""

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is no news."""


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy before `upstream` while the block runs."""
    with FaultyProxy(upstream) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()


def play(url: str, fault: str) -> None:
    """From another process: play `fault` from now on."""
    urlopen(f"{url}{CONTROL}{fault}").close()


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if self.path.startswith(CONTROL):
            self.server.play(self.path.removeprefix(CONTROL))
            self._send(200, b"")
            return
        if size:
            self.server.headers_of_bodies.update(name.lower() for name in self.headers)
        fault = self.server.fault_of(self.path)
        body = self._slowly(size) if fault == "dawdles" else self.rfile.read(size)
        if fault == "drops":
            self.close_connection = True
        elif fault == "hangs":
            self.connection.recv(1)
            self.close_connection = True
        elif fault in ANSWERS:
            self._refuse(*ANSWERS[fault])
        elif fault == "errs":
            self._send(200, b"<Error>InternalError</Error>")
        elif fault in ("redirects", "turns around"):
            host = self.server.upstream if fault == "redirects" else self.headers["Host"]
            self._send(307, b"", [("Location", f"http://{host}{self.path}")])
        elif refusal := self._refusal(fault):
            self._refuse(*refusal)
        else:
            self._forward(body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _answer  # noqa: N815

    def _slowly(self, size: int) -> bytes:
        body, end = b"", time.monotonic() + DAWDLE_SECONDS
        while time.monotonic() < end and (piece := self.rfile.read(min(1 << 17, size - len(body)))):
            body += piece
            time.sleep(DAWDLE_SECONDS / 80)
        return body + self.rfile.read(size - len(body))

    def _refusal(self, way: str) -> tuple[int, str, str] | None:
        """How a server with this way refuses the request, if it does: status, code and message."""
        sent = {name.lower() for name in self.headers}
        writes = self.command == "PUT" and "partNumber" not in self.path
        writes |= self.command == "POST" and "uploads" in self.path
        if way == "refuses checksums":  # Backblaze B2
            for name in sent:
                if name.startswith(_CHECKSUMS):
                    return 400, "InvalidArgument", f"Unsupported header '{name}' received for this API call."
        if way == "deletes by MD5" and self.command == "POST" and "delete" in self.path and "content-md5" not in sent:
            return 400, "MissingContentMD5", "Missing required header for this request: Content-MD5."
        if way == "knows no conditions" and sent & set(_CONDITIONS):
            return 501, "NotImplemented", "A header you provided implies functionality that is not implemented"
        if way == "asks for encryption" and writes and "x-amz-server-side-encryption" not in sent:
            return 403, "AccessDenied", "not authorized to perform: s3:PutObject with an explicit deny"
        return None

    def _refuse(self, status: int, code: str, message: str = "played by a test") -> None:
        xml = "<Error><Code>{}</Code><Message>{}</Message></Error>"
        if "x-amz-date" in self.headers:
            self._send(status, xml.format(code, message).encode())
        elif "x-ms-version" in self.headers:
            code = OF_AZURE.get(code, code)
            headers = [("Content-Type", "application/xml"), ("x-ms-error-code", code)]
            self._send(status, xml.format(code, message).encode(), headers)
        else:
            self._send(status, json.dumps({"error": {"code": status, "message": message}}).encode())

    def _forward(self, body: bytes, fault: str) -> None:
        dropped = ("expect", *_IGNORED.get(fault, ()))
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        content = DAMAGES[fault](content) if fault in DAMAGES else content
        self._send(answer.status, content, answer.getheaders(), cut=fault == "cuts")

    def _send(
        self, status: int, content: bytes, headers: list[tuple[str, str]] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers or []:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection |= cut
