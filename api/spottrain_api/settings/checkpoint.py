"""Where commits go, and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.settings.choices import OnNotice
from spottrain_api.settings.interval import Interval
from spottrain_api.settings.resource import Line, Resource


class CheckpointConfig(Resource):
    """Where commits go, and how often."""

    uri: str | None = None
    """Folder of the commits. A spec requires it; None: nothing is saved, in runs without an operator."""
    interval: Annotated[
        Interval,
        Field(
            description="How often to commit between preemptions: a number of steps (50steps), seconds (30s) or "
            "minutes (5m), or auto. auto finds the interval from the measured cost of a checkpoint and the losses "
            "without notice (Young/Daly), between 10 seconds and 30 minutes.",
        ),
    ] = Interval()
    keep: Annotated[int, Field(ge=1, le=1000, description="Number of the newest commits to keep.")] = 2
    keep_every: Annotated[
        int | None,
        Field(
            ge=1,
            description="Steps between commits to keep for good: the first commit at or after each multiple of this "
            "number stays. Default: none stay beyond `keep`.",
        ),
    ] = None
    on_notice: OnNotice = OnNotice.IMMEDIATE
    peer_replicas: Annotated[
        int,
        Field(
            ge=0,
            le=1,
            description="Number of other members that hold each member's newest shard in memory. With 1, a node lost "
            "without notice costs the steps since the newest replica, one or two with peerInterval 1, instead of the "
            "steps since the newest commit. It takes about seven times the bytes of a node's shard in the node's "
            "memory.",
        ),
    ] = 0
    peer_interval: Annotated[
        int | None,
        Field(
            ge=1,
            description="Steps from one replica to the next, if peerReplicas is 1. "
            "Default: as few as lengthen a step by at most 2%.",
        ),
    ] = None
    endpoint_url: Annotated[
        Line | None,
        Field(
            alias="endpointURL",
            max_length=1024,
            description="Address of an object store other than the cloud's own, as http://host:port or "
            "https://host:port. For az://, the address of the storage account, such as "
            "https://account.blob.core.windows.net. Default: the cloud's, or the account of AZURE_STORAGE_ACCOUNT or "
            "AZURE_STORAGE_CONNECTION_STRING in env.",
        ),
    ] = None
    encryption: Annotated[
        Line | None,
        Field(
            min_length=1,
            max_length=2048,
            description="How each write asks the store to encrypt, if a policy of the bucket demands that: AES256 or "
            "the ARN of a KMS key on s3://, the resource name of a Cloud KMS key on gs://, the name of an encryption "
            "scope on az://. "
            "Default: as the bucket is set up.",
        ),
    ] = None
