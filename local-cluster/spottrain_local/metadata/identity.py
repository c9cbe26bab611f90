"""The facts about a node that its metadata server shows."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from spottrain_local.metadata.interruption import Interruption


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMetadata:
    """The instance behind a node. Each request calls `interruption` and `now`."""

    instance_id: str
    name: str
    instance_type: str
    zone: str
    spot: bool
    interruption: Callable[[], Interruption | None]
    now: Callable[[], datetime]


def utc_text(time: datetime) -> str:
    """Write a time as the clouds do: RFC 3339 with whole seconds and a Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
