"""EC2's instance metadata service, only version 2, which requires tokens.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
"""

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from aiohttp import web

from spottrain_local.metadata.identity import InstanceMetadata, utc_text
from spottrain_local.metadata.interruption import Interruption

TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
MAX_TTL_SECONDS = 21600

Handler = Callable[[web.Request], Awaitable[web.Response]]


def add_routes(app: web.Application, instance: InstanceMetadata) -> None:
    """Serve this instance's view under /latest."""
    tokens: dict[str, datetime] = {}

    async def issue(request: web.Request) -> web.Response:
        ttl = request.headers.get(TTL_HEADER, "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TTL_SECONDS:
            return web.Response(status=400, text="Bad Request")
        now = instance.now()
        for old in [token for token, expiry in tokens.items() if expiry <= now]:
            del tokens[old]
        token = secrets.token_urlsafe(40)
        tokens[token] = now + timedelta(seconds=int(ttl))
        return web.Response(text=token, headers={TTL_HEADER: ttl})

    def valid(request: web.Request) -> bool:
        expiry = tokens.get(request.headers.get(TOKEN_HEADER, ""))
        return expiry is not None and expiry > instance.now()

    async def read(request: web.Request) -> web.Response:
        if not valid(request):
            return web.Response(status=401, text="Unauthorized")
        path = request.match_info["path"].strip("/")
        signals = _signals(instance)
        if path in signals:
            return _text(signals[path]) if isinstance(signals[path], str) else web.json_response(signals[path])
        values = _values(instance)
        if path in values:
            return _text(values[path])
        children = sorted({p[len(path) :].strip("/").split("/")[0] for p in _below([*values, *signals], path)})
        return _text("\n".join(children)) if children else web.Response(status=404, text="Not Found")

    app.router.add_put("/latest/api/token", issue)
    app.router.add_get("/latest/meta-data{path:(/.*)?}", read)


def _text(value: object) -> web.Response:
    return web.Response(text=str(value))


def _below(paths: list[str], path: str) -> list[str]:
    return [p for p in paths if not path or p.startswith(path + "/")]


def _values(instance: InstanceMetadata) -> dict[str, str]:
    return {
        "instance-id": instance.instance_id,
        "instance-type": instance.instance_type,
        "instance-life-cycle": "spot" if instance.spot else "on-demand",
        "local-hostname": instance.name,
        "placement/availability-zone": instance.zone,
        "placement/region": instance.zone.rstrip("abcdef"),
    }


def _signals(instance: InstanceMetadata) -> dict[str, object]:
    """Return the paths that exist only while an interruption is announced."""
    interruption = instance.interruption()
    if interruption is not None and interruption.kind == "maintenance":
        return {"events/maintenance/scheduled": [_maintenance(interruption)]}
    if interruption is None or not instance.spot:
        return {}
    if interruption.kind == "rebalance":
        notice = {"noticeTime": utc_text(interruption.notice_at.astimezone(UTC))}
        return {"events/recommendations/rebalance": notice}
    time = utc_text(interruption.deadline.astimezone(UTC))
    signals: dict[str, object] = {"spot/instance-action": {"action": interruption.action, "time": time}}
    if interruption.action == "terminate":
        signals["spot/termination-time"] = time
    return signals


def _maintenance(interruption: Interruption) -> dict[str, str]:
    """Return an event that stops the instance."""
    begins, ends = interruption.deadline.astimezone(UTC), interruption.deadline.astimezone(UTC) + timedelta(hours=2)
    return {
        "Code": "instance-stop",
        "Description": "The instance is running on degraded hardware",
        "EventId": f"instance-event-{interruption.id}",
        "NotAfter": f"{ends:%d %b %Y %H:%M:%S} GMT",
        "NotBefore": f"{begins:%d %b %Y %H:%M:%S} GMT",
        "State": "active",
    }
