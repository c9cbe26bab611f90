"""A walk through every field of a running job's spec, on a real API server.

A valid change is stored, and so is the way back. An invalid value, and another value of a fixed field, is refused
with a sentence that names the field, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from cluster_api import refusal
from cluster_fixtures import Kubectl
from derived_values import Schema
from field_steps import Field, Step, fields
from field_values import EVERYTHING, spec_schema
from spottrain_api.tolerant import dotted
from spottrain_api.v1alpha1.spec import TrainingJobSpec

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

RUNNING = {
    "phase": "Running",
    "generation": {
        **{"number": 1, "state": "Active", "worldSize": 4, "startedAt": "2026-01-01T00:00:00Z"},
        **{"rendezvousID": "g1", "rendezvousEndpoint": "10.0.0.1:4000"},
    },
}


@dataclass
class Walk:
    """A job on the API server, and what its answers have said.

    `stored` is the job as the server has it. Each write names its resource version, so that the server refuses the
    next one if a write that it refused has changed the job.
    """

    kubectl: Kubectl
    stored: dict[str, Any]
    said: str = ""
    steps: int = 0
    problems: list[str] = field(default_factory=list)

    def put(self, spec: dict[str, Any]) -> str:
        """Replace the spec; what the server says against it, if it refuses."""
        self.steps += 1

        def replace() -> None:
            self.stored = self.kubectl.replace(self.stored | {"spec": spec})

        return refusal(replace)

    def walk(self, each: Field) -> None:
        self.accept(each.base, f"{each.name}: its job")
        for step in each.valid:
            self.accept(step.spec, step.name)
            self.accept(each.base, f"{step.name}: the way back")
        for step in each.refused:
            self._refuse(step, *_places(step))
        for step in each.breaking:
            self._refuse(step, step.rule)
        for step in each.fixed:
            self._refuse(step, f"{each.name} can't change while a job exists")

    def accept(self, spec: dict[str, Any], name: str) -> None:
        status = self.stored["status"]
        refused = self.put(spec)
        if refused:
            self.problems.append(f"{name} is refused (OTHER and BROKEN_RULES have exceptions): {refused[:500]}")
        elif TrainingJobSpec.model_validate(self.stored["spec"]) != TrainingJobSpec.model_validate(spec):
            self.problems.append(f"{name} is stored as {self.stored['spec']}")
        elif self.stored["status"] != status:
            self.problems.append(f"{name} changes the status to {self.stored['status']}")

    def _refuse(self, step: Step, *sentences: str) -> None:
        refused = self.put(step.spec)
        self.said += refused
        if not any(sentence in refused for sentence in sentences):
            self.problems.append(f"{step.name} should say {sentences}: {refused[:500] or 'accepted'}")


def _places(step: Step) -> tuple[str, ...]:
    """How the server writes where the changed field is.

    A rule writes the key of a map in brackets.
    """
    above = f"spec.{dotted(step.path[:-1])}".removesuffix(".")
    return f"spec.{dotted(step.path)}", f"{above}[{step.path[-1]}]"


def _rules(schema: Schema) -> Iterator[str]:
    """What the rules of a schema say."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            yield from _rules(part)


@pytest.fixture
def walk(local_cluster: Any) -> Iterator[Walk]:
    kubectl = Kubectl(kubeconfig=local_cluster.kubeconfig)
    namespace = f"walk-{uuid4().hex[:8]}"
    kubectl.create_namespace(namespace)
    job = {"apiVersion": "spottrain.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "walk"}}
    kubectl.create(job | {"spec": EVERYTHING}, namespace)
    stored = kubectl.patch("tj", "walk", {"status": RUNNING}, namespace, subresource="status")
    yield Walk(kubectl=kubectl, stored=stored)
    kubectl.delete("namespace", namespace)


def test_every_field_of_a_running_job_takes_valid_values_alone(walk: Walk) -> None:
    for each in fields():
        walk.walk(each)
    walk.accept(EVERYTHING, "the way back")
    print(f"{walk.steps} steps through {len(list(fields()))} fields")
    assert not walk.problems, "\n".join(walk.problems)
    assert walk.steps >= 300
    unbroken = [rule for rule in _rules(spec_schema()) if rule not in walk.said]
    assert unbroken == [], "no step breaks these rules: add one to BROKEN_RULES"
