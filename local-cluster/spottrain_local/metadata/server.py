"""One node's metadata server, in the form of its cloud."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from aiohttp import web

from spottrain_local.metadata import azure, ec2, gce
from spottrain_local.metadata.identity import InstanceMetadata
from spottrain_local.metadata.interruption import Interruption, read_interruption

_ROUTES = {"eks": ec2.add_routes, "gke": gce.add_routes, "aks": azure.add_routes}


def _utc_now() -> datetime:
    return datetime.now(UTC)


def build_app(
    *,
    provider: Literal["eks", "gke", "aks"],
    instance_id: str,
    name: str,
    instance_type: str,
    zone: str,
    spot: bool,
    interruption_file: Path,
    now: Callable[[], datetime] = _utc_now,
) -> web.Application:
    """Return the server as an aiohttp application.

    It reads the interruption file at each request. `now` is the cloud's clock.
    """

    def interruption() -> Interruption | None:
        return read_interruption(interruption_file, now())

    instance = InstanceMetadata(
        instance_id=instance_id,
        name=name,
        instance_type=instance_type,
        zone=zone,
        spot=spot,
        interruption=interruption,
        now=now,
    )
    app = web.Application()
    _ROUTES[provider](app, instance)
    return app
