"""The supervisor's control API: JSON over HTTP on a unix socket in the cluster's state folder.

`GET /v1/status`, `POST /v1/stop`, and `POST /v1/nodes/{preempt,cancel,kill,restore}` with a `NodesRequest`.
A request that can't be carried out is answered with 400 and `{"error": sentence}`.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from spottrain_local.cloud import Action, InterruptionKind
from spottrain_local.layout import LocalClusterError

if TYPE_CHECKING:
    from spottrain_local.supervisor import Supervisor


class NodesRequest(BaseModel):
    """Which nodes; the rest is for `preempt` alone."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)

    nodes: list[str]
    notice_seconds: float = 120.0
    kind: InterruptionKind = "preempt"
    action: Action = "terminate"


@contextlib.asynccontextmanager
async def serve_control_api(supervisor: "Supervisor") -> AsyncIterator[None]:
    """Serve the control API of a supervisor."""
    app = web.Application(middlewares=[_sentences])
    cloud = supervisor.cloud

    async def status(request: web.Request) -> web.Response:
        return web.json_response(describe(supervisor))

    async def stop(request: web.Request) -> web.Response:
        supervisor.stop()
        return web.json_response({})

    async def preempt(request: web.Request) -> web.Response:
        wanted = await _parse(request)
        cloud.preempt(wanted.nodes, wanted.notice_seconds, wanted.kind, wanted.action)
        return web.json_response(describe(supervisor))

    async def cancel(request: web.Request) -> web.Response:
        cloud.cancel((await _parse(request)).nodes)
        return web.json_response(describe(supervisor))

    async def kill(request: web.Request) -> web.Response:
        await cloud.kill((await _parse(request)).nodes)
        return web.json_response(describe(supervisor))

    async def restore(request: web.Request) -> web.Response:
        await cloud.restore((await _parse(request)).nodes)
        return web.json_response(describe(supervisor))

    app.router.add_get("/v1/status", status)
    app.router.add_post("/v1/stop", stop)
    for handler in (preempt, cancel, kill, restore):
        app.router.add_post(f"/v1/nodes/{handler.__name__}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    # A socket of a supervisor that was killed is in the way; the lock says that it is dead.
    supervisor.layout.socket.unlink(missing_ok=True)
    await web.UnixSite(runner, supervisor.layout.socket.name).start()
    try:
        yield
    finally:
        await runner.cleanup()


def describe(supervisor: "Supervisor") -> dict[str, Any]:
    """The cluster as `spottrain local status` shows it."""
    children = [*supervisor.parts, supervisor.store_process]
    return {
        "name": supervisor.layout.name,
        "ready": not supervisor.waiting_for,
        "waitingFor": supervisor.waiting_for,
        "server": supervisor.control_plane.server,
        "kubeconfig": str(supervisor.layout.kubeconfig),
        "store": supervisor.store.environment(),
        "parts": [{"name": p.spec.name, "pid": p.pid, "restarts": p.restarts} for p in children],
        "nodes": [
            instance.model_dump(mode="json", by_alias=True)
            | {
                "state": instance.state,
                "pid": supervisor.nodes.pid(instance.node),
                "capacityType": supervisor.pools[instance.node].capacity_type,
                "provider": supervisor.pools[instance.node].provider,
            }
            for instance in supervisor.cloud.instances()
        ],
    }


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
