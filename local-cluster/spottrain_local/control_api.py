"""The supervisor's control API: JSON over HTTP on a unix socket.

The socket is in the cluster's state folder.

`GET /v1/status`, `POST /v1/stop`, and `POST /v1/nodes/{preempt,cancel,kill,restore}` with a `NodesRequest`.
A request that the supervisor cannot carry out is answered with 400 and `{"error": sentence}`, and with 500 if the
machine is at fault, such as a full disk.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from spottrain_local.cloud import Cloud
from spottrain_local.layout import LocalClusterError
from spottrain_local.metadata.interruption import Action, InterruptionKind


class NodesRequest(BaseModel):
    """The nodes. The other fields are for `preempt` only."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)

    nodes: list[str]
    notice_seconds: float = 120.0
    kind: InterruptionKind = "preempt"
    action: Action = "terminate"


@contextlib.asynccontextmanager
async def serve_control_api(
    socket: Path, cloud: Cloud, describe: Callable[[], dict[str, object]], end: Callable[[], None]
) -> AsyncIterator[None]:
    """Serve the control API in the working directory, under the name of `socket`.

    `describe` gives the cluster as `spottrain local status` shows it; `end` requests the end of the supervisor.
    """
    app = web.Application(middlewares=[_sentences])

    async def status(request: web.Request) -> web.Response:
        return web.json_response(describe())

    async def stop(request: web.Request) -> web.Response:
        end()
        return web.json_response({})

    async def preempt(request: web.Request) -> web.Response:
        wanted = await _parse(request)
        cloud.preempt(wanted.nodes, wanted.notice_seconds, wanted.kind, wanted.action)
        return web.json_response(describe())

    async def cancel(request: web.Request) -> web.Response:
        cloud.cancel((await _parse(request)).nodes)
        return web.json_response(describe())

    async def kill(request: web.Request) -> web.Response:
        await cloud.kill((await _parse(request)).nodes)
        return web.json_response(describe())

    async def restore(request: web.Request) -> web.Response:
        await cloud.restore((await _parse(request)).nodes)
        return web.json_response(describe())

    app.router.add_get("/v1/status", status)
    app.router.add_post("/v1/stop", stop)
    for handler in (preempt, cancel, kill, restore):
        app.router.add_post(f"/v1/nodes/{handler.__name__}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    # Remove the socket of a supervisor that was killed. The lock proves that it is dead.
    socket.unlink(missing_ok=True)
    await web.UnixSite(runner, socket.name).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def _parse(request: web.Request) -> NodesRequest:
    try:
        return NodesRequest.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors()[0]
        raise LocalClusterError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from error


@web.middleware
async def _sentences(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except LocalClusterError as error:
        return web.json_response({"error": str(error)}, status=400)
    except OSError as error:
        sentence = f"The machine could not carry this out: {error}. Correct that, and try again."
        return web.json_response({"error": sentence}, status=500)
