"""The operator's way to the API server.

It has the address, the credentials and the connections, and knows what a refusal means. The official client imports
the models of all kinds, 44 MiB, of which the operator uses none: it reads and writes JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import kopf
import yaml
from pydantic_core import from_json, to_json

from spottrain_api.contract.names import ENV_SERVICEACCOUNT_DIR, SERVICEACCOUNT_DIR
from spottrain_operator.kube.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    retry_after,
)
from spottrain_operator.kube.json_text import parsed
from spottrain_operator.kube.resources import Manifest

# The kubelet renews a pod's token long before it expires, so that reading it again this often is enough.
LOGIN_MINUTES = 10
# The API server keeps an idle connection for longer.
IDLE_SECONDS = 60.0
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
USER_AGENT = "spottrain-operator"


def connection_info() -> kopf.ConnectionInfo:
    """Address and credentials of the API server.

    In a pod, those of its service account. Otherwise those of the kubeconfig in KUBECONFIG (default ~/.kube/config).

    Raises:
        ClusterError: There is neither. The message is a sentence.
    """
    directory = Path(os.environ.get(ENV_SERVICEACCOUNT_DIR, SERVICEACCOUNT_DIR))
    inside = "KUBERNETES_SERVICE_HOST" in os.environ and (directory / "token").is_file()
    try:
        found = (
            _service_account(directory) if inside else kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
        )
    except (OSError, yaml.YAMLError, kopf.LoginError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise _unconfigured(f"{type(error).__name__}: {error}") from error
    if found is None or not found.server:
        raise _unconfigured("no kubeconfig names an API server")
    return found


def _service_account(directory: Path) -> kopf.ConnectionInfo:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=directory / "ca.crt",
        scheme="Bearer",
        token=(directory / "token").read_text().strip(),
        expiration=datetime.now(UTC) + timedelta(minutes=LOGIN_MINUTES),
    )


def _unconfigured(problem: str) -> ClusterError:
    return ClusterError(
        f"no cluster is configured: {problem}; run in a pod with a service account, or point KUBECONFIG "
        "at a kubeconfig file"
    )


def _proxy_to(info: kopf.ConnectionInfo) -> str | None:
    """The proxy on the way to the API server, or None.

    It is that of the kubeconfig, or of HTTPS_PROXY unless NO_PROXY has the host. With `trust_env`, aiohttp would look
    for it, and for a netrc file, in two threads for each request.
    """
    server = urlsplit(info.server)
    if info.proxy_url or not server.hostname or proxy_bypass(server.hostname):
        return info.proxy_url
    return getproxies().get(server.scheme)


class ApiServer:
    """Requests to the API server, over connections of their own.

    Use it as an async context manager.

    Args:
        connect: Finds address and credentials, again when they expire.
        max_connections: Requests at once. Further ones wait. 0: any number.
        max_line_bytes: Longest line of a response that is read by lines.

    Raises:
        ClusterError: No cluster is configured.
    """

    def __init__(
        self,
        connect: Callable[[], kopf.ConnectionInfo] = connection_info,
        *,
        max_connections: int = 0,
        max_line_bytes: int = 2**17,
    ) -> None:
        self._connect = connect
        self._info = connect()
        self._proxy = _proxy_to(self._info)
        self._max_connections = max_connections
        self._max_line_bytes = max_line_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            ssl=self._info.as_ssl_context(), limit=self._max_connections, keepalive_timeout=IDLE_SECONDS
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"User-Agent": USER_AGENT},
            read_bufsize=self._max_line_bytes // 2,  # aiohttp reads lines of up to twice as much
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = JSON,
    ) -> Manifest:
        """Send a request, and return the answer.

        Raises:
            ClusterError: There was none, or it was a refusal.
        """
        async with self.response(
            method, path, timeout=timeout, params=params, body=body, content_type=content_type
        ) as response:
            answer: Manifest = parsed(await response.read())
            return answer

    @asynccontextmanager
    async def response(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and show the response while it is read.

        Raises:
            ClusterError: There was none, it broke off, or it was a refusal.
        """
        if self._session is None:
            raise RuntimeError("Use ApiServer as an async context manager.")
        try:
            async with self._session.request(
                method,
                self._info.server.rstrip("/") + path,
                params=params,
                data=None if body is None else to_json(body),
                headers=self._credentials() | ({} if body is None else {"Content-Type": content_type}),
                timeout=timeout,
                proxy=self._proxy,
            ) as response:
                if response.status >= 400:
                    raise refusal(response.status, response.headers, await response.text())
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ClusterError(f"the API server can't be reached: {error or type(error).__name__}") from error

    def _credentials(self) -> dict[str, str]:
        """The token of a service account rotates."""
        expires = self._info.expiration
        if expires is not None and expires <= datetime.now(UTC):
            self._info = self._connect()
        return self._info.as_http_headers()


# A refusal starts like 'pods "gpt-7" is forbidden: exceeded quota …'. The rest is the same for the next pod.
_NAMED = re.compile(r'^\S+ "[^"]*" is (forbidden|invalid): ')
# Webhooks and policies refuse like this, with any status.
_DENIED = re.compile(r"^(admission webhook|ValidatingAdmissionPolicy) .* denied (the )?request")


def refusal(status: int, headers: Mapping[str, str], text: str) -> ClusterError:
    """The error that an answer of 400 or more means.

    It keeps the API server's own sentence.
    """
    answer = _status(text)
    sentence = str(answer.get("message") or text[:500] or "no reason was given")
    said = _NAMED.sub("", sentence)
    if status == HTTPStatus.FORBIDDEN or "failed calling webhook" in sentence:
        return ForbiddenError(said)
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY) or _DENIED.match(said):
        return InvalidObjectError(said)
    if status == HTTPStatus.NOT_FOUND:
        return NotFoundError(sentence)
    if status == HTTPStatus.CONFLICT:
        exists = answer.get("reason") == "AlreadyExists"
        return AlreadyExistsError(sentence) if exists else ConflictError(sentence)
    if status == HTTPStatus.GONE:
        return ExpiredError(sentence)
    return ClusterError(f"the API server answered {status}: {sentence}", retry_after=retry_after(headers))


def _status(text: str) -> Manifest:
    """The Status object of a refusal. A proxy's has none."""
    try:
        answer = from_json(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
