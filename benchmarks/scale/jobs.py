"""The manifests of the jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from spottrain_api.contract.names import API_VERSION, KIND
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.core.model import Observed
from spottrain_operator.core.plan import plan
from spottrain_operator.objects.observe import job_view
from spottrain_operator.objects.write_back import as_written

# Of a job that has been over for an hour, the operator keeps only the phase.
FINISHED_AGO = timedelta(hours=2)


def job(name: str, num_members: int) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "image": "bench/none",
            "entrypoint": {"script": "train.py"},
            "nodes": {"min": max(1, num_members // 2), "max": num_members},
            "capacity": {
                "onDemand": {"min": max(1, num_members // 4), "max": num_members, "pricePerHour": 3.0},
                "spot": {"max": num_members, "pricePerHour": 1.0},
            },
            "batch": {"global": 8 * num_members},
            "checkpoint": {"uri": f"s3://bench/{name}"},
            "runPolicy": {"cleanPodPolicy": "All"},
        },
    }


def finished_status() -> dict[str, Any]:
    """The status in which the operator leaves a job that has succeeded."""
    ended = datetime.now(UTC) - FINISHED_AGO
    at = ended.isoformat(timespec="seconds").replace("+00:00", "Z")
    members = [
        {
            **{"pod": f"old-{rank}", "podUID": f"{rank:036d}", "podUid": f"{rank:036d}", "address": "10.0.0.1"},
            **{"node": f"node-{rank}", "nodeRank": rank, "capacityType": "spot"},
        }
        for rank in range(8)
    ]
    commit = {"generation": 9, "step": 5000, "manifest": "attempts/g9/manifest.json", "committedAt": at}
    transition = {
        **{"at": at, "reason": "Preempted", "message": "notice for node-1", "lastStep": 100, "resumedFrom": 100},
        **{"worldSizeBefore": 8, "worldSizeAfter": 7, "secondsWithoutStep": 4.2},
    }
    status = {
        "phase": "Succeeded",
        "message": "Trained to step 5000",
        "observedGeneration": 1,
        "startTime": at,
        "completionTime": at,
        "accountedAt": at,
        "lastSequence": 20,
        "commit": commit,
        "generation": {
            **{"number": 9, "state": "Ended", "rendezvousID": "old-g9", "rendezvousEndpoint": "10.0.0.1:29500"},
            **{"worldSize": 8, "members": members, "templateHash": "t", "startedAt": at, "endedAt": at},
            **{"firstStepAt": at, "reason": "Succeeded"},
        },
        "transitions": [{"generation": number, **transition} for number in range(8)],
        "progress": {"step": 5000, "totalSteps": 5000, "display": "5000/5000", "loss": 2.5, "lastStepAt": at},
    }
    meta = {"namespace": "default", "uid": "u", "generation": 1, "creationTimestamp": at}
    known = job("old", 8)
    view = job_view(known | {"metadata": known["metadata"] | meta, "status": status})
    left = plan(Observed(job=view, template_hash="t", listening_since=ended), ended).status
    return as_written(left, TrainingJobStatus(), {})
