"""The operator's address and credentials of the API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import aiohttp
import kopf
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import BaseTestServer, RawTestServer, TestServer

from spottrain_operator.kube.api_server import ApiServer, connection_info
from spottrain_operator.kube.errors import ClusterError

TIMEOUT = aiohttp.ClientTimeout(total=20)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A process outside of any cluster."""
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_a_pod_has_its_service_account(outside: pytest.MonkeyPatch, tmp_path: Path, host: str, server: str) -> None:
    (tmp_path / "token").write_text("abc\n")
    outside.setenv("SPOTTRAIN_SERVICEACCOUNT_DIR", str(tmp_path))
    outside.setenv("KUBERNETES_SERVICE_HOST", host)
    outside.setenv("KUBERNETES_SERVICE_PORT", "6443")
    info = connection_info()
    assert (info.server, info.ca_path) == (server, tmp_path / "ca.crt")
    assert info.as_http_headers() == {"Authorization": "Bearer abc"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("{", "ParserError"),
        ("{}", "Current context is not set"),
        ("current-context: a", "KeyError: 'a'"),
        (
            yaml.safe_dump(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {}}],
                    "users": [{"name": "u"}],
                }
            ),
            "no kubeconfig names an API server",
        ),
    ],
    ids=["no file", "no YAML", "no context", "an unknown context", "no server"],
)
def test_a_kubeconfig_that_does_not_do_is_named(
    outside: pytest.MonkeyPatch, tmp_path: Path, text: str | None, problem: str
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    if text is not None:
        kubeconfig.write_text(text)
    outside.setenv("KUBECONFIG", str(kubeconfig))
    with pytest.raises(ClusterError, match="no cluster is configured") as error:
        connection_info()
    assert problem in str(error.value)
    assert "point KUBECONFIG at a kubeconfig file" in str(error.value)


def test_without_any_kubeconfig_the_error_says_what_to_do(outside: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="no kubeconfig names an API server; run in a pod"):
        connection_info()


async def test_a_token_is_read_again_when_it_expires() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server:
        tokens = iter(["first", "second"])

        def connect() -> kopf.ConnectionInfo:
            token = next(tokens)
            age = timedelta(minutes=1 if token == "second" else -1)
            url = str(server.make_url("/"))
            return kopf.ConnectionInfo(server=url, token=token, expiration=datetime.now(UTC) + age)

        async with ApiServer(connect) as api:
            for _ in range(2):
                assert await api.request("GET", "/api", timeout=TIMEOUT) == {}
    assert seen == ["Bearer second"] * 2


@pytest.mark.parametrize("answer", ["<h1>Sign in</h1>", ""])
async def test_an_answer_that_is_no_json_is_no_answer(answer: str) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    application = web.Application()
    application.router.add_get("/{path:.*}", respond)
    async with TestServer(application) as server:
        info = kopf.ConnectionInfo(server=str(server.make_url("/")))
        async with ApiServer(lambda: info) as api:
            with pytest.raises(ClusterError, match="can't be reached"):
                await api.request("GET", "/api", timeout=TIMEOUT)


@pytest.fixture
async def server() -> AsyncIterator[BaseTestServer]:
    """A server that answers with the target and the credentials of each request."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"target": request.raw_path, "credentials": request.headers.get("Authorization")})

    async with RawTestServer(answer) as server:
        yield server


async def test_the_environment_names_a_proxy(outside: pytest.MonkeyPatch, server: BaseTestServer) -> None:
    own = str(server.make_url(""))
    outside.setenv("http_proxy", own)
    outside.setenv("no_proxy", "127.0.0.1")
    for url, target in (("http://api.invalid", "http://api.invalid/api"), (own, "/api")):
        async with ApiServer(partial(kopf.ConnectionInfo, server=url)) as api:
            assert await api.request("GET", "/api", timeout=TIMEOUT) == {"target": target, "credentials": None}


@pytest.mark.parametrize(("token", "credentials"), [("abc", "Bearer abc"), (None, None)])
async def test_a_netrc_file_is_not_for_the_api_server(
    outside: pytest.MonkeyPatch, tmp_path: Path, server: BaseTestServer, token: str | None, credentials: str | None
) -> None:
    (tmp_path / ".netrc").write_text("default login somebody password secret\n")
    async with ApiServer(partial(kopf.ConnectionInfo, server=str(server.make_url("")), token=token)) as api:
        assert await api.request("GET", "/api", timeout=TIMEOUT) == {"target": "/api", "credentials": credentials}
