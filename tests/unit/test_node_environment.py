"""A container's environment: expansion, references, the node's own variables."""

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_api.contract.names import SERVICEACCOUNT_DIR
from spottrain_local.node.cluster_objects import Token, TokenRequest
from spottrain_local.node.config import NodeConfig
from spottrain_local.node.containers import ContainerConfigError, ContainerRun, Mount, PodSandbox
from spottrain_local.node.downward import PodPlace
from spottrain_local.node.environment import build_environment, expand
from spottrain_local.node.paths import PathRewriter
from spottrain_local.node.process_environment import process_environment, surroundings
from spottrain_runtime.quantity import divide_quantity, parse_quantity

PLACE = PodPlace(node_name="n1", pod_ip="127.1.0.2", host_ip="127.1.0.1", cpu="8", memory="32Gi")


class FakeObjects:
    """ConfigMaps and Secrets by name."""

    def __init__(self, config_maps: dict[str, Any] | None = None, secrets: dict[str, Any] | None = None) -> None:
        self._config_maps = config_maps or {}
        self._secrets = secrets or {}

    async def config_map(self, namespace: str, name: str) -> dict[str, Any] | None:
        return {"data": self._config_maps[name]} if name in self._config_maps else None

    async def secret(self, namespace: str, name: str) -> dict[str, Any] | None:
        if name not in self._secrets:
            return None
        return {"data": {k: base64.b64encode(v.encode()).decode() for k, v in self._secrets[name].items()}}

    async def token(self, request: TokenRequest) -> Token:
        raise AssertionError(f"no environment needs a token, but one was asked for: {request}")


def node_config(**changes: Any) -> NodeConfig:
    values: dict[str, Any] = {
        "name": "n1",
        "provider": "eks",
        "capacityType": "spot",
        "nodeIP": "127.1.0.1",
        "podNetwork": "127.1.0.0/24",
        "apiserver": "https://127.0.0.1:6443",
        "caFile": "ca",
        "clientCertFile": "c",
        "clientKeyFile": "k",
        "servingCertFile": "s",
        "servingKeyFile": "sk",
        "kubeletPort": 10250,
        "metadataPort": 80,
        "stateDir": "/state",
    }
    return NodeConfig.model_validate(values | changes)


POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "u-1",
        "labels": {"app": "x"},
        "annotations": {"spottrain.dev/a": "b"},
    },
    "spec": {"containers": [{"name": "c"}]},
}


