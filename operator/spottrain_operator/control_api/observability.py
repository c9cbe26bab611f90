"""The ports for the kubelet (/healthz, /readyz) and for Prometheus (/metrics)."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from pathlib import Path

from aiohttp import web


def require_leader(is_ready: Callable[[], bool]) -> None:
    """Refuse a request if this process doesn't lead, or hasn't observed anything yet."""
    if not is_ready():
        raise web.HTTPServiceUnavailable(
            text="this operator doesn't lead, or has not observed the cluster yet; retry in a second",
            headers={"Retry-After": "1"},
        )


def add_probes(application: web.Application, is_ready: Callable[[], bool]) -> None:
    """Serve /healthz and /readyz."""

    async def get_health(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def get_readiness(_request: web.Request) -> web.Response:
        require_leader(is_ready)
        return web.Response(text="ok")

    application.router.add_get("/healthz", get_health)
    application.router.add_get("/readyz", get_readiness)


def health_application(is_ready: Callable[[], bool]) -> web.Application:
    application = web.Application()
    add_probes(application, is_ready)
    return application


def metrics_application(
    exposition: Callable[[], tuple[bytes, str]], token_file: Path | None = None
) -> web.Application:
    """Serve /metrics.

    Args:
        exposition: Returns body and content type.
        token_file: Holds the bearer token that a request needs. It is read each time, as the kubelet renews it.
            None: a request needs none.
    """

    async def get_metrics(request: web.Request) -> web.Response:
        if token_file is not None:
            expected = f"Bearer {token_file.read_text().strip()}"
            sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(sent, expected.encode()):
                raise web.HTTPUnauthorized(
                    text="send the token of the Secret in the chart's value metricsTokenSecret"
                )
        # With many jobs it takes a second, for which nobody else waits.
        body, content_type = await asyncio.to_thread(exposition)
        return web.Response(body=body, headers={"Content-Type": content_type})

    application = web.Application()
    application.router.add_get("/metrics", get_metrics)
    return application
