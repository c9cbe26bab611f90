"""Where commits go, and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.settings.checkpoint import CheckpointConfig
from spottrain_api.settings.interval import INTERVAL_PATTERN
from spottrain_api.settings.resource import Line


class Checkpoint(CheckpointConfig):
    """Where commits go, and how often."""

    cel_rules = (
        (
            "self.uri.matches('^((s3|gs|az)://[^/]+.*|file:///.+)$')",
            "checkpoint.uri: unknown scheme or no bucket; use s3://bucket/prefix, gs://bucket/prefix, "
            "az://container/prefix or file:///absolute/path",
        ),
        (
            "self.uri.matches('^[^?#]*$')",
            "checkpoint.uri: contains ? or #, which can't be part of a folder's name; use other characters",
        ),
        (
            "!has(self.endpointURL) || self.endpointURL.matches('^https?://[^/]+.*$')",
            "checkpoint.endpointURL: not an HTTP address; write http://host:port or https://host:port",
        ),
        (
            "!has(self.encryption) || (self.uri.startsWith('s3://') || !self.uri.startsWith('file://') && "
            "self.encryption != 'AES256')",
            "checkpoint.encryption: write AES256 or a KMS key for s3://, a Cloud KMS key for gs://, an encryption "
            "scope for az://, nothing for file://",
        ),
        (
            f"self.interval.matches('{INTERVAL_PATTERN}')",
            "checkpoint.interval: write auto, or a number from 1 on with steps, s or m, as in 50steps, 30s or 5m",
        ),
        (
            "self.uri == oldSelf.uri",
            "checkpoint.uri can't change while a job exists, as its commits may be there; to correct it, make a "
            "new job: delete this one and apply it again, or apply it under another name",
        ),
    )
    uri: Annotated[
        Line,
        Field(
            min_length=1,
            max_length=1024,
            description="Folder of the commits: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or "
            "file:///absolute/path on a volume that all pods share. A job resumes from the newest commit that it "
            "finds there. If another unfinished job of the namespace writes there, this one waits. Can't change "
            "while the job exists.",
        ),
    ]
