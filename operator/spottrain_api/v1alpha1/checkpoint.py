"""Where commits go, and how often."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .resource import Resource

INTERVAL_PATTERN = r"^(auto|[1-9][0-9]*(steps|s|m))$"


class OnNotice(StrEnum):
    """What follows a preemption notice. IMMEDIATE: commit and stop at the next step. LAST_SAFE: train on, and
    commit when what remains of the notice is just enough for it."""

    IMMEDIATE = "immediate"
    LAST_SAFE = "lastSafe"


class Checkpoint(Resource):
    """Where commits go, and how often. `interval`: auto, or a number with steps, s or m ("50steps", "5m").

    The newest `keep` commits are kept and, with `keepEvery`, also the first at or after each of its multiples.
    """

    cel_rules = (
        (
            "self.uri.matches('^((s3|gs)://[^/]+.*|file:///.+)$')",
            "checkpoint.uri: unknown scheme or no bucket; use s3://bucket/prefix, gs://bucket/prefix or "
            "file:///absolute/path",
        ),
        (
            "!has(self.endpointURL) || self.endpointURL.matches('^https?://[^/]+.*$')",
            "checkpoint.endpointURL: write http://host:port or https://host:port",
        ),
        (
            "self.uri == oldSelf.uri",
            "checkpoint.uri can't change while a job exists: its commits are there; make a new job",
        ),
    )
    uri: Annotated[str, Field(min_length=1, max_length=1024)]
    interval: Annotated[str, Field(pattern=INTERVAL_PATTERN, max_length=16)] = "auto"
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    keep_every: Annotated[int | None, Field(ge=1, description="Steps: of so many, one commit is kept.")] = None
    on_notice: OnNotice = OnNotice.IMMEDIATE
    peer_replicas: Annotated[
        int,
        Field(
            ge=0,
            le=1,
            description="1: each member's newest shard is in another member's memory too, so that a node lost "
            "without notice costs the steps since then alone, one or two with peerInterval 1. Needs memory for about "
            "seven times a node's shard.",
        ),
    ] = 0
    peer_interval: Annotated[
        int | None,
        Field(ge=1, description="Steps from one replica to the next; default: as few as cost a step at most 2%."),
    ] = None
    endpoint_url: Annotated[str | None, Field(alias="endpointURL", max_length=1024)] = None
