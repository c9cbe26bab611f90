"""Starts the benchmark's ranks, and an S3 server for them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from spottrain_local.layout import ClusterLayout
from spottrain_local.objectstore import GRPC_PORT_NAMES, PORT_NAMES, ObjectStore, remove_sockets

BUCKET = "bench"
_PATIENCE_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    """All are held until the last is found, so that no two are the same."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def run_ranks(
    phase: str, uri: str, *, world_size: int, mib: int, rounds: int, folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Run one phase and return rank 0's report; no process is left, whatever happens."""
    result = folder / f"{phase}.json"
    result.unlink(missing_ok=True)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.checkpoint.ranks", phase, uri, str(mib), str(rounds), str(result)]
    size = str(world_size)
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, env={**os.environ, **environment, **world, **own})
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        if any(process.wait() for process in ranks):
            raise SystemExit(f"A rank of the phase {phase} failed; see above.")
    report: dict[str, Any] = json.loads(result.read_text())
    return report


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """SeaweedFS with one bucket while the block runs; yields the environment of its clients."""
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


def _make_bucket(environment: dict[str, str]) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL_S3"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=BUCKET)
            # Buckets can be made a moment before data can be stored.
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
            return
        except (BotoCoreError, ClientError):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.2)
