"""Which folder a job's checkpoint.uri names.

Two jobs that write to the same folder would fence each other.
"""

from __future__ import annotations

from spottrain_operator.core.model import JobView

Folder = tuple[str, ...]  # its container (an endpoint and a bucket, or a volume), and the path inside


def folder_of(job: JobView) -> Folder:
    """The folder of a job. It is the same for two jobs whose commits would meet.

    Slashes at the end, or two in a row, don't make a different folder. A store writes only HEAD and attempts/ below
    its folder, so a folder inside another one is a folder of its own.
    """
    checkpoint = job.spec.checkpoint
    parts = _parts(checkpoint.uri)
    if parts[:1] == ("file:",):
        return _on_volume(job, parts[1:])
    return ((checkpoint.endpoint_url or "").rstrip("/"), *parts)


def _on_volume(job: JobView, path: Folder) -> Folder:
    """The volume that holds the folder.

    The volume of a claim belongs to its namespace, any other volume to the job. If no volume is mounted, all jobs
    count as seeing the same folder, as on a local cluster.
    """
    template = job.spec.pod_template
    mounts = {_parts(mount.mount_path): mount for mount in template.volume_mounts}
    around = max((target for target in mounts if path[: len(target)] == target), key=len, default=None)
    if around is None:
        return ("no volume", *path)
    mount = mounts[around]
    volume = next((volume for volume in template.volumes if volume.name == mount.name), None)
    if volume is None or volume.persistent_volume_claim is None:
        return ("volume of", job.uid)
    claim = str(volume.persistent_volume_claim.to_dict().get("claimName"))
    return ("claim", job.namespace, claim, *_parts(mount.sub_path or ""), *path[len(around) :])


def _parts(path: str) -> Folder:
    return tuple(part for part in path.split("/") if part)
