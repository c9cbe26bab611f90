"""Folders of small shards of JSON lines, and a web server that serves them."""

from __future__ import annotations

import http.server
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from spottrain.data import Shards
from spottrain.data.shards.formats import JsonLines
from spottrain.data.shards.make_index import make_index
from spottrain.data.shards.store import ShardPlace


def write_lines(folder: Path, number: int = 6, lines: int = 5) -> str:
    """Shards of JSON lines, of 100 bytes each."""
    folder.mkdir(exist_ok=True)
    for shard in range(number):
        values = [json.dumps({"value": 100 * shard + line}).ljust(19) + "\n" for line in range(lines)]
        (folder / f"{shard}.jsonl").write_text("".join(values))
    return f"file://{folder}/*.jsonl"


def shards_in(tmp_path: Path, *, cache_bytes: int = 300, **how: Any) -> Shards:
    uri = write_lines(tmp_path / "corpus")
    make_index(ShardPlace.of(uri), JsonLines())
    return Shards(uri, format="jsonl", cache=tmp_path / "cache", cache_bytes=cache_bytes, **how)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, and parts of them."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            content = content[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
