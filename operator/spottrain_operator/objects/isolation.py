"""A NetworkPolicy for each job, by which only the job's own pods reach its pods."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime

from spottrain_api.contract.names import API_VERSION, KIND, LABEL_JOB, LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import AlreadyExistsError, RefusedError
from spottrain_operator.kube.resources import NETWORK_POLICIES, Manifest
from spottrain_operator.kube.retry import Retry

logger = logging.getLogger(__name__)


def network_policy(job: Manifest) -> Manifest:
    """The policy of a job. Kubernetes deletes it with the job."""
    meta = job["metadata"]
    members = {"matchLabels": {LABEL_JOB_UID: meta["uid"]}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "namespace": meta["namespace"],
            "name": f"{meta['name']}-{meta['uid'][:8]}",
            "labels": {LABEL_JOB: meta["name"], LABEL_JOB_UID: meta["uid"], LABEL_MANAGED_BY: MANAGED_BY},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": {
            "podSelector": members,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": members}]}],
        },
    }


@dataclass(slots=True, kw_only=True)
class IsolationState:
    """What is known of one job's policy.

    Attributes:
        is_done: Whether the policy was created, by this process or before.
        retry: When to create it again, if that is refused.
    """

    is_done: bool = False
    retry: Retry = field(default_factory=Retry)


class Isolation:
    """Creates each job's policy before its pods, once while this process leads the job.

    It changes and deletes none: who deletes one means it. While one is refused, the job runs without.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def isolate(self, job: Manifest, state: IsolationState, now: datetime) -> None:
        if state.is_done or not state.retry.is_due(now):
            return
        try:
            await self._cluster.create(NETWORK_POLICIES, network_policy(job))
        except AlreadyExistsError:
            pass
        except RefusedError as error:
            if state.retry.note_refusal(now):
                logger.warning(
                    "%s/%s: other pods can reach its pods, because its NetworkPolicy can't be created; the operator "
                    "retries: %s. If it lacks the right, give it the verb create on networkpolicies, as the chart's "
                    "value jobs.networkPolicies does.",
                    job["metadata"]["namespace"],
                    job["metadata"]["name"],
                    error,
                )
            return
        state.is_done = True
