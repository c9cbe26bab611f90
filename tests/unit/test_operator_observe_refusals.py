"""What a refused pod means: whether it passes, and which request was a default."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spottrain_api.v1alpha1.spec import TrainingJobSpec
from spottrain_operator.core.model import JobView
from spottrain_operator.kube.errors import ForbiddenError, InvalidObjectError
from spottrain_operator.objects.observe import (
    refusal,
)

SPEC = {
    "image": "i",
    "entrypoint": {"script": "train.py"},
    "nodes": {"max": 2},
    "batch": {"global": 8},
    "checkpoint": {"uri": "s3://b/p"},
}
MOMENT = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)


def spec(**fields: Any) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate(SPEC | fields)


def asks(*, generation: int = 1, **changes: Any) -> JobView:
    """A job whose pods are asked for."""
    return JobView(
        namespace="default",
        name="job",
        uid="u",
        spec=spec(**changes),
        metadata_generation=generation,
        created_at=MOMENT,
    )


@pytest.mark.parametrize(
    ("said", "lasting"),
    [
        ('serviceaccount "trainer" not found', True),
        ("exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4", False),
        ('User "operator" cannot create resource "pods" in the namespace "team"', False),
        ("unable to create new content in namespace team because it is being terminated", False),
    ],
)
def test_refusals_that_pass_and_that_last(said: str, lasting: bool) -> None:
    first = refusal(ForbiddenError(said), asks(), None, MOMENT)
    assert (first.lasting, first.since, first.num_tries) == (lasting, MOMENT, 1)
    assert first.message.removesuffix(OF_QUOTA) == f"Kubernetes refuses the job's pods: {said}"
    later = MOMENT + timedelta(seconds=5)
    again = refusal(InvalidObjectError("spec: Required value"), asks(), first, later)
    assert (again.since, again.tried_at, again.num_tries, again.lasting) == (MOMENT, later, 2, True)
    edited = refusal(ForbiddenError(said), asks(generation=2), again, later)
    assert (edited.since, edited.num_tries) == (later, 1), "an edit is another matter"


@pytest.mark.parametrize(
    ("said", "by_quota"),
    [
        ("exceeded quota: a, requested: pods=1, used: pods=4, limited: pods=4", True),
        ("exceeded quota: a, requested: pods=1, used: pods=0, limited: pods=0", False),
        ("exceeded quota: a, requested: cpu=500m,memory=1Gi, used: cpu=2,memory=0, limited: cpu=2,memory=1Gi", True),
        ("exceeded quota: a, requested: cpu=1,memory=2Gi, used: cpu=0,memory=0, limited: cpu=2,memory=1Gi", False),
        ("exceeded quota: a, requested: pods=many, used: pods=1, limited: pods=few", True),
        ("exceeded quota: a", True),
        ("serviceaccount not found", False),
    ],
)
def test_a_quota_that_other_pods_use_up_and_one_that_is_too_small(said: str, by_quota: bool) -> None:
    assert refusal(ForbiddenError(said), asks(), None, MOMENT).by_quota == by_quota


ABOVE_LIMIT = 'resources.requests: Invalid value: "{}": must be less than or equal to memory limit of 2Gi'


OF_MEMORY = ". The trainer's request for memory, 4Gi, is spottrain's default: resources.requests.memory changes it"


OF_CPU = ". The trainer's request for cpu, 1, is spottrain's default: resources.requests.cpu changes it"


OF_QUOTA = ". Raise the quota, or lower nodes.min"


OF_GPUS = ". A pod asks for 1 nvidia.com/gpu, one for each process"


OF_RESOURCES = ". These are fields of resources: limits.cpu,limits.memory"


WITH_GPUS = ". A job with resources asks for its GPUs there, too (limits: nvidia.com/gpu)"


@pytest.mark.parametrize(
    ("resources", "said", "added"),
    [
        (None, ABOVE_LIMIT.format("4Gi"), OF_MEMORY + WITH_GPUS),
        ({"requests": {"cpu": "2"}}, "maximum memory usage per Container is 2Gi, but request is 4Gi", OF_MEMORY),
        (
            {},
            "[maximum cpu usage per Pod is 500m, but request is 1, maximum memory usage per Pod is 2Gi, but "
            "request is 4Gi]",
            OF_CPU + OF_MEMORY,
        ),
        (
            {},
            "exceeded quota: a, requested: requests.memory=4Gi, used: memory=0, limited: memory=2Gi",
            OF_MEMORY + OF_QUOTA,
        ),
        (
            None,
            "exceeded quota: a, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=1, limited: "
            "requests.nvidia.com/gpu=1",
            OF_GPUS + OF_QUOTA,
        ),
        ({"requests": {"memory": "8Gi"}}, ABOVE_LIMIT.format("8Gi"), ""),
        ({"limits": {"memory": "8Gi"}}, "maximum memory usage per Container is 2Gi, but request is 8Gi", ""),
        (None, "failed quota: a: must specify limits.cpu,limits.memory for: trainer", OF_RESOURCES + WITH_GPUS),
        ({}, "failed quota: a: must specify limits.memory for: webhook", ""),
        (None, "maximum memory usage per Container is 2Gi, but limit is 4Gi", ""),
    ],
    ids=[
        "LimitRange",
        "its maximum",
        "both",
        "quota",
        "quota of GPUs",
        "own request",
        "own limit",
        "limits",
        "a webhook's",
        "its limit",
    ],
)
def test_a_refused_request_that_the_job_has_not_written_is_named(
    resources: dict[str, Any] | None, said: str, added: str
) -> None:
    found = refusal(ForbiddenError(said), asks(resources=resources), None, MOMENT)
    assert found.message == f"Kubernetes refuses the job's pods: {said}{added}"
