"""HTTP servers that hold little for a peer that has proven nothing.

Whoever reaches the ports of operator, watcher and relay can leave requests unfinished there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web, web_protocol
from aiohttp.http_exceptions import HttpProcessingError

logger = logging.getLogger(__name__)

# From the start of a connection, or the end of an answer on it, until the next request has come with all its headers.
# Agents close a connection without a request after 5 s, so this never meets one of theirs.
REQUEST_SECONDS = 10.0
# An agent sends some six headers. A service mesh adds some twenty, of which the longest describes the pod.
MAX_HEADERS = 32
MAX_HEADER_BYTES = 2048
MAX_LINE_BYTES = 2048
# Requests on a connection that wait for the one before them. Nobody of ours sends a second one before the answer.
MAX_WAITING_REQUESTS = 2


def bounded_runner(
    application: web.Application,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    shutdown_timeout: float,
    handler_cancellation: bool = False,
) -> web.AppRunner:
    """A runner for an application, with bounds on what a connection holds.

    A connection without a whole request is closed after `REQUEST_SECONDS`, however late requests are answered.

    Args:
        application: Reads the bodies of POST alone. Another request with one, and an upgrade, is refused with 400.
        max_header_bytes: Of a header, name and value together. A longer one, or more than `MAX_HEADERS`, is refused
            with 400.
        shutdown_timeout: Seconds for requests to end when the runner is cleaned up.
        handler_cancellation: Whether a request is cancelled when its peer goes away.
    """
    # aiohttp has no option for that. It keeps 32 requests, each as large as the bounds above allow.
    web_protocol.MAX_MSG_QUEUE_SIZE = MAX_WAITING_REQUESTS
    application.middlewares.append(_refuse_unread)
    return web.AppRunner(
        application,
        access_log=None,
        logger=logger,
        shutdown_timeout=shutdown_timeout,
        handler_cancellation=handler_cancellation,
        keepalive_timeout=REQUEST_SECONDS,
        max_headers=MAX_HEADERS,
        max_field_size=max_header_bytes,
        max_line_size=MAX_LINE_BYTES,
    )


def _is_not_of_the_peer(record: logging.LogRecord) -> bool:
    """Whether a record says more than that a peer has sent what is no request.

    The answer tells the peer.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


logger.addFilter(_is_not_of_the_peer)


@web.middleware
async def _refuse_unread(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse what no handler reads, and aiohttp would hold until the answer."""
    if "Upgrade" in request.headers or (request.method != "POST" and request.can_read_body):
        raise web.HTTPBadRequest(text="send a body with POST alone, and ask for no upgrade")
    return await handler(request)
