"""Nodes look like those of their cloud; specs are checked with sentences."""

import re
from pathlib import Path
from typing import get_args

import pytest

from spottrain_local.layout import LocalClusterError
from spottrain_local.shapes import NodeShape, Provider, instance_type_with, new_instance_id, node_shape, region_of
from spottrain_local.spec import DEFAULT_SPEC, NodePool, load_spec


def shape(provider: Provider, *, spot: bool, gpus: int = 1) -> NodeShape:
    return node_shape(
        name="n-0",
        pool="n",
        provider=provider,
        capacity_type="spot" if spot else "on-demand",
        instance_type="x",
        zone="us-east-1a",
        gpus=gpus,
    )


@pytest.mark.parametrize(
    ("provider", "spot", "labels", "taint_keys"),
    [
        ("eks", True, {"eks.amazonaws.com/capacityType": "SPOT"}, []),
        ("eks", False, {"eks.amazonaws.com/capacityType": "ON_DEMAND"}, []),
        ("gke", True, {"cloud.google.com/gke-spot": "true"}, ["cloud.google.com/gke-spot", "nvidia.com/gpu"]),
        ("gke", False, {"cloud.google.com/gke-provisioning": "standard"}, ["nvidia.com/gpu"]),
        (
            "aks",
            True,
            {"kubernetes.azure.com/scalesetpriority": "spot"},
            ["kubernetes.azure.com/scalesetpriority"],
        ),
        ("aks", False, {"kubernetes.azure.com/agentpool": "n"}, []),
    ],
)
def test_labels_and_taints(provider: Provider, spot: bool, labels: dict[str, str], taint_keys: list[str]) -> None:
    made = shape(provider, spot=spot)
    assert labels.items() <= made.labels.items()
    assert [taint["key"] for taint in made.taints] == taint_keys
    assert made.labels["kubernetes.io/hostname"] == "n-0"


@pytest.mark.parametrize(
    ("provider", "zone", "region"),
    [
        ("eks", "us-east-1a", "us-east-1"),
        ("gke", "europe-west4-b", "europe-west4"),
        ("aks", "eastus-2", "eastus"),
    ],
)
def test_region(provider: Provider, zone: str, region: str) -> None:
    assert region_of(provider, zone) == region


@pytest.mark.parametrize("provider", get_args(Provider))
def test_a_node_without_gpus_says_nothing_of_them(provider: Provider) -> None:
    made = shape(provider, spot=False, gpus=0)
    assert made.taints == []
    assert not [name for name in made.labels if "accelerator" in name]


@pytest.mark.parametrize(
    ("provider", "form"),
    [("eks", r"i-0[0-9a-f]{16}"), ("gke", r"[0-9]{1,19}"), ("aks", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")],
)
def test_instance_ids_have_the_clouds_form_and_differ(provider: Provider, form: str) -> None:
    ids = {new_instance_id(provider) for _ in range(10)}
    assert len(ids) == 10
    assert all(re.fullmatch(form, each) for each in ids)


def test_default_cluster() -> None:
    names = list(DEFAULT_SPEC.pool_of_nodes())
    assert names == ["system-0", "on-demand-0", "on-demand-1", "spot-0", "spot-1", "spot-2", "spot-3"]
    gpus = [pool.gpus for pool in DEFAULT_SPEC.pool_of_nodes().values()]
    assert gpus == [0, 8, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("provider", get_args(Provider))
def test_an_instance_type_has_the_gpus_of_the_pool(provider: Provider) -> None:
    chosen = [instance_type_with(provider, gpus) for gpus in range(17)]
    assert [each.gpus for each in chosen] == [0, 1, 4, 4, 4, *[8] * 12]
    assert len({each.name for each in chosen}) == 4


def test_what_a_pool_does_not_say_is_that_of_its_instance_type() -> None:
    whole = NodePool(name="spot")
    assert (whole.chosen_instance_type, whole.chosen_cpu, whole.chosen_memory) == ("p4d.24xlarge", "96", "1152Gi")
    own = NodePool(name="spot", instance_type="p5.48xlarge", cpu="192", memory="2Ti")
    assert (own.chosen_instance_type, own.chosen_cpu, own.chosen_memory) == ("p5.48xlarge", "192", "2Ti")


def test_gke_says_which_gpus() -> None:
    accelerators = [shape("gke", spot=True, gpus=gpus).labels["cloud.google.com/gke-accelerator"] for gpus in (1, 8)]
    assert accelerators == ["nvidia-l4", "nvidia-tesla-a100"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("nodes: [", "is not YAML", id="not YAML"),
        pytest.param("- a", "must have the key `nodes`", id="a list"),
        pytest.param("nodes: [{name: a, count: 0}]", r"nodes\[0\].count: .* greater than or equal to 1", id="count"),
        pytest.param(
            "nodes: [{name: a, gpu: 1}]", r"nodes\[0\].gpu: There is no such field; correct its name", id="misspelt"
        ),
        pytest.param(
            "nodes: [{name: a, provider: ibm}]", r"nodes\[0\].provider: .*'eks', 'gke' or 'aks'", id="provider"
        ),
        pytest.param("nodes: [{name: a}, {name: a}]", "two nodes would be called a-0", id="twice"),
        pytest.param("nodes: [{name: a, count: 200}, {name: b, count: 200}]", "400 nodes are too many", id="many"),
        pytest.param("pools: []", "must have the key `nodes`", id="other key"),
        pytest.param("nodes: [a]", r"nodes\[0\]: This must be a mapping of fields\.", id="no pool"),
        pytest.param("nodes: [{count: 2}]", r"nodes\[0\].name: This field is required; add it\.", id="no name"),
        pytest.param("nodes: [{name: a, memory: 2K}]", r"nodes\[0\].memory: ", id="no quantity of Kubernetes"),
        pytest.param("nodes: [{name: a, labels: {team: my team}}]", r"labels.team: .* pattern", id="label"),
        pytest.param("nodes: [{name: a, labels: {no good!: x}}]", r"labels.* pattern", id="name of a label"),
        pytest.param(
            "nodes: [{name: a, labels: {node-role.kubernetes.io/gpu: ''}}]", "can't give itself this label", id="role"
        ),
        pytest.param("nodes: [{name: a, taints: [{key: 'a b', effect: NoSchedule}]}]", "key: .* pattern", id="taint"),
        pytest.param("nodes: [{name: a, instanceType: p4d 24xlarge}]", "instanceType: .* pattern", id="type"),
        pytest.param("nodes: [{name: A_b}]", r"nodes\[0\].name: String should match pattern", id="name"),
    ],
)
def test_wrong_node_files_are_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    with pytest.raises(LocalClusterError, match=sentence):
        load_spec(file)


def test_a_node_file_that_is_no_text_is_refused_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_bytes(b"nodes: \xc3\x28")
    with pytest.raises(LocalClusterError, match="is not YAML"):
        load_spec(file)


def test_missing_node_file(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match="cannot be read: No such file"):
        load_spec(tmp_path / "absent.yaml")


@pytest.mark.parametrize("label", ["team", "example.com/a.b", "node.kubernetes.io/x", "topology.kubernetes.io/zone"])
def test_a_node_may_give_itself_these_labels(label: str) -> None:
    assert NodePool(name="a", labels={label: "x-1"}).labels == {label: "x-1"}


def test_numbers_need_no_quotes(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{name: a, cpu: 4, provider: gke, capacityType: spot}]")
    assert load_spec(file).nodes[0].cpu == "4"
