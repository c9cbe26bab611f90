"""A pod's volumes as folders, and their paths for each container."""

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

from spottrain_local.node.api import ApiError, JSONObject
from spottrain_local.node.cluster_objects import ObjectSource, Token, TokenRequest
from spottrain_local.node.containers import ContainerConfigError, Mount
from spottrain_local.node.downward import PodPlace, field_value, resource_value
from spottrain_local.node.environment import config_map_data, expand, secret_data
from spottrain_local.node.limits import pod_group

TERMINATION_PATH = "/dev/termination-log"
# Kinds of volumes that containers cannot write to.
_READ_ONLY_KINDS = frozenset({"configMap", "secret", "downwardAPI", "projected"})
_DATA_LINK = "..data"
# Seconds between tries to get a token: the authorizer learns a moment later than the node that it has the pod.
_TOKEN_PAUSES = (0.1, 0.2, 0.4, 0.8)


class VolumeError(Exception):
    """A volume cannot be set up yet; the text says why. The node retries."""


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """One file of a volume whose content comes from the cluster."""

    content: bytes
    mode: int = 0o644


def write_atomically(directory: Path, files: Mapping[str, VolumeFile], group: int | None = None) -> bool:
    """Replace all files of a folder at once, and return whether anything changed.

    If there is a `group`, it owns the files and can read them.

    This works as in a kubelet: the files are in a folder of their own, the link `..data` to it is replaced, and each
    name is a link through `..data`. A reader sees either the old files or the new ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / _DATA_LINK
    if group is not None:
        files = {name: VolumeFile(file.content, file.mode | 0o040) for name, file in files.items()}
    old = directory / os.readlink(link) if link.is_symlink() else None
    if old and _read_tree(old) == files:
        return False
    fresh = directory / f"..{datetime.now(UTC).strftime('%Y_%m_%d_%H_%M_%S.%f')}"
    try:
        _write_tree(fresh, files, group)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    staged = directory / "..data_tmp"
    staged.unlink(missing_ok=True)
    staged.symlink_to(fresh.name)
    staged.replace(link)
    _link_names(directory, {name.split("/")[0] for name in files})
    if old:
        shutil.rmtree(old, ignore_errors=True)
    return True


def _write_tree(root: Path, files: Mapping[str, VolumeFile], group: int | None) -> None:
    root.mkdir()
    for name, file in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(mode=0o600)
        target.write_bytes(file.content)
        target.chmod(file.mode)
        if group is not None:
            os.chown(target, -1, group)


def _read_tree(root: Path) -> dict[str, VolumeFile]:
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): VolumeFile(path.read_bytes(), path.stat().st_mode & 0o777) for path in paths}


def _link_names(directory: Path, names: set[str]) -> None:
    for name in names:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path(_DATA_LINK) / name)
    for path in directory.iterdir():
        if path.is_symlink() and not path.name.startswith("..") and path.name not in names:
            path.unlink()


class PodVolumes:
    """The volumes of one pod under `root`, one folder a volume.

    `owns_files` means that files belong to the group that the pod asks for (fsGroup). That needs root.
    """

    def __init__(
        self, root: Path, pod: JSONObject, place: PodPlace, source: ObjectSource, *, owns_files: bool = False
    ) -> None:
        self._root = root
        self._owns_files = owns_files
        self._pod = pod
        self._place = place
        self._source = source
        self._tokens: dict[TokenRequest, Token] = {}

    async def refresh(self, pod: JSONObject) -> None:
        """Set up all volumes, or update them.

        One that fails keeps no other from it: a token is renewed though a ConfigMap is gone.

        Raises:
            VolumeError: One of them cannot be set up yet.
        """
        self._pod = pod
        failures = []
        for volume in pod["spec"].get("volumes") or []:
            try:
                await self._refresh(volume)
            except (ContainerConfigError, ValueError, OSError) as error:
                failures.append((volume["name"], error))
        if failures:
            name, first = failures[0]
            raise VolumeError(f'volume "{name}": {first}') from first

    async def _refresh(self, volume: JSONObject) -> None:
        directory = self._root / volume["name"]
        group = pod_group(self._pod) if self._owns_files else None
        if "emptyDir" in volume:
            if not directory.exists():
                directory.mkdir(parents=True)
                _share(directory, group)
        elif "hostPath" in volume:
            _check_host_path(volume["hostPath"])
        elif files := await self._files(volume):
            await asyncio.to_thread(write_atomically, directory, files, group)
        else:
            write_atomically(directory, {})

    async def _files(self, volume: JSONObject) -> dict[str, VolumeFile]:
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if kind in volume:
                source = volume[kind]
                mode = source.get("defaultMode", 0o644)
                if kind != "projected":
                    return await self._projection(kind, source, mode)
                files: dict[str, VolumeFile] = {}
                for item in source.get("sources") or []:
                    for projected, content in item.items():
                        files |= await self._projection(projected, content, mode)
                return files
        kinds = ", ".join(key for key in volume if key != "name") or "of no kind"
        raise ValueError(f"{kinds}: this node has no such volumes")

    async def _projection(self, kind: str, source: JSONObject, mode: int) -> dict[str, VolumeFile]:
        namespace = self._pod["metadata"]["namespace"]
        match kind:
            case "configMap":
                text = await config_map_data(self._source, namespace, source) or {}
                return _select({k: v.encode() for k, v in text.items()}, source, mode)
            case "secret":
                return _select(await secret_data(self._source, namespace, source) or {}, source, mode)
            case "downwardAPI":
                return self._downward(source, mode)
            case "serviceAccountToken":
                return {source["path"]: VolumeFile((await self._token(source)).encode(), mode)}
        raise ValueError(f"{kind}: this node has no such projections")

    def _downward(self, source: JSONObject, mode: int) -> dict[str, VolumeFile]:
        files = {}
        for item in source.get("items") or []:
            if ref := item.get("fieldRef"):
                text = field_value(self._pod, self._place, ref["fieldPath"])
            else:
                ref = item["resourceFieldRef"]
                containers = self._pod["spec"]["containers"]
                container = next(c for c in containers if c["name"] == ref["containerName"])
                text = resource_value(container, self._place, ref)
            files[item["path"]] = VolumeFile(text.encode(), item.get("mode") or mode)
        return files

    async def _token(self, source: JSONObject) -> str:
        metadata = self._pod["metadata"]
        request = TokenRequest(
            namespace=metadata["namespace"],
            service_account=self._pod["spec"].get("serviceAccountName") or "default",
            pod_name=metadata["name"],
            pod_uid=metadata["uid"],
            audience=source.get("audience") or "",
            expiration_seconds=source.get("expirationSeconds") or 3600,
        )
        token = self._tokens.get(request)
        if token is None or token.wants_refresh(datetime.now(UTC)):
            token = self._tokens[request] = await self._issued(request)
        return token.value

    async def _issued(self, request: TokenRequest) -> Token:
        for pause in _TOKEN_PAUSES:
            try:
                return await self._source.token(request)
            except ApiError as error:
                if error.status != HTTPStatus.FORBIDDEN:
                    raise
            await asyncio.sleep(pause)
        return await self._source.token(request)

    def mounts(self, container: JSONObject, directory: Path, env: Mapping[str, str]) -> tuple[Mount, ...]:
        """Return the container's mounts.

        `directory` has its termination message; `env` is for subPathExpr.
        """
        termination = container.get("terminationMessagePath") or TERMINATION_PATH
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes") or []}
        return (
            Mount(source=directory / "termination", target=termination),
            *(
                Mount(
                    source=self._mounted(volumes[mount["name"]], mount, env),
                    target=mount["mountPath"],
                    read_only=bool(mount.get("readOnly")) or not _READ_ONLY_KINDS.isdisjoint(volumes[mount["name"]]),
                )
                for mount in container.get("volumeMounts") or []
            ),
        )

    def _mounted(self, volume: JSONObject, mount: JSONObject, env: Mapping[str, str]) -> Path:
        host_path = volume.get("hostPath")
        base = Path(host_path["path"]) if host_path else self._root / volume["name"]
        sub_path = mount.get("subPath") or expand(mount.get("subPathExpr") or "", dict(env))
        if not sub_path:
            return base
        if "emptyDir" in volume and not (base / sub_path).exists():
            (base / sub_path).mkdir(parents=True)
            _share(base / sub_path, pod_group(self._pod) if self._owns_files else None)
        return base / sub_path


def _share(directory: Path, group: int | None) -> None:
    """Let every user write into a folder; new files belong to the group."""
    if group is not None:
        os.chown(directory, -1, group)
    directory.chmod(0o777 if group is None else 0o2777)


def _check_host_path(source: JSONObject) -> None:
    path, kind = Path(source["path"]), source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        if not path.exists():
            path.touch()
    elif kind and not path.exists():
        raise ValueError(f"hostPath {path} does not exist")


def _select(data: Mapping[str, bytes], source: JSONObject, mode: int) -> dict[str, VolumeFile]:
    items = source.get("items")
    if items is None:
        return {name: VolumeFile(content, mode) for name, content in data.items()}
    missing = [item["key"] for item in items if item["key"] not in data]
    if missing and not source.get("optional"):
        raise ValueError(f"references non-existent config key: {missing[0]}")
    return {
        item["path"]: VolumeFile(data[item["key"]], item.get("mode") or mode) for item in items if item["key"] in data
    }
