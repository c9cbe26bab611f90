"""The API client against a scripted server.

Watches break off, versions are too old, and the server refuses requests.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spottrain_local.node.api import ApiClient, ApiError, list_and_watch
from spottrain_local.node.cluster_objects import ApiObjectSource, TokenRequest
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.node_status import instance_id, node_status, provider_id
from spottrain_local.pki import Authority, open_authority

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[ApiClient]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a TLS server that asks for client certificates; returns a client of it."""
    authority: Authority = open_authority(tmp_path, "ca")
    server = authority.issue(tmp_path / "server", "server", addresses=["127.0.0.1"])
    node = authority.issue(tmp_path / "node", "system:node:n", organizations=["system:nodes"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.certificate_file))
    tls.load_cert_chain(server.certificate, server.key)
    tls.verify_mode = ssl.CERT_REQUIRED
    runners: list[web.AppRunner] = []
    clients: list[ApiClient] = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> ApiClient:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        runners.append(runner)
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        client = ApiClient(url, ca_file=authority.certificate_file, cert_file=node.certificate, key_file=node.key)
        clients.append(await client.__aenter__())
        return client

    yield start
    for client in clients:
        await client.__aexit__(None, None, None)
    for runner in runners:
        await runner.cleanup()


def event(kind: str, version: str, **metadata: str) -> bytes:
    return (
        json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": version, **metadata}}}).encode() + b"\n"
    )


def gone() -> bytes:
    return json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}).encode() + b"\n"


class ScriptedCollection:
    """Lists at versions 10, 20, …

    Each watch sends the next of the scripted answers and breaks off.
    """

    def __init__(self, *watches: list[bytes]) -> None:
        self._watches = list(watches)
        self._lists = 0
        self.asked_from: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self._lists += 1
            return web.json_response({"metadata": {"resourceVersion": str(10 * self._lists)}, "items": []})
        self.asked_from.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        for line in self._watches.pop(0) if self._watches else []:
            await response.write(line)
        if not self._watches:
            await asyncio.sleep(60)
        return response


async def collect(client: ApiClient, number: int) -> list[str]:
    """The kinds of the first events."""
    kinds: list[str] = []
    async with asyncio.timeout(10):
        async for found in list_and_watch(client, "/api/v1/pods", fieldSelector="spec.nodeName=n"):
            kinds.append(found["type"])
            if len(kinds) == number:
                return kinds
    return kinds


async def test_a_watch_that_ends_goes_on_from_where_it_was(serve: Serve) -> None:
    server = ScriptedCollection([event("ADDED", "11"), event("BOOKMARK", "15")], [event("DELETED", "16")])
    assert await collect(await serve(server.answer), 3) == ["SYNC", "ADDED", "DELETED"]
    assert server.asked_from == ["10", "15"]


async def test_a_version_that_is_too_old_leads_to_a_new_list(serve: Serve) -> None:
    server = ScriptedCollection([event("ADDED", "11"), gone()], [event("MODIFIED", "21")])
    assert await collect(await serve(server.answer), 4) == ["SYNC", "ADDED", "SYNC", "MODIFIED"]
    assert server.asked_from == ["10", "20"]


async def test_half_a_line_is_no_event(serve: Serve) -> None:
    server = ScriptedCollection([event("ADDED", "11"), b'{"type": "MODI'], [event("MODIFIED", "12")])
    assert await collect(await serve(server.answer), 3) == ["SYNC", "ADDED", "MODIFIED"]
    assert server.asked_from == ["10", "11"]


async def test_a_refusal_carries_status_and_reason(serve: Serve) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"reason": "Forbidden", "message": "no"}, status=403)

    client = await serve(refuse)
    with pytest.raises(ApiError, match="no") as caught:
        await client.get("/api/v1/pods")
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")


async def test_what_does_not_exist_is_none_and_tokens_are_bound_to_their_pod(serve: Serve) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"reason": "NotFound", "message": "none"}, status=404)
        bodies.append(await request.json())
        status = {"token": "t", "expirationTimestamp": "2030-01-01T00:00:00Z"}
        return web.json_response({"status": status}, status=201)

    source = ApiObjectSource(await serve(answer))
    assert await source.config_map("ns", "x") is None
    request = TokenRequest(
        namespace="ns", service_account="sa", pod_name="p", pod_uid="u", audience="spottrain", expiration_seconds=600
    )
    token = await source.token(request)
    assert (token.value, token.expires.year) == ("t", 2030)
    assert bodies[0]["spec"] == {
        "audiences": ["spottrain"],
        "expirationSeconds": 600,
        "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"},
    }


def config(state: Path, provider: str) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "name": "spot-0",
            "provider": provider,
            "capacityType": "spot",
            "zone": "z-1",
            "gpus": 2,
            "nodeIP": "127.1.0.1",
            "podNetwork": "127.1.0.0/24",
            "apiserver": "https://127.0.0.1:6443",
            "kubeletPort": 10250,
            "metadataPort": 80,
            "stateDir": str(state),
            **dict.fromkeys(("caFile", "clientCertFile", "clientKeyFile", "servingCertFile", "servingKeyFile"), "x"),
        }
    )


@pytest.mark.parametrize(
    ("provider", "start"), [("eks", "aws:///z-1/i-0"), ("gke", "gce://"), ("aks", "azure:///subscriptions/")]
)
def test_provider_ids_have_the_form_of_their_cloud(tmp_path: Path, provider: str, start: str) -> None:
    node = config(tmp_path, provider)
    assert provider_id(node, instance_id(node)).startswith(start)
    assert instance_id(node) == instance_id(node)


@pytest.mark.parametrize(("ready", "expected"), [(True, "True"), (False, "False")])
def test_node_status(tmp_path: Path, ready: bool, expected: str) -> None:
    status = node_status(config(tmp_path, "eks"), "process://1", ready=ready, now="n", since="s")
    assert status["allocatable"]["nvidia.com/gpu"] == "2"
    assert status["daemonEndpoints"]["kubeletEndpoint"]["Port"] == 10250
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "MemoryPressure": "False",
        "DiskPressure": "False",
        "PIDPressure": "False",
        "Ready": expected,
    }
