"""The configuration of one node process, read from a JSON file."""

import json
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

Provider = Literal["eks", "gke", "aks"]


class ConfigError(Exception):
    """The configuration is invalid; the text says what to change."""


class Taint(BaseModel):
    """A taint in the form of the Node object."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class NodeConfig(BaseModel):
    """The settings of a node process. Keys are camelCase in the file.

    - `runtime`: `process` runs containers as processes, `podman` as containers.
    - `pod_network`: range of the pods' addresses, from .2 upwards. Pods on the host network have `node_ip`.
    - `metadata_ip`: address of the metadata server. Default: `node_ip`.
    - `pod_apiserver`: URL of the API server for pods. Default: `apiserver`.
    - `network`, `gateway`: number of the network of podman's pods, and the address of its bridge, which serves names.
    - `path_prefix`: first entry of the pods' PATH.
    - `working_dir`: working directory of every image. Default: the container's home.
    - `preload_library`, `hosts_file`: make names of Services resolvable, by libnss_wrapper.
    - `streams_program`: path of kubelet-streams, which serves `kubectl exec`, `attach` and `port-forward`.
    - `crash_loop_seconds`: first delay between restarts. A kubelet has 10; the default suits rehearsals.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    name: str
    provider: Provider
    capacity_type: Literal["on-demand", "spot"]
    instance_type: str = "local"
    zone: str = "local-a"
    gpus: int = Field(default=0, ge=0)
    cpu: str = "8"
    memory: str = "32Gi"
    labels: dict[str, str] = Field(default_factory=dict)
    taints: list[Taint] = Field(default_factory=list)
    node_ip: str = Field(alias="nodeIP")
    pod_network: str
    apiserver: str
    ca_file: Path
    client_cert_file: Path
    client_key_file: Path
    serving_cert_file: Path
    serving_key_file: Path
    client_ca_file: Path | None = Field(default=None, alias="clientCAFile")
    kubelet_port: int
    metadata_port: int
    metadata_ip: str = Field(default="", alias="metadataIP")
    pod_apiserver: str = ""
    network: int = 0
    gateway: str = ""
    state_dir: Path
    hosts_file: Path | None = None
    preload_library: Path | None = None
    pod_env: dict[str, str] = Field(default_factory=dict)
    path_prefix: str = ""
    streams_program: Path | None = None
    working_dir: Path | None = None
    runtime: Literal["process", "podman"] = "process"
    instance_id: str | None = Field(default=None, alias="instanceID")
    max_pods: int = 110
    crash_loop_seconds: float = 1.0
    crash_loop_max_seconds: float = 300.0
    volume_sync_seconds: float = 2.0
    lease_renew_seconds: float = 10.0
    shutdown_grace_seconds: float = 10.0

    @property
    def apiserver_host(self) -> str:
        """Host of the API server for pods."""
        return urlsplit(self.pod_apiserver or self.apiserver).hostname or "127.0.0.1"

    @property
    def apiserver_port(self) -> int:
        """Port of the API server for pods."""
        return urlsplit(self.pod_apiserver or self.apiserver).port or 443

    @property
    def metadata_host(self) -> str:
        """Address of this node's metadata server."""
        return self.metadata_ip or self.node_ip

    @property
    def metadata_url(self) -> str:
        """URL of this node's metadata server."""
        return f"http://{self.metadata_host}:{self.metadata_port}"


def load_config(path: Path) -> NodeConfig:
    """Read and check a node's configuration.

    Raises:
        ConfigError: It is invalid; the text has a sentence for each mistake.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"The node configuration {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"The node configuration {path} is not JSON: {error}.") from error
    try:
        config = NodeConfig.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"The node configuration {path} is wrong. " + "; ".join(lines)) from error
    if config.runtime == "podman" and not (config.network and config.gateway):
        raise ConfigError(f"The node configuration {path} is wrong. The runtime podman needs network and gateway.")
    return config
