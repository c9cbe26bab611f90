"""A container's environment, command and arguments, as a kubelet sets them."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spottrain_local.node.api import JSONObject
from spottrain_local.node.cluster_objects import ObjectSource
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.downward import PodPlace, field_value, resource_value
from spottrain_local.node.paths import PathRewriter

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SERVICE_ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
# An AF_UNIX address has at most 107 bytes; Python's multiprocessing adds 32 to the temporary folder.
_MAX_TMPDIR = 75
_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")


class ContainerConfigError(Exception):
    """The container cannot be configured yet; the text says what is missing. The node retries."""


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) if NAME is known. $$ stands for $, so $$(NAME) becomes $(NAME)."""

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replacement, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFiles:
    """The folders of a container's process: its home, and the one for temporary files."""

    home: Path
    tmp: Path


async def build_environment(
    pod: JSONObject,
    container: JSONObject,
    *,
    config: NodeConfig,
    place: PodPlace,
    files: ContainerFiles,
    source: ObjectSource,
    rewrite: PathRewriter,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the process's environment, and the pod's own variables before their paths are rewritten.

    $(NAME) in `command` and `args` refers to the second. The node process's own environment is not passed on.

    Raises:
        ContainerConfigError: Something that a variable refers to is missing.
    """
    declared = await _declared(pod, container, place, source)
    known = node_environment(pod, config, place, files, rewrite) | declared
    env = node_environment(pod, config, place, files, rewrite)
    env |= {name: rewrite(value) for name, value in declared.items()}
    if config.path_prefix:
        env["PATH"] = f"{config.path_prefix}:{env['PATH']}"
    if config.preload_library and config.hosts_file:
        own = env.get("LD_PRELOAD")
        env["LD_PRELOAD"] = f"{config.preload_library}:{own}" if own else str(config.preload_library)
        env["NSS_WRAPPER_HOSTS"] = str(config.hosts_file)
    return env, known


def node_environment(
    pod: JSONObject, config: NodeConfig, place: PodPlace, files: ContainerFiles, rewrite: PathRewriter
) -> dict[str, str]:
    """Return the variables that every container on this node gets. The pod's own variables override them."""
    env = {
        "PATH": DEFAULT_PATH,
        "HOME": str(files.home),
        "LANG": "C.UTF-8",
        "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
        "KUBERNETES_SERVICE_HOST": config.apiserver_host,
        "KUBERNETES_SERVICE_PORT": str(config.apiserver_port),
        "KUBERNETES_SERVICE_PORT_HTTPS": str(config.apiserver_port),
    }
    if (service_account := rewrite(SERVICE_ACCOUNT_PATH)) != SERVICE_ACCOUNT_PATH:
        env["SPOTTRAIN_SERVICEACCOUNT_DIR"] = service_account
    tmp = rewrite("/tmp")
    if tmp != "/tmp":
        env["TMPDIR"] = tmp
    elif len(str(files.tmp)) <= _MAX_TMPDIR:
        env["TMPDIR"] = str(files.tmp)
    return env | metadata_environment(config) | config.pod_env


def metadata_environment(config: NodeConfig) -> dict[str, str]:
    """Return the variables that name the metadata server, since the clouds' own addresses are not available here."""
    match config.provider:
        case "eks":
            return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": config.metadata_url}
        case "gke":
            return {"GCE_METADATA_HOST": f"{config.node_ip}:{config.metadata_port}"}
        case "aks":
            return {"SPOTTRAIN_AZURE_METADATA_ENDPOINT": config.metadata_url}


async def _declared(pod: JSONObject, container: JSONObject, place: PodPlace, source: ObjectSource) -> dict[str, str]:
    namespace = pod["metadata"]["namespace"]
    env: dict[str, str] = {}
    for item in container.get("envFrom") or []:
        prefix = item.get("prefix", "")
        data = await _env_from(namespace, item, source)
        env |= {prefix + name: value for name, value in data.items()}
    for item in container.get("env") or []:
        if "valueFrom" in item:
            value = await _value_from(pod, container, item["valueFrom"], place, source)
            if value is None:
                continue
        else:
            value = expand(item.get("value", ""), env)
        env[item["name"]] = value
    return env


async def _env_from(namespace: str, item: JSONObject, source: ObjectSource) -> dict[str, str]:
    if ref := item.get("configMapRef"):
        return await config_map_data(source, namespace, ref) or {}
    if ref := item.get("secretRef"):
        data = await secret_data(source, namespace, ref) or {}
        return {name: value.decode(errors="replace") for name, value in data.items()}
    return {}


async def _value_from(
    pod: JSONObject, container: JSONObject, origin: JSONObject, place: PodPlace, source: ObjectSource
) -> str | None:
    namespace = pod["metadata"]["namespace"]
    if ref := origin.get("configMapKeyRef"):
        data = await config_map_data(source, namespace, ref)
        found: str | None = _key(data, ref, f'configmap "{namespace}/{ref["name"]}"')
        return found
    if ref := origin.get("secretKeyRef"):
        secret = await secret_data(source, namespace, ref)
        value = _key(secret, ref, f'secret "{namespace}/{ref["name"]}"')
        return None if value is None else str(value, errors="replace")
    try:
        if ref := origin.get("fieldRef"):
            return field_value(pod, place, ref["fieldPath"])
        if ref := origin.get("resourceFieldRef"):
            return resource_value(_named_container(pod, ref.get("containerName")) or container, place, ref)
    except ValueError as error:
        raise ContainerConfigError(str(error)) from error
    raise ContainerConfigError(f"valueFrom has none of the known sources: {', '.join(origin) or 'it is empty'}.")


def _named_container(pod: JSONObject, name: str | None) -> JSONObject | None:
    return next((c for c in pod["spec"]["containers"] if c["name"] == name), None)


def _key(data: dict[str, Any] | None, ref: JSONObject, what: str) -> Any:
    if data is not None and ref["key"] in data:
        return data[ref["key"]]
    if ref.get("optional"):
        return None
    raise ContainerConfigError(f"couldn't find key {ref['key']} in {what}")


async def config_map_data(source: ObjectSource, namespace: str, ref: JSONObject) -> dict[str, str] | None:
    """Return a ConfigMap's text entries, or None if it is optional and absent.

    Raises:
        ContainerConfigError: It is absent.
    """
    found = await source.config_map(namespace, ref["name"])
    if found is None and not ref.get("optional"):
        raise ContainerConfigError(f'configmap "{ref["name"]}" not found')
    return None if found is None else dict(found.get("data") or {})


async def secret_data(source: ObjectSource, namespace: str, ref: JSONObject) -> dict[str, bytes] | None:
    """Return a Secret's decoded entries, or None if it is optional and absent.

    Raises:
        ContainerConfigError: It is absent.
    """
    name = ref.get("name") or ref["secretName"]
    found = await source.secret(namespace, name)
    if found is None:
        if ref.get("optional"):
            return None
        raise ContainerConfigError(f'secret "{name}" not found')
    return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
