"""The CRD on a real API server.

It refuses bad jobs with a sentence, and gives good ones the models' defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from cluster_api import refusal
from cluster_fixtures import Kubectl
from minimal_job import MINIMAL
from spottrain_api.v1alpha1.profile import ProfileSpec
from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_api.v1alpha1.status import TakenProfile

pytestmark = pytest.mark.cluster


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A JSON merge patch, as kubectl patch applies it: None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def as_job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "spottrain.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}


def without_empty(node: Any) -> Any:
    """Without empty objects and lists, which say nothing."""
    if not isinstance(node, dict):
        return node
    kept = {key: without_empty(value) for key, value in node.items()}
    return {key: value for key, value in kept.items() if value not in ({}, [])}


@dataclass(frozen=True)
class Jobs:
    """kubectl for the jobs of one namespace."""

    kubectl: Kubectl
    namespace: str

    def run(self, *args: str, stdin: str | None = None) -> tuple[bool, str]:
        """Whether it worked, and what kubectl said."""
        done = self.kubectl.run(*args, "-n", self.namespace, stdin=stdin)
        return done.returncode == 0, done.stdout + done.stderr

    def tried(self, name: str, spec: dict[str, Any]) -> str:
        """What the API server says against a new job; empty if it takes it."""
        return refusal(lambda: self.kubectl.create(as_job(name, spec), self.namespace, kept=False))

    def patched(self, changes: dict[str, Any]) -> str:
        """What the API server says against a change of the job, which is not kept; empty if it takes it."""
        return refusal(lambda: self.kubectl.patch("tj", "job", {"spec": changes}, self.namespace, kept=False))


@pytest.fixture(scope="module")
def jobs(local_cluster: Any) -> Iterator[Jobs]:
    kubectl = Kubectl(kubeconfig=local_cluster.kubeconfig)
    namespace = f"crd-{uuid4().hex[:8]}"
    kubectl.create_namespace(namespace)
    found = Jobs(kubectl=kubectl, namespace=namespace)
    created = found.run("apply", "-f", "-", stdin=json.dumps(as_job("job", MINIMAL)))
    assert created == (True, "trainingjob.spottrain.dev/job created\n")
    yield found
    kubectl.delete("namespace", namespace)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("min-above-max", {"nodes": {"min": 5}}, "nodes.min is larger than nodes.max; lower min or raise max"),
    ("no-nodes", {"nodes": {"max": 0}}, "spec.nodes.max in body should be greater than or equal to 1"),
    (
        "too-many-nodes",
        {"nodes": {"max": 513}, "batch": {"global": 600}},
        "nodes.max is above 512, the most that one job can have; lower it",
    ),
    (
        "floor-above-nodes",
        {"capacity": {"onDemand": {"min": 5}}},
        "capacity.onDemand.min is larger than nodes.max; lower the on-demand floor or raise nodes.max",
    ),
    (
        "floor-above-its-max",
        {"capacity": {"onDemand": {"min": 2, "max": 1}}},
        "capacity.onDemand.min is larger than capacity.onDemand.max; lower min or raise max",
    ),
    (
        "floor-in-quotes-above-its-max",
        {"capacity": {"onDemand": {"min": "2", "max": 1}}},
        "capacity.onDemand.min is larger than capacity.onDemand.max; lower min or raise max",
    ),
    (
        "floor-of-more-than-all",
        {"capacity": {"onDemand": {"min": "101%"}}},
        "neither a whole number of 0 or more nor a share; write one such as 2 or 25%",
    ),
    (
        "weights-of-zero",
        {"capacity": {"pools": [{"name": "a", "capacityType": "spot", "provider": "eks", "weight": 0}]}},
        "capacity.pools: all spot pools have weight 0, so that no pod could be placed",
    ),
    (
        "two-prices-of-a-pool",
        {
            "capacity": {
                "pools": [
                    {"name": "a", "capacityType": "spot", "provider": "eks", "pricePerHour": 1},
                    {"name": "a", "capacityType": "spot", "provider": "eks", "pricePerHour": 2},
                ]
            }
        },
        "capacity.pools: two pools of a type have the same name",
    ),
    (
        "negative-weight",
        {"capacity": {"pools": [{"name": "a", "capacityType": "spot", "provider": "eks", "weight": -1}]}},
        "weight in body should be greater than or equal to 0",
    ),
    (
        "reserved-pool-that-finds-nothing",
        {"capacity": {"pools": [{"name": "a", "capacityType": "reserved", "provider": "aks"}]}},
        "capacity.pools: a reserved pool needs a nodeSelector that finds its nodes",
    ),
    (
        "capacity-below-min",
        {"nodes": {"min": 4}, "capacity": {"onDemand": {"max": 1}, "spot": {"max": 2}}},
        "capacity.onDemand.max and capacity.spot.max together are less than nodes.min; raise one of them",
    ),
    (
        "spot-below-min-and-no-other-pool",
        {"capacity": {"spot": {"max": 0}, "pools": [{"name": "a", "capacityType": "spot", "provider": "eks"}]}},
        "capacity.pools has only spot pools, and capacity.spot.max is less than nodes.min; raise it, lower nodes.min",
    ),
    (
        "on-demand-below-min-and-no-other-pool",
        {
            "nodes": {"min": 3},
            "capacity": {
                "onDemand": {"max": 2},
                "pools": [{"name": "a", "capacityType": "on-demand", "provider": "eks"}],
            },
        },
        "capacity.pools has only on-demand pools, and capacity.onDemand.max is less than nodes.min; raise it",
    ),
    (
        "pool-without-selector",
        {"capacity": {"pools": [{"name": "mine", "capacityType": "spot", "provider": "custom"}]}},
        "a pool with provider custom needs a nodeSelector that finds its nodes",
    ),
    (
        "pool-with-empty-selector",
        {"capacity": {"pools": [{"name": "a", "capacityType": "spot", "provider": "custom", "nodeSelector": {}}]}},
        "a pool with provider custom needs a nodeSelector that finds its nodes",
    ),
    (
        "node-class-of-another-provider",
        {
            "capacity": {
                "pools": [
                    {
                        "name": "a",
                        "capacityType": "spot",
                        "provider": "eks",
                        "nodeClass": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "a"},
                    }
                ]
            }
        },
        "capacity.pools: a nodeClass is one of Karpenter; set the pool's provider to karpenter, or remove it",
    ),
    (
        "unknown-provider",
        {"capacity": {"pools": [{"name": "x", "capacityType": "spot", "provider": "nimbus"}]}},
        "eks",
    ),
    (
        "uri-scheme",
        {"checkpoint": {"uri": "ftp://bucket/run"}},
        "checkpoint.uri: unknown scheme or no bucket; use s3://bucket/prefix",
    ),
    (
        "uri-no-bucket",
        {"checkpoint": {"uri": "s3://"}},
        "checkpoint.uri: unknown scheme or no bucket; use s3://bucket/prefix",
    ),
    (
        "uri-relative",
        {"checkpoint": {"uri": "file://here"}},
        "checkpoint.uri: unknown scheme or no bucket; use s3://bucket/prefix",
    ),
    (
        "uri-without-an-account",
        {"checkpoint": {"uri": "az://container/run"}},
        "checkpoint.endpointURL: az:// needs the address of the storage account",
    ),
    (
        "uri-query",
        {"checkpoint": {"uri": "s3://bucket/run?lr=1"}},
        "checkpoint.uri: contains ? or #, which can't be part of a folder's name",
    ),
    (
        "endpoint",
        {"checkpoint": {"endpointURL": "store:9000"}},
        "checkpoint.endpointURL: not an HTTP address; write http://host:port or",
    ),
    ("interval", {"checkpoint": {"interval": "often"}}, "checkpoint.interval: write auto, or a number from 1 on"),
    ("interval-of-0", {"checkpoint": {"interval": "0s"}}, "checkpoint.interval: write auto, or a number from 1 on"),
    ("currency", {"capacity": {"currency": "euro"}}, "spec.capacity.currency in body should match"),
    (
        "batch-below-world-size",
        {"nodes": {"max": 4}, "processesPerNode": 4},
        "batch.global is below the largest world size (nodes.max times processesPerNode)",
    ),
    ("micro-above-global", {"batch": {"micro": 9}}, "batch.micro is larger than batch.global"),
    ("multiple", {"batch": {"micro": 4, "multipleOf": 3}}, "batch.global is not a multiple of batch.multipleOf"),
    ("micro-below-multiple", {"batch": {"multipleOf": 2}}, "batch.micro is smaller than batch.multipleOf"),
    ("unknown-strategy", {"strategy": "magic"}, 'supported values: "auto", "ddp", "fsdp"'),
    ("unknown-precision", {"precision": "fp7"}, 'supported values: "fp32", "bf16"'),
    ("fp16-without-deepspeed", {"precision": "fp16"}, "precision fp16 needs the strategy deepspeed"),
    (
        "zero-with-ddp",
        {"strategy": "ddp", "deepspeed": {"zeroStage": 1}},
        "deepspeed holds settings that have no effect with this strategy; remove them, or set strategy deepspeed or",
    ),
    (
        "json-with-fsdp",
        {"strategy": "fsdp", "deepspeed": {"config": {"a": {"b": 1}}}},
        "deepspeed holds settings that have no effect with this strategy",
    ),
    (
        "offload-with-deepspeed",
        {"strategy": "deepspeed", "fsdp": {"offload": True}},
        "fsdp holds settings that have no effect with this strategy",
    ),
    ("hybrid-of-one", {"fsdp": {"sharding": "hybrid"}}, "processesPerNode is 1; raise it, or use full"),
    ("script-and-module", {"entrypoint": {"module": "train"}}, "neither is; give exactly one of script"),
    ("neither-script-nor-module", {"entrypoint": {"script": None}}, "neither is; give exactly one of script"),
    ("operators-variable", {"env": [{"name": "SPOTTRAIN_JOB", "value": "x"}]}, "choose another name"),
    ("no-image", {"image": None}, "image is missing; name the container image with the program, or a profile"),
    ("no-profile", {"profile": ""}, "spec.profile in body should be at least 1 chars long"),
    ("no-checkpoint", {"checkpoint": None}, "spec.checkpoint: Required value"),
    ("unknown-field", {"colour": "red"}, 'unknown field "spec.colour"'),
    (
        "host-path",
        {"podTemplate": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}},
        'unknown field "spec.podTemplate.volumes[0].hostPath"',
    ),
    (
        "negative-budget",
        {"runPolicy": {"failureBudget": -1}},
        "spec.runPolicy.failureBudget in body should",
    ),
    ("budget-of-less-than-nothing", {"budget": {"maxCost": -1}}, "spec.budget.maxCost in body should be"),
    (
        "budget-without-prices",
        {"budget": {"maxCost": 5}},
        "budget.maxCost bounds nothing without prices, and on-demand nodes have none; set capacity.onDemand.price",
    ),
    (
        "budget-without-a-spot-price",
        {
            "budget": {"maxCost": 5},
            "capacity": {
                "onDemand": {"pricePerHour": 3},
                "pools": [{"name": "a", "capacityType": "spot", "provider": "eks"}],
            },
        },
        "budget.maxCost bounds nothing without prices, and spot nodes have none; set capacity.spot.pricePerHour",
    ),
    ("not-a-number", {"nodes": {"max": "four"}}, 'spec.nodes.max in body must be of type integer: "string"'),
]


@pytest.fixture(scope="module")
def refusals(jobs: Jobs) -> str:
    """What kubectl says when all the bad jobs are applied in one go."""
    bad = "\n".join(json.dumps(as_job(name, merged(MINIMAL, changes))) for name, changes, _ in REFUSED)
    return jobs.run("apply", "--dry-run=server", "-f", "-", stdin=bad)[1]


@pytest.mark.parametrize(("name", "sentence"), [pytest.param(n, s, id=n) for n, _, s in REFUSED])
def test_a_bad_job_is_refused_with_a_sentence(refusals: str, name: str, sentence: str) -> None:
    # Of a field that it doesn't know the server says so before it looks at the job's name.
    about = [line for line in refusals.splitlines() if name in line or "unknown field" in line]
    assert any(sentence in line for line in about), refusals
    assert f"/{name} created" not in refusals


def test_a_name_that_leaves_no_room_for_pod_names_is_refused(jobs: Jobs) -> None:
    assert jobs.tried("n" * 50, MINIMAL) == ""
    said = jobs.tried("n" * 51, MINIMAL)
    assert "metadata.name is longer than 50 characters; pods are named after it: shorten it" in said


def test_the_server_fills_in_what_the_models_do(jobs: Jobs) -> None:
    stored = jobs.kubectl.get("tj", "job", jobs.namespace)["spec"]
    assert without_empty(stored) == without_empty(TrainingJobSpec.model_validate(MINIMAL).to_dict())
    assert TrainingJobSpec.model_validate(stored) == TrainingJobSpec.model_validate(MINIMAL)


FIXED = [
    ("batch", {"batch": {"global": 16}}, "batch.global can't change while a job exists"),
    ("strategy", {"strategy": "fsdp"}, "strategy can't change while a job exists"),
    ("precision", {"precision": "bf16"}, "precision can't change while a job exists"),
    ("seed", {"seed": 7}, "seed can't change while a job exists"),
    ("profile", {"profile": "gpu"}, "profile can't change while a job exists, which keeps what it took"),
    (
        "uri",
        {"checkpoint": {"uri": "s3://bucket/other"}},
        "checkpoint.uri can't change while a job exists, as its commits may be there; to correct it, make a new job: "
        "delete this one and apply it again",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), [pytest.param(c, s, id=name) for name, c, s in FIXED])
def test_what_makes_the_run_what_it_is_cannot_change(jobs: Jobs, changes: dict[str, Any], sentence: str) -> None:
    said = jobs.patched(changes)
    assert sentence in said
    assert "make a new job" in said


RESERVED = {"name": "block", "capacityType": "reserved", "provider": "eks"}


@pytest.mark.parametrize("floor", [0, 1, "1", "50%", "100%", "0%"])
def test_a_floor_may_be_a_share_and_a_pool_reserved(jobs: Jobs, floor: int | str) -> None:
    capacity = {"onDemand": {"min": floor, "max": 4}, "pools": [RESERVED]}
    assert jobs.tried("share", merged(MINIMAL, {"capacity": capacity})) == ""


@pytest.mark.parametrize("changes", [{"image": None}, {"budget": {"maxCost": 5}}], ids=["image", "prices"])
def test_what_a_profile_may_have_is_not_asked_of_the_job(jobs: Jobs, changes: dict[str, Any]) -> None:
    assert jobs.tried("profiled", merged(MINIMAL, {"profile": "gpu"} | changes)) == ""


PROFILE = {
    "image": "registry/train:1",
    "capacity": {"currency": "EUR", "spot": {"pricePerHour": 30}, "pools": [RESERVED]},
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "limits": {"nodes": 16, "serviceAccounts": ["trainer"]},
}
BAD_PROFILES: list[tuple[str, dict[str, Any], str]] = [
    ("negative-price", {"capacity": {"spot": {"pricePerHour": -1}}}, "should be greater than or equal to 0"),
    ("no-nodes", {"limits": {"nodes": 0}}, "spec.limits.nodes in body should be greater than or equal to 1"),
    ("unknown-field", {"colour": "red"}, 'unknown field "spec.colour"'),
    (
        "pool-without-labels",
        {"capacity": {"pools": [{"name": "a", "capacityType": "spot", "provider": "custom"}]}},
        "capacity.pools: a pool with provider custom needs a nodeSelector that finds its nodes",
    ),
    ("two-of-a-name", {"capacity": {"pools": [RESERVED, RESERVED]}}, "two pools of a type have the same name"),
    ("weight-zero", {"capacity": {"pools": [RESERVED | {"weight": 0}]}}, "reserved pools have weight 0"),
    ("currency", {"capacity": {"currency": "euro"}}, "spec.capacity.currency in body should match"),
]


def as_profile(name: str, spec: dict[str, Any]) -> str:
    kind = {"apiVersion": "spottrain.dev/v1alpha1", "kind": "TrainingProfile"}
    return json.dumps(kind | {"metadata": {"name": name}, "spec": spec})


def test_a_bad_profile_is_refused_with_a_sentence(jobs: Jobs) -> None:
    bad = "\n".join(as_profile(name, merged(PROFILE, changes)) for name, changes, _ in BAD_PROFILES)
    said = jobs.run("apply", "--dry-run=server", "-f", "-", stdin=bad)[1]
    for name, _, sentence in BAD_PROFILES:
        assert sentence in said, name
    assert "created" not in said


def test_a_profile_is_explained_and_kept_in_the_status_of_a_job(jobs: Jobs) -> None:
    worked, said = jobs.run("apply", "--dry-run=server", "-f", "-", stdin=as_profile("gpu", PROFILE))
    assert worked, said
    assert "Most that nodes.max of a job may be" in jobs.run("explain", "trainingprofile.spec.limits.nodes")[1]
    taken = TakenProfile(name="gpu", generation=2, spec=ProfileSpec.model_validate(PROFILE))
    status = {"profile": taken.model_dump(mode="json", by_alias=True, exclude_none=True)}
    jobs.kubectl.create(as_job("taken", MINIMAL), jobs.namespace)
    jobs.kubectl.patch("tj", "taken", {"status": status}, jobs.namespace, subresource="status")
    stored = jobs.kubectl.get("tj", "taken", jobs.namespace)["status"]["profile"]
    assert TakenProfile.model_validate(stored) == taken


CHANGEABLE = {
    "image": "trainer:2",
    "entrypoint": {"args": ["--verbose"]},
    "env": [{"name": "LEVEL", "value": "debug"}],
    "nodes": {"min": 2, "max": 3},
    "batch": {"micro": 2},
    "capacity": {"onDemand": {"min": 1}},
    "checkpoint": {"interval": "5m", "keep": 3, "endpointURL": "https://store:9000"},
    "runPolicy": {"suspend": True, "failureBudget": 0},
}


def test_a_job_with_a_budget_keeps_its_currency(jobs: Jobs) -> None:
    prices = {"onDemand": {"pricePerHour": 3}, "spot": {"pricePerHour": 1}}
    spec = merged(MINIMAL, {"budget": {"maxCost": 5}, "capacity": prices, "checkpoint": {"uri": "s3://bucket/paid"}})
    jobs.kubectl.create(as_job("paid", spec), jobs.namespace)

    def patched(changes: dict[str, Any]) -> str:
        return refusal(lambda: jobs.kubectl.patch("tj", "paid", {"spec": changes}, jobs.namespace, kept=False))

    assert "capacity.currency can't change while the job has a budget" in patched({"capacity": {"currency": "EUR"}})
    assert "on-demand nodes have none" in patched({"capacity": {"onDemand": {"pricePerHour": None}}})
    assert patched({"budget": None, "capacity": {"currency": "EUR"}}) == ""
    assert patched({"budget": {"maxCost": 7, "onExceeded": "Suspend"}}) == ""


def test_the_rest_can_change(jobs: Jobs) -> None:
    assert jobs.patched(CHANGEABLE) == ""


def test_kubectl_shows_why_a_change_is_refused(jobs: Jobs) -> None:
    patch = ("--type=merge", "-p", json.dumps({"spec": {"seed": 7}}))
    worked, said = jobs.run("patch", "tj", "job", *patch)
    assert not worked
    assert "seed can't change while a job exists" in said


def test_a_job_is_listed_with_what_its_user_wants_to_know(jobs: Jobs) -> None:
    _, listed = jobs.run("get", "tj")
    headings = "NAME PHASE STEP LOSS WORLD ON-DEMAND SPOT GEN PREEMPTED REDONE GOODPUT COST AGE"
    assert " ".join(listed.splitlines()[0].split()) == headings
    assert "MESSAGE" in jobs.run("get", "trainingjobs", "-o", "wide")[1]
    assert "trainingjob.spottrain.dev/job" in jobs.run("get", "all")[1]


def test_the_status_is_written_only_through_its_subresource(jobs: Jobs) -> None:
    status = {"status": {"phase": "Running", "message": "by hand"}}
    assert "status" not in jobs.kubectl.patch("tj", "job", status, jobs.namespace)
    assert "status" not in jobs.kubectl.get("tj", "job", jobs.namespace)
    jobs.kubectl.patch("tj", "job", status, jobs.namespace, subresource="status")
    assert jobs.kubectl.get("tj", "job", jobs.namespace)["status"]["phase"] == "Running"
