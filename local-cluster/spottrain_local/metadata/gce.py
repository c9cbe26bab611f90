"""Compute Engine's metadata server, with wait_for_change.

https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

import asyncio
import hashlib
import time

from aiohttp import web

from spottrain_local.metadata.identity import InstanceMetadata

_POLL_SECONDS = 0.1
_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


def add_routes(app: web.Application, instance: InstanceMetadata) -> None:
    """Serve this instance's view under /computeMetadata/v1."""

    async def read(request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            text = "Missing required header: Metadata-Flavor: Google"
            return web.Response(status=403, text=text, headers=_FLAVOR)
        path = request.match_info["path"].strip("/")
        if path not in _values(instance):
            return web.Response(status=404, text="Not Found", headers=_FLAVOR)
        value = _values(instance)[path]
        if request.query.get("wait_for_change", "").lower() == "true":
            timeout = request.query.get("timeout_sec") or "inf"
            if timeout != "inf" and not timeout.isdigit():
                return web.Response(status=400, text="timeout_sec is not a whole number", headers=_FLAVOR)
            value = await _changed(instance, path, value, request, float(timeout))
        return web.Response(text=value, headers={**_FLAVOR, "ETag": etag(value)}, content_type="application/text")

    async def root(_: web.Request) -> web.Response:
        return web.Response(text="computeMetadata/\n", headers=_FLAVOR)

    app.router.add_get("/", root)
    app.router.add_get("/computeMetadata/v1/{path:.*}", read)


def etag(value: str) -> str:
    """Return the ETag of a value: 16 hexadecimal digits."""
    return hashlib.sha256(value.encode()).hexdigest()[:16]


async def _changed(
    instance: InstanceMetadata, path: str, value: str, request: web.Request, timeout_seconds: float
) -> str:
    """Wait until the value differs from the one that the caller knows (last_etag).

    Without last_etag, that is the current value.
    """
    known = request.query.get("last_etag") or etag(value)
    give_up = time.monotonic() + timeout_seconds
    while etag(value) == known and time.monotonic() < give_up and request.transport is not None:
        await asyncio.sleep(_POLL_SECONDS)
        value = _values(instance)[path]
    return value


def _values(instance: InstanceMetadata) -> dict[str, str]:
    interruption = instance.interruption()
    kind = interruption.kind if interruption else None
    maintenance = "TERMINATE_ON_HOST_MAINTENANCE" if kind == "maintenance" else "NONE"
    project = "projects/000000000000"
    return {
        "instance/id": str(int(hashlib.sha256(instance.instance_id.encode()).hexdigest()[:15], 16)),
        "instance/name": instance.name,
        "instance/hostname": f"{instance.name}.c.spottrain-local.internal",
        "instance/machine-type": f"{project}/machineTypes/{instance.instance_type}",
        "instance/zone": f"{project}/zones/{instance.zone}",
        "instance/preempted": "TRUE" if kind == "preempt" and instance.spot else "FALSE",
        "instance/maintenance-event": maintenance,
        "instance/scheduling/preemptible": "TRUE" if instance.spot else "FALSE",
        "instance/scheduling/automatic-restart": "FALSE" if instance.spot else "TRUE",
        "project/project-id": "spottrain-local",
    }
