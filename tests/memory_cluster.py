"""A cluster in this process's memory.

It has the part of the API server's behaviour that the operator relies on. Objects have uids and resource versions,
and stale writes conflict. Deletions with a grace period leave the pod terminating until `finish_deletions`. A deleted
job takes its pods along.
"""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from spottrain_operator.cluster.client import AlreadyExistsError, ConflictError, JobKey, Manifest, PodIdentity


class MemoryCluster:
    """All of the protocols of cluster/client.py, on dictionaries.

    Tests may look into the dictionaries and change them.
    """

    def __init__(self) -> None:
        self.jobs: dict[JobKey, Manifest] = {}
        self.pods: dict[tuple[str, str], Manifest] = {}
        self.nodes: dict[str, Manifest] = {}
        self.leases: dict[tuple[str, str], Manifest] = {}
        self.histories: dict[tuple[str, str], Manifest] = {}
        self.namespaces: dict[str, Manifest] = {}
        self.events: list[Manifest] = []
        self.tokens: dict[tuple[str, str], PodIdentity] = {}
        self._versions = itertools.count(1)

    # --- what tests do ------------------------------------------------------------------------------------

    def put_job(self, job: Manifest) -> Manifest:
        """Create or replace a job, as a user would with kubectl apply."""
        key = JobKey(namespace=job["metadata"]["namespace"], name=job["metadata"]["name"])
        previous = self.jobs.get(key)
        self.jobs[key] = self._stamped(job, previous)
        self.jobs[key]["metadata"]["generation"] = 1 + (previous["metadata"]["generation"] if previous else 0)
        if previous and "status" in previous:
            self.jobs[key]["status"] = previous["status"]
        return copy.deepcopy(self.jobs[key])

    def put_node(self, node: Manifest) -> None:
        name = node["metadata"]["name"]
        self.nodes[name] = self._stamped(node, self.nodes.get(name))

    def finish_deletions(self) -> None:
        """Let the terminating pods go, as their kubelets would."""
        self.pods = {k: p for k, p in self.pods.items() if "deletionTimestamp" not in p["metadata"]}

    def _stamped(self, new: Manifest, previous: Manifest | None = None) -> Manifest:
        stored = copy.deepcopy(new)
        meta = stored["metadata"]
        old = previous["metadata"] if previous else {}
        meta["uid"] = old.get("uid") or meta.get("uid") or str(uuid.uuid4())
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        meta["creationTimestamp"] = old.get("creationTimestamp") or meta.get("creationTimestamp") or now
        meta["resourceVersion"] = str(next(self._versions))
        return stored

    # --- ClusterClient ------------------------------------------------------------------------------------

    async def get_job(self, key: JobKey) -> Manifest | None:
        return copy.deepcopy(self.jobs.get(key))

    async def list_jobs(self) -> list[Manifest]:
        return [copy.deepcopy(job) for _, job in sorted(self.jobs.items())]

    async def replace_job_status(self, job: Manifest) -> Manifest:
        meta = job["metadata"]
        key = JobKey(namespace=meta["namespace"], name=meta["name"])
        stored = self.jobs.get(key)
        if stored is None or stored["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise ConflictError(f"the TrainingJob {key} has been modified; read it again")
        self.jobs[key] = self._stamped(stored | {"status": job["status"]}, stored)
        return copy.deepcopy(self.jobs[key])

    async def delete_job(self, key: JobKey, *, uid: str) -> None:
        job = self.jobs.get(key)
        if job is None or job["metadata"]["uid"] != uid:
            return
        del self.jobs[key]
        self.pods = {k: p for k, p in self.pods.items() if not _owned_by(p, uid)}

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]:
        return [
            copy.deepcopy(pod)
            for (pod_namespace, _), pod in sorted(self.pods.items())
            if pod_namespace == namespace and labels.items() <= pod["metadata"].get("labels", {}).items()
        ]

    async def create_pod(self, pod: Manifest) -> None:
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        if key in self.pods:
            raise AlreadyExistsError(f'pods "{key[1]}" already exists')
        self.pods[key] = self._stamped(pod) | {"status": {"phase": "Pending"}}

    async def delete_pod(self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None) -> None:
        pod = self.pods.get((namespace, name))
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        if grace_seconds == 0 or not pod["spec"].get("nodeName"):
            del self.pods[namespace, name]
            return
        if "deletionTimestamp" not in pod["metadata"]:
            now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            pod["metadata"]["deletionTimestamp"] = now
            pod["metadata"]["resourceVersion"] = str(next(self._versions))

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> None:
        pod = self.pods.get((namespace, name))
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        merged = pod["metadata"].get("annotations", {}) | dict(annotations)
        pod["metadata"]["annotations"] = {key: value for key, value in merged.items() if value is not None}
        pod["metadata"]["resourceVersion"] = str(next(self._versions))

    async def label_pod(self, namespace: str, name: str, *, labels: Mapping[str, str | None]) -> None:
        pod = self.pods.get((namespace, name))
        if pod is not None:
            merged = pod["metadata"].get("labels", {}) | dict(labels)
            pod["metadata"]["labels"] = {key: value for key, value in merged.items() if value is not None}
            pod["metadata"]["resourceVersion"] = str(next(self._versions))

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]:
        return [copy.deepcopy(self.nodes[name]) for name in sorted(set(names)) if name in self.nodes]

    async def create_event(self, event: Manifest) -> None:
        self.events.append(copy.deepcopy(event))

    async def newest_event(self, namespace: str, *, uid: str) -> Manifest | None:
        about = [event for event in self.events if event["involvedObject"].get("uid") == uid]
        return copy.deepcopy(about[-1]) if about else None

    # --- TokenReviewer, LeaseClient, NamespaceClient and HistoryClient ------------------------------------

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        return self.tokens.get((token, audience))

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self.leases.get((namespace, name)))

    async def list_leases(self, name: str) -> list[Manifest]:
        return [copy.deepcopy(lease) for (_, found), lease in sorted(self.leases.items()) if found == name]

    async def write_lease(self, lease: Manifest) -> Manifest:
        return self._write(self.leases, lease)

    async def get_namespace(self, name: str) -> Manifest | None:
        return copy.deepcopy(self.namespaces.get(name))

    async def read_history(self, key: JobKey) -> Manifest | None:
        return copy.deepcopy(self.histories.get((key.namespace, key.name)))

    async def write_history(self, history: Manifest) -> Manifest:
        return self._write(self.histories, history)

    def _write(self, store: dict[tuple[str, str], Manifest], new: Manifest) -> Manifest:
        key = (new["metadata"]["namespace"], new["metadata"]["name"])
        stored = store.get(key)
        stored_version = stored["metadata"]["resourceVersion"] if stored else None
        if new["metadata"].get("resourceVersion") != stored_version:
            raise ConflictError(f"{key[1]} has been modified; read it again")
        store[key] = self._stamped(new, stored)
        return copy.deepcopy(store[key])


def _owned_by(pod: Manifest, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))
