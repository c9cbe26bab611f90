"""The names of jobs, and of the pods that send requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from spottrain_operator.core.model import JobView
from spottrain_operator.kube.resources import Manifest


class JobKey(NamedTuple):
    """Names one TrainingJob."""

    namespace: str
    name: str

    @classmethod
    def of(cls, job: Manifest) -> Self:
        return cls(namespace=job["metadata"]["namespace"], name=job["metadata"]["name"])

    @classmethod
    def of_view(cls, job: JobView) -> Self:
        return cls(namespace=job.namespace, name=job.name)

    @classmethod
    def of_pod(cls, namespace: str, pod: str) -> Self:
        """The job that a pod is named after ({job}-{sequence}). It need not exist."""
        return cls(namespace=namespace, name=pod.rpartition("-")[0])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """The pod that presented a token."""

    namespace: str
    pod: str
    uid: str

    @property
    def job(self) -> JobKey:
        return JobKey.of_pod(self.namespace, self.pod)
