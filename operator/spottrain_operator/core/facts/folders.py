"""Which folder a job's checkpoint.uri names.

Two jobs that write to the same folder would fence each other.
"""

from __future__ import annotations

import posixpath
from urllib.parse import urlsplit

from spottrain_operator.core.model import JobView

# Its namespace, its container (an endpoint and a bucket, or a volume), and the path inside.
Folder = tuple[str, ...]

# Environment variables with the address of a store, by scheme. The first one that is set counts.
ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",)}


def folder_of(job: JobView) -> Folder:
    """Return the folder of a job.

    It is the same for two jobs of a namespace whose commits would meet.

    Jobs of two namespaces never have the same: neither learns of the other, and the fences of a folder guard what
    is in it.

    Slashes at the end, or two in a row, don't make a different folder. A store writes only HEAD and attempts/ below
    its folder, so a folder inside another one is a folder of its own.
    """
    scheme, bucket, path = _split(job.spec.checkpoint.uri)
    if scheme == "file":
        return (job.namespace, *_on_volume(job, _parts(posixpath.normpath(path))))
    return (job.namespace, _endpoint(job, scheme), scheme, bucket, *_parts(path))


def _endpoint(job: JobView, scheme: str) -> str:
    """The address of the store, as the trainer finds it.

    It is the same for all jobs that name none. What a ConfigMap, a Secret or the image says is not known.
    """
    env = {variable.name: variable.value for variable in job.spec.env}
    addresses = [job.spec.checkpoint.endpoint_url, *(env.get(name) for name in ENDPOINTS.get(scheme, ()))]
    if scheme == "az" and (account := env.get("AZURE_STORAGE_ACCOUNT")):
        addresses.append(f"https://{account}.blob.core.windows.net")
    address = next((each for each in addresses if each), "")
    protocol, host, path = _split(address)
    return f"{protocol}://{host.lower()}{path.rstrip('/')}"


def _split(uri: str) -> tuple[str, str, str]:
    """Scheme, bucket or host, and path, as the trainer reads them."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # no store has that name, so the job is going to fail
        return "", "", uri
    return parts.scheme, parts.netloc, parts.path


def _on_volume(job: JobView, path: Folder) -> Folder:
    """The volume that holds the folder.

    Jobs share the volume of a claim, and no other. If no volume is mounted, they count as seeing the same folder, as
    on a local cluster.
    """
    template = job.spec.pod_template
    mounts = {_parts(posixpath.normpath(mount.mount_path)): mount for mount in template.volume_mounts}
    around = max((target for target in mounts if path[: len(target)] == target), key=len, default=None)
    if around is None:
        return ("no volume", *path)
    mount = mounts[around]
    volume = next((volume for volume in template.volumes if volume.name == mount.name), None)
    if volume is None or volume.persistent_volume_claim is None:
        return ("volume of", job.uid)
    claim = str(volume.persistent_volume_claim.to_dict().get("claimName"))
    return ("claim", claim, *_parts(mount.sub_path or ""), *path[len(around) :])


def _parts(path: str) -> Folder:
    return tuple(part for part in path.split("/") if part)