async def environment(
    container: dict[str, Any],
    *,
    objects: FakeObjects | None = None,
    mounts: dict[str, str] | None = None,
    **config: Any,
) -> dict[str, str]:
    """The environment of a process that stands for this container."""
    node = node_config(**config)
    run = ContainerRun(
        pod=PodSandbox(
            uid="u-1", namespace="ns", hostname="p", ip="127.1.0.2", host_network=False, directory=Path("/pod")
        ),
        name="c",
        image="none",
        env=await build_environment(POD, container, config=node, place=PLACE, source=objects or FakeObjects()),
        mounts=tuple(Mount(source=Path(real), target=path) for path, real in (mounts or {}).items()),
        log_path=Path("/pod/log"),
        directory=Path("/pod/0"),
        container_id="process://u-1/c/0",
    )
    return process_environment(run, surroundings(node))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$$$(A)", "$1"),
    ],
)
def test_expansion_follows_kubernetes(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_text_without_dollar_is_left_alone(text: str) -> None:
    assert expand(text, {"A": "1"}) == text


async def test_values_refer_to_earlier_values_and_fields() -> None:
    field = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        "env": [
            {"name": "IP", **field},
            {"name": "URL", "value": "http://$(IP):$(PORT)"},
            {"name": "PORT", "value": "80"},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['spottrain.dev/a']"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {"name": "MEM", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        ],
        "resources": {"limits": {"cpu": "1500m"}},
    }
    env = await environment(container)
    assert env["URL"] == "http://127.1.0.2:$(PORT)"
    assert (env["APP"], env["NOTE"], env["CPU"], env["MEM"]) == ("x", "b", "2", "32768")


async def test_config_maps_and_secrets() -> None:
    objects = FakeObjects({"cm": {"a": "1"}}, {"s": {"b": "2"}})
    container = {
        "envFrom": [{"configMapRef": {"name": "cm"}, "prefix": "P_"}, {"secretRef": {"name": "s"}}],
        "env": [
            {"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "b"}}},
            {"name": "Y", "valueFrom": {"configMapKeyRef": {"name": "nope", "key": "b", "optional": True}}},
        ],
    }
    env = await environment(container, objects=objects)
    assert (env["P_a"], env["b"], env["X"]) == ("1", "2", "2")
    assert "Y" not in env


@pytest.mark.parametrize(
    ("origin", "sentence"),
    [
        ({"configMapKeyRef": {"name": "nope", "key": "k"}}, 'configmap "nope" not found'),
        ({"configMapKeyRef": {"name": "cm", "key": "k"}}, "couldn't find key k"),
        ({"secretKeyRef": {"name": "nope", "key": "k"}}, 'secret "nope" not found'),
        ({"fieldRef": {"fieldPath": "spec.unknown"}}, "spec.unknown"),
    ],
)
async def test_what_is_missing_is_named(origin: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContainerConfigError, match=sentence):
        await environment({"env": [{"name": "X", "valueFrom": origin}]}, objects=FakeObjects({"cm": {}}))


async def test_the_node_processes_own_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "x")
    assert "SOME_SECRET" not in await environment({})


async def test_pods_variables_win_and_node_variables_are_there() -> None:
    env = await environment(
        {"env": [{"name": "REGION", "value": "own"}, {"name": "PATH", "value": "/mine"}]},
        podEnv={"REGION": "node", "BUCKET": "b"},
        pathPrefix="/venv/bin",
        preloadLibrary="/lib/nss.so",
        hostsFile="/hosts",
    )
    assert (env["REGION"], env["BUCKET"], env["PATH"]) == ("own", "b", "/venv/bin:/mine")
    assert (env["LD_PRELOAD"], env["NSS_WRAPPER_HOSTS"]) == ("/lib/nss.so", "/hosts")
    assert (env["KUBERNETES_SERVICE_HOST"], env["KUBERNETES_SERVICE_PORT"]) == ("127.0.0.1", "6443")
    assert (env["HOME"], env["TMPDIR"], env["HOSTNAME"]) == ("/pod/home", "/pod/tmp", "p")


@pytest.mark.parametrize(
    ("provider", "name", "value"),
    [
        ("eks", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.1.0.1:80"),
        ("gke", "GCE_METADATA_HOST", "127.1.0.1:80"),
        ("aks", "SPOTTRAIN_AZURE_METADATA_ENDPOINT", "http://127.1.0.1:80"),
    ],
)
async def test_programs_find_their_clouds_metadata_server(provider: str, name: str, value: str) -> None:
    assert (await environment({}, provider=provider))[name] == value


async def test_mount_paths_in_values_are_rewritten() -> None:
    mounts = {"/data": "/pod/v/d", SERVICEACCOUNT_DIR: "/pod/v/sa", "/tmp": "/pod/v/t"}
    env = await environment({"env": [{"name": "D", "value": "file:///data/x"}]}, mounts=mounts)
    assert env["D"] == "file:///pod/v/d/x"
    assert env["SPOTTRAIN_SERVICEACCOUNT_DIR"] == "/pod/v/sa"
    assert env["TMPDIR"] == "/pod/v/t"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data", "/v/d"),
        ("/data/", "/v/d/"),
        ("--in=/data/a --out=/data/sub/b", "--in=/v/d/a --out=/v/s/b"),
        ("/data:/data/sub:/x", "/v/d:/v/s:/x"),
        ("cat '/data/f' > /data; ls", "cat '/v/d/f' > /v/d; ls"),
        ("/srv/data /data-old /data.txt /database ./data", "/srv/data /data-old /data.txt /database ./data"),
        ("file:///data http://host/data", "file:///v/d http://host/data"),
        ("$(pwd)/data ${X}/data ~/data", "$(pwd)/data ${X}/data ~/data"),
    ],
)
def test_paths_are_rewritten_where_they_start(text: str, expected: str) -> None:
    assert PathRewriter({"/data/": "/v/d", "/data/sub": "/v/s"})(text) == expected


@given(st.text())
def test_without_mounts_nothing_is_rewritten(text: str) -> None:
    assert PathRewriter({})(text) == text


def test_quantities() -> None:
    assert parse_quantity("2Gi") == 2 * 1024**3
    assert parse_quantity("1500m") * 2 == 3
    assert parse_quantity("1e3") == 1000
    assert divide_quantity("1500m", "1m") == "1500"
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity("two")
