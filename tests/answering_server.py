"""An API server on loopback that gives the answers of a test."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

# Of a path with its query: the status, and the body as an object or as text.
Answers = Callable[[str], tuple[int, dict[str, Any] | str]]


@contextlib.contextmanager
def answering_server(folder: Path, answers: Answers, *, namespace: str | None = None) -> Iterator[Path]:
    """Run the server, and give the kubeconfig for it, which lies in `folder`.

    `namespace` is that of its context.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = answers(self.path)
            body = answer if isinstance(answer, str) else json.dumps(answer)
            with contextlib.suppress(ConnectionError):  # the client may have gone
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
                self.end_headers()
                self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    context = {"cluster": "c", "user": "c"} | ({"namespace": namespace} if namespace is not None else {})
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "contexts": [{"name": "c", "context": context}],
                "users": [{"name": "c", "user": {}}],
                "current-context": "c",
            }
        )
    )
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
