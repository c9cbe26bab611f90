"""What a metadata server knows about its node."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from spottrain_local.metadata.interruption import Interruption


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The instance that a node is. `interruption` and `now` are asked at each request."""

    instance_id: str
    name: str
    instance_type: str
    zone: str
    spot: bool
    interruption: Callable[[], Interruption | None]
    now: Callable[[], datetime]


def utc_text(time: datetime) -> str:
    """RFC 3339 with whole seconds and a Z, as the clouds write times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
