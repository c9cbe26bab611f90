"""A container's environment, command and arguments, as a kubelet sets them."""

import base64
import re
from typing import Any

from spottrain_api.contract.names import ENV_GPUS
from spottrain_local.node.api import JSONObject
from spottrain_local.node.cluster_objects import ObjectSource
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.containers import ContainerConfigError
from spottrain_local.node.downward import PodPlace, field_value, resource_value

_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) if NAME is known. $$ stands for $, so $$(NAME) becomes $(NAME)."""

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replacement, text)


async def build_environment(
    pod: JSONObject, container: JSONObject, *, config: NodeConfig, place: PodPlace, source: ObjectSource
) -> dict[str, str]:
    """Return the container's variables.

    They are the ones that every container on this node gets, and the pod's own, which win. The node process's own
    environment is not passed on.

    Raises:
        ContainerConfigError: Something that a variable refers to is missing.
    """
    env = _node_environment(pod, config) | await _declared(pod, container, place, source)
    # Its GPUs are counted, and nothing more: ranks use what the machine has.
    env.pop(ENV_GPUS, None)
    return env


def _node_environment(pod: JSONObject, config: NodeConfig) -> dict[str, str]:
    env = {
        "HOSTNAME": hostname(pod),
        "KUBERNETES_SERVICE_HOST": config.apiserver_host,
        "KUBERNETES_SERVICE_PORT": str(config.apiserver_port),
        "KUBERNETES_SERVICE_PORT_HTTPS": str(config.apiserver_port),
    }
    return env | metadata_environment(config) | config.pod_env


def hostname(pod: JSONObject) -> str:
    """Return the pod's hostname."""
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])


def metadata_environment(config: NodeConfig) -> dict[str, str]:
    """Return the variables that name the metadata server.

    There are none if the server has the clouds' own address.
    """
    if config.metadata_ip:
        return {}
    match config.provider:
        case "eks":
            return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": config.metadata_url}
        case "gke":
            return {"GCE_METADATA_HOST": f"{config.metadata_host}:{config.metadata_port}"}
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
