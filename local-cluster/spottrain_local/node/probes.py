"""Probes and lifecycle handlers: httpGet, tcpSocket, exec and sleep."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from spottrain_local.node.api import JSONObject

logger = logging.getLogger(__name__)

# Seconds between attempts while a success is waited for.
EAGER_SECONDS = 0.2

# Runs a command like a container's other processes: (argv, timeout in seconds) -> (exit code, output).
Execute = Callable[[Sequence[str], float], Awaitable[tuple[int, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerTarget:
    """The target of a handler. `ports` maps the container's port names to numbers."""

    pod_ip: str
    ports: dict[str, int]
    execute: Execute


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """A handler's result, with its message."""

    ok: bool
    message: str = ""


async def run_handler(handler: JSONObject, target: HandlerTarget, timeout_seconds: float) -> HandlerResult:
    """Run one handler.

    Every failure, also a timeout, is an HandlerResult and not an exception.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            if "httpGet" in handler:
                return await _http_get(handler["httpGet"], target)
            if "tcpSocket" in handler:
                return await _tcp_socket(handler["tcpSocket"], target)
            if "exec" in handler:
                return await _exec(handler["exec"], target, timeout_seconds)
            if "sleep" in handler:
                await asyncio.sleep(handler["sleep"]["seconds"])
                return HandlerResult(True)
    except TimeoutError:
        return HandlerResult(False, f"no answer within {timeout_seconds:g} s")
    except (OSError, aiohttp.ClientError, ValueError) as error:
        return HandlerResult(False, str(error))
    kinds = ", ".join(key for key in ("grpc",) if key in handler) or "of no kind"
    return HandlerResult(False, f"the handler is {kinds}, which this node does not have")


def _port(value: int | str, target: HandlerTarget) -> int:
    if isinstance(value, int):
        return value
    if value in target.ports:
        return target.ports[value]
    if value.isdigit():
        return int(value)
    raise ValueError(f"the container has no port named {value!r}")


async def _http_get(action: JSONObject, target: HandlerTarget) -> HandlerResult:
    scheme = (action.get("scheme") or "HTTP").lower()
    path = "/" + (action.get("path") or "/").lstrip("/")
    url = f"{scheme}://{action.get('host') or target.pod_ip}:{_port(action['port'], target)}{path}"
    headers = {h["name"]: h["value"] for h in action.get("httpHeaders") or []}
    headers.setdefault("User-Agent", "kube-probe/spottrain")
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, ssl=False, max_redirects=10) as response,
    ):
        await response.content.read(10240)
        return HandlerResult(200 <= response.status < 400, f"HTTP probe failed with statuscode: {response.status}")


async def _tcp_socket(action: JSONObject, target: HandlerTarget) -> HandlerResult:
    _, writer = await asyncio.open_connection(action.get("host") or target.pod_ip, _port(action["port"], target))
    writer.close()
    return HandlerResult(True)


async def _exec(action: JSONObject, target: HandlerTarget, timeout_seconds: float) -> HandlerResult:
    code, output = await target.execute(action["command"], timeout_seconds)
    return HandlerResult(code == 0, output.strip()[-1024:] or f"exit code {code}")


@dataclass(slots=True)
class ProbeCounter:
    """Turns outcomes into a verdict, by the probe's thresholds."""

    success_threshold: int = 1
    failure_threshold: int = 3
    _last: bool | None = field(default=None, init=False)
    _run: int = field(default=0, init=False)

    def observe(self, ok: bool) -> bool | None:
        """Return the verdict, or None while the threshold is not reached."""
        self._run = self._run + 1 if ok == self._last else 1
        self._last = ok
        needed = self.success_threshold if ok else self.failure_threshold
        return ok if self._run >= needed else None


async def probe_forever(
    probe: JSONObject,
    target: HandlerTarget,
    verdict: Callable[[bool, str], Awaitable[bool]],
    *,
    eager: bool = False,
) -> None:
    """Run a probe in its period until `verdict` returns False.

    `verdict` gets each verdict with its message.

    With `eager` the first success counts at once: until then a pause ends as soon as the handler would succeed.
    """
    counter = ProbeCounter(probe.get("successThreshold") or 1, probe.get("failureThreshold") or 3)
    period = float(probe.get("periodSeconds") or 10)
    timeout = float(probe.get("timeoutSeconds") or 1)
    eager = eager and "exec" not in probe  # Starting a process each time would cost more than the wait.
    await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
    while True:
        outcome = await run_handler(probe, target, timeout)
        decided = counter.observe(outcome.ok)
        if decided is not None and not await verdict(decided, outcome.message):
            return
        eager = eager and not outcome.ok
        await (_ok_or_over(probe, target, timeout, period) if eager else asyncio.sleep(period))


async def _ok_or_over(probe: JSONObject, target: HandlerTarget, timeout: float, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            ok = False
            while not ok:
                await asyncio.sleep(EAGER_SECONDS)
                ok = (await run_handler(probe, target, timeout)).ok
