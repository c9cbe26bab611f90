"""The kubelet's HTTPS endpoint.

It serves `kubectl logs` and metrics-server, and a health check.
"""

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from spottrain_local.node.api import JSONObject
from spottrain_local.node.containers import ContainerRecord, Terminated, Waiting
from spottrain_local.node.pod_worker import PodWorker

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1

FindPod = Callable[[str, str], PodWorker | None]
Pods = Callable[[], list[JSONObject]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The options of a request for logs."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since: datetime | None = None
    limit_bytes: int | None = None


def parse_log_options(query: JSONObject, now: datetime) -> LogOptions:
    """Parse the request's query.

    Raises:
        ValueError: It is invalid; the text is a sentence.
    """
    try:
        since = datetime.fromisoformat(query["sinceTime"]).astimezone(UTC) if query.get("sinceTime") else None
        if query.get("sinceSeconds"):
            since = now - timedelta(seconds=int(query["sinceSeconds"]))
        return LogOptions(
            follow=_flag(query.get("follow")),
            previous=_flag(query.get("previous")),
            timestamps=_flag(query.get("timestamps")),
            tail_lines=int(query["tailLines"]) if query.get("tailLines") else None,
            since=since,
            limit_bytes=int(query["limitBytes"]) if query.get("limitBytes") else None,
        )
    except ValueError as error:
        raise ValueError(f"The log options are invalid: {error}.") from error


def _flag(text: str | None) -> bool:
    return (text or "").lower() in ("true", "1")


def render(record: bytes, options: LogOptions) -> bytes:
    """Write one CRI log line (`TIME stdout F text`) as requested.

    The result is empty if the line is too old.
    """
    stamp, _, rest = record.partition(b" ")
    _, tag, text = rest.split(b" ", 2)
    if options.since and datetime.fromisoformat(stamp.decode()) < options.since:
        return b""
    line = text if tag == b"F" else text.removesuffix(b"\n")
    return stamp + b" " + line if options.timestamps else line


def select_tail(records: list[bytes], lines: int | None) -> list[bytes]:
    """Return the records of the last `lines` whole lines.

    A long line has several records.
    """
    if lines is None:
        return records
    if lines <= 0:
        return []
    ends = [i for i, record in enumerate(records) if record.split(b" ", 3)[2] == b"F"]
    return records if len(ends) <= lines else records[ends[-lines - 1] + 1 :]


class LogReader:
    """Reads a log file, and the one before its rotation, record by record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._file = path.open("rb") if path.exists() else None

    def everything(self) -> list[bytes]:
        """Return all records so far."""
        rotated = self._path.with_name(self._path.name + ".1")
        old = rotated.read_bytes().splitlines(keepends=True) if rotated.exists() else []
        return old + self.more()

    def more(self) -> list[bytes]:
        """Return the whole records since the last call."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        records = [line + b"\n" for line in lines]
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                self._file.close()
                self._file, self._rest = self._path.open("rb"), b""
                records += self.more()
        return records

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def log_number(record: ContainerRecord, previous: bool) -> int:
    """Find the run whose log is requested.

    Raises:
        LookupError: There is none; the text is a sentence.
    """
    waiting = isinstance(record.state, Waiting)
    if previous:
        if record.restart_count == 0 and not (waiting and record.last):
            raise LookupError(f'previous terminated container "{record.name}" not found')
        return record.restart_count if waiting and record.last else record.restart_count - 1
    if waiting and not record.last:
        reason = record.state.reason if isinstance(record.state, Waiting) else ""
        raise LookupError(f'container "{record.name}" is waiting to start: {reason}')
    return record.restart_count


def build_app(find_pod: FindPod, pods: Pods, metrics: Callable[[], str]) -> web.Application:
    """Return the kubelet's endpoint as an aiohttp application."""

    async def container_logs(request: web.Request) -> web.StreamResponse:
        info = request.match_info
        worker = find_pod(info["namespace"], info["pod"])
        record = next((r for r in worker.records if r.name == info["container"]), None) if worker else None
        if worker is None or record is None:
            return web.Response(status=404, text=f'container "{info["container"]}" of pod "{info["pod"]}" not found')
        try:
            options = parse_log_options(dict(request.query), datetime.now(UTC))
            number = log_number(record, options.previous)
        except (LookupError, ValueError) as error:
            text = error.args[0]
            return web.Response(status=400, text=f'{text} (pod "{info["pod"]}")')
        path = worker.context.container_directory(record.name) / f"{number}.log"
        return await _stream(request, path, record, number, options)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def list_pods(_: web.Request) -> web.Response:
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "items": pods()})

    async def resource_metrics(_: web.Request) -> web.Response:
        return web.Response(text=await asyncio.to_thread(metrics))

    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", container_logs)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics/resource", resource_metrics)
    app.router.add_get("/pods", list_pods)
    return app


async def _stream(
    request: web.Request, path: Path, record: ContainerRecord, number: int, options: LogOptions
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
    await response.prepare(request)
    reader = LogReader(path)
    left = options.limit_bytes
    try:
        records = select_tail(reader.everything(), options.tail_lines)
        ended = not options.follow
        while True:
            data = b"".join(render(line, options) for line in records)[:left]
            if data:
                await response.write(data)
            if left is not None:
                left -= len(data)
            if ended or left == 0:
                break
            # Check this before the read: then the file has all that a container wrote before it ended.
            ended = _has_ended(record, number) or request.transport is None
            if not ended:
                await asyncio.sleep(_POLL_SECONDS)
            records = reader.more()
        await response.write_eof()
    except ConnectionError:
        logger.debug("the reader of %s went away", path)
    finally:
        reader.close()
    return response


def _has_ended(record: ContainerRecord, number: int) -> bool:
    return record.restart_count != number or isinstance(record.state, Terminated | Waiting)


def server_tls(cert_file: Path, key_file: Path, client_ca_file: Path | None) -> ssl.SSLContext:
    """Return the endpoint's TLS settings.

    With a client CA, only its clients (the API server) are admitted.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    if client_ca_file:
        context.load_verify_locations(client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
