"""Releases of Kubernetes, etcd and Helm on loopback.

They are laid out like the official ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from spottrain_local.fetched_binaries import ETCD, HELM, Addresses
from spottrain_local.go_module import CONTROL_PLANE_MODULE, KUBERNETES, GoModule, pinned_version

# Answers a request otherwise than with the file. The function waits until the server ends.
Fault = Callable[[BaseHTTPRequestHandler, bytes, Callable[[], object]], None]


def archive(members: Mapping[str, bytes]) -> bytes:
    """A tar.gz with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseServer:
    """The files by their path, and what is wrong with some.

    `asked` has the paths that were asked for.
    """

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    @property
    def addresses(self) -> Addresses:
        return Addresses(kubernetes=f"{self.url}/k8s", etcd=f"{self.url}/etcd", helm=f"{self.url}/helm")

    def publish(self, path: str, content: bytes, sums: str = "{path}.sha256", line: str = "{digest}") -> None:
        """Add a file, and a line with its checksum."""
        self.files[path] = content
        said = line.format(digest=hashlib.sha256(content).hexdigest(), name=path.rpartition("/")[2])
        sums = sums.format(path=path)
        self.files[sums] = self.files.get(sums, b"") + said.encode()

    def publish_all(self, binaries: Mapping[str, bytes], arch: str) -> None:
        """Add the releases, with binaries of this content."""
        for name in KUBERNETES:
            self.publish(self.kubernetes(name, arch), binaries[name])
        etcd = self.etcd(arch)
        folder = etcd.rpartition("/")[2].removesuffix(".tar.gz")
        sums = f"{etcd.rpartition('/')[0]}/SHA256SUMS"
        self.publish(f"{etcd}.other", b"of another platform", sums, "{digest}  {name}\n")
        members = {f"{folder}/README.md": b"", **{f"{folder}/{name}": binaries[name] for name in ETCD}}
        self.publish(etcd, archive(members), sums, "{digest}  {name}\n")
        members = {f"linux-{arch}/{name}": binaries[name] for name in HELM}
        self.publish(self.helm(arch), archive(members), "{path}.sha256sum", "{digest}  {name}\n")

    @staticmethod
    def kubernetes(name: str, arch: str, module: GoModule = CONTROL_PLANE_MODULE) -> str:
        return f"/k8s/release/{module.pinned_version('k8s.io/kubernetes')}/bin/linux/{arch}/{name}"

    @staticmethod
    def etcd(arch: str) -> str:
        version = pinned_version("go.etcd.io/etcd/server/v3")
        return f"/etcd/{version}/etcd-{version}-linux-{arch}.tar.gz"

    @staticmethod
    def helm(arch: str) -> str:
        return f"/helm/helm-{pinned_version('helm.sh/helm/v4')}-linux-{arch}.tar.gz"


@contextlib.contextmanager
def release_server() -> Iterator[ReleaseServer]:
    """Run a server without files. It also answers as a proxy for any host."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = "/" + self.path.removeprefix("http://").partition("/")[2]
            server.asked.append(path)
            content = server.files.get(path)
            with contextlib.suppress(ConnectionError):  # the client may have gone
                if content is None:
                    self.send_error(404)
                elif path in server.faults:
                    server.faults[path](self, content, ended.wait)
                else:
                    head(self, len(content))
                    self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server = ReleaseServer(url=f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            ended.set()
            listening.shutdown()
            thread.join()


def head(request: BaseHTTPRequestHandler, length: int) -> None:
    """Send the head of an answer."""
    request.send_response(200)
    request.send_header("Content-Length", str(length))
    request.end_headers()


def hangs(request: BaseHTTPRequestHandler, content: bytes, wait: Callable[[], object]) -> None:
    """No answer comes."""
    wait()


def stalls(request: BaseHTTPRequestHandler, content: bytes, wait: Callable[[], object]) -> None:
    """The body stops in the middle."""
    head(request, len(content))
    request.wfile.write(content[: len(content) // 2])
    request.wfile.flush()
    wait()


def is_cut(request: BaseHTTPRequestHandler, content: bytes, wait: Callable[[], object]) -> None:
    """The connection ends in the middle of the body."""
    head(request, len(content))
    request.wfile.write(content[: len(content) // 2])


def is_a_login_page(request: BaseHTTPRequestHandler, content: bytes, wait: Callable[[], object]) -> None:
    """A network that wants a login answers everything with its page."""
    page = b"<html>Please log in.</html>"
    head(request, len(page))
    request.wfile.write(page)
