"""CRDs of other releases in the cluster, for a while.

What the operator and the API server do meanwhile with the jobs that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cluster_api import refusal
from cluster_fixtures import Kubectl, wait_for
from minimal_job import MINIMAL
from operator_process import Jobs, led_namespace, running
from spottrain_api.crd import custom_resource_definition

pytestmark = pytest.mark.cluster


@pytest.fixture
def jobs(whole_kubectl: Kubectl, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs that an operator leads."""
    with running(whole_kubectl, tmp_path) as operator, led_namespace(operator) as namespace:
        yield Jobs(whole_kubectl, namespace)


def test_an_operator_that_is_older_than_the_crd_disturbs_no_job_that_has_begun(jobs: Jobs) -> None:
    def condition(name: str) -> dict[str, Any]:
        return jobs.condition(name, "SpecNotUnderstood")

    def is_told_of_red() -> bool:
        jobs.edit("begun", colour="red")  # the server drops it as long as it does not know it
        return bool(condition("begun")["status"] == "True")

    jobs.apply("begun")
    wait_for(lambda: len(jobs.pods("begun")) == 3, "three pods")
    jobs.has_run("begun")
    before = {pod["metadata"]["uid"] for pod in jobs.pods("begun")}
    newer = custom_resource_definition()
    [version] = newer["spec"]["versions"]
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["colour"] = {"type": "string"}
    jobs.kubectl.apply(newer)

    wait_for(is_told_of_red, "it is told")
    assert "doesn't understand spec.colour, which a newer version" in condition("begun")["message"]
    jobs.lose("begun-1")
    wait_for(lambda: len(jobs.pods("begun")) == 3, "the deleted pod is replaced")
    assert len({pod["metadata"]["uid"] for pod in jobs.pods("begun")} & before) == 2
    assert (jobs.status("begun")["phase"], jobs.status("begun")["generation"]["number"]) == ("Pending", 4)

    jobs.apply("new", colour="red")
    wait_for(lambda: condition("new")["status"] == "True", "the new job is told, too")
    assert (jobs.pods("new"), jobs.status("new")["phase"]) == ([], "Pending")
    assert "The job waits until then" in jobs.status("new")["message"]
    jobs.edit("new", colour=None)
    wait_for(lambda: len(jobs.pods("new")) == 3, "it begins once it is understood")
    assert condition("new")["status"] == "False"


def test_a_job_that_an_older_release_took_goes_on_under_the_rule_that_refuses_it(whole_kubectl: Kubectl) -> None:
    """The operator's writes leave the spec as it is; an edit has to mend it."""
    kubectl, namespace = whole_kubectl, f"older-{uuid4().hex[:8]}"
    kubectl.create_namespace(namespace)
    ignored = {"strategy": "ddp", "deepspeed": {"zeroStage": 1}}
    sentence = "deepspeed holds settings that have no effect with this strategy"
    older = custom_resource_definition()
    for version in older["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        kept = [rule for rule in spec["x-kubernetes-validations"] if sentence not in rule["message"]]
        assert len(kept) < len(spec["x-kubernetes-validations"])
        spec["x-kubernetes-validations"] = kept

    def created(name: str, *, kept: bool = True) -> str:
        job = {"apiVersion": "spottrain.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
        return refusal(lambda: kubectl.create(job | {"spec": MINIMAL | ignored}, namespace, kept=kept))

    def patched(change: dict[str, Any], *, subresource: str = "") -> str:
        return refusal(lambda: kubectl.patch("tj", "older", change, namespace, subresource=subresource))

    kubectl.apply(older)
    wait_for(lambda: created("older") == "", "the older rules are served")
    kubectl.apply(custom_resource_definition())
    wait_for(lambda: sentence in created("newer", kept=False), "the rule is served")
    assert patched({"status": {"message": "Training"}}, subresource="status") == ""
    assert patched({"metadata": {"labels": {"team": "a"}}}) == ""
    suspended = {"runPolicy": {"suspend": True}}
    assert sentence in patched({"spec": suspended})
    assert patched({"spec": suspended | {"deepspeed": None}}) == ""
    kubectl.delete("tj", "older", namespace)
