"""S3: a server for the benchmark, and plain transfers to it."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import torch
import torch.distributed as dist
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.checkpoint.state import State, local_tensors
from benchmarks.ports import free_ports
from spottrain_local.layout import ClusterLayout
from spottrain_local.objectstore import GRPC_PORT_NAMES, PORT_NAMES, ObjectStore, remove_sockets

BUCKET = "bench"
_PATIENCE_SECONDS = 60.0
_PARALLEL_PARTS = 4
_PART_BYTES = 8 << 20


@dataclass
class PlainS3:
    """boto3's own multipart transfers.

    They send as many parallel parts as spottrain.
    """

    uri: str
    name: str = "plain parallel writer"

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._client = boto3.client("s3")
        self._transfer = TransferConfig(
            multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_PARALLEL_PARTS
        )

    def save(self, state: State, number: int) -> None:
        data = b"".join(tensor.cpu().numpy().data.cast("B") for tensor in local_tensors(state))
        self._client.upload_fileobj(io.BytesIO(data), self._bucket, self._key(number), Config=self._transfer)

    def finish(self) -> None: ...

    def load(self, state: State, number: int) -> None:
        body = io.BytesIO()
        self._client.download_fileobj(self._bucket, self._key(number), body, Config=self._transfer)
        data, position = body.getbuffer(), 0
        for tensor in local_tensors(state):
            part = data[position : position + tensor.nbytes]
            tensor.copy_(torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape))
            position += tensor.nbytes

    def _key(self, number: int) -> str:
        return f"{self._prefix}/plain-{number}-{dist.get_rank()}"


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """SeaweedFS with one bucket while the block runs.

    Yields the environment of its clients.
    """
    names = (*PORT_NAMES, *GRPC_PORT_NAMES)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    store = ObjectStore(layout=ClusterLayout(root=folder), ports=ports)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log, subprocess.Popen(store.process().argv, stdout=log, stderr=log) as server:
        try:
            environment = store.environment()
            _make_bucket(environment)
            yield environment
        finally:
            server.kill()
            server.wait()
            remove_sockets(ports.values())


def s3_client(environment: dict[str, str]) -> Any:
    """A client of the server that these variables name."""
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )


def _make_bucket(environment: dict[str, str]) -> None:
    client = s3_client(environment)
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=BUCKET)
            # Buckets can be created a moment before data can be stored.
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
            return
        except (BotoCoreError, ClientError):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.2)
