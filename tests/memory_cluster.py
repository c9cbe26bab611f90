"""A cluster in this process's memory.

It has the part of the API server's behaviour that the operator relies on. Objects have uids and resource versions,
and stale writes conflict. Deletions with a grace period leave the pod terminating until `finish_deletions`. A deleted
job takes its pods along.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import TypeVar

from spottrain_api import crd
from spottrain_api.contract.names import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_operator.kube.client import Kind, Listing, TokenIssuer, WatchEvent
from spottrain_operator.kube.errors import AlreadyExistsError, ClusterError, ConflictError, ExpiredError
from spottrain_operator.kube.identities import JobKey, PodIdentity
from spottrain_operator.kube.resources import Manifest

_T = TypeVar("_T")


class MemoryCluster:
    """All of the protocols of kube/client.py, on dictionaries.

    Tests may look into the dictionaries and change them.
    """

    def __init__(self) -> None:
        self.jobs: dict[JobKey, Manifest] = {}
        self.pods: dict[tuple[str, str], Manifest] = {}
        self.nodes: dict[str, Manifest] = {}
        self.leases: dict[tuple[str, str], Manifest] = {}
        self.secrets: dict[tuple[str, str], Manifest] = {}
        self.histories: dict[tuple[str, str], Manifest] = {}
        self.namespaces: dict[str, Manifest] = {}
        self.network_policies: dict[tuple[str, str], Manifest] = {}
        self.other_definitions: dict[str, Manifest] = {}  # CRDs that are not this release's
        self.events: list[Manifest] = []
        self.tokens: dict[tuple[str, str], PodIdentity] = {}
        self.issuer: TokenIssuer | None = None
        self.num_issuer_reads = 0
        self.num_reads: Counter[str] = Counter()
        self.watches_fail = False
        self._newest = 0
        self._shown: dict[Kind, dict[tuple[str, str], Manifest]] = {kind: {} for kind in Kind}
        self._history: list[tuple[Kind, WatchEvent]] = []
        self._known_since = 0

    # --- what tests do ------------------------------------------------------------------------------------

    def put_job(self, job: Manifest) -> Manifest:
        """Create or replace a job, as a user would with kubectl apply."""
        key = JobKey(namespace=job["metadata"]["namespace"], name=job["metadata"]["name"])
        previous = self.jobs.get(key)
        self.jobs[key] = self._stamped(job, previous)
        self.jobs[key]["metadata"]["generation"] = 1 + (previous["metadata"]["generation"] if previous else 0)
        if previous and "status" in previous:
            self.jobs[key]["status"] = previous["status"]
        return _copied(self.jobs[key])

    def put_node(self, node: Manifest) -> None:
        name = node["metadata"]["name"]
        self.nodes[name] = self._stamped(node, self.nodes.get(name))

    def finish_deletions(self) -> None:
        """Let the terminating pods go, as their kubelets would."""
        self.pods = {k: p for k, p in self.pods.items() if "deletionTimestamp" not in p["metadata"]}

    def forget_history(self) -> None:
        """Let watches from any version up to now expire."""
        self._show()
        self._known_since = self._newest + 1

    def _show(self) -> None:
        """Make events of what has changed.

        This includes what tests have changed in the dictionaries.
        """
        for kind, objects in self._objects().items():
            shown = self._shown[kind]
            for key in [key for key in shown if key not in objects]:
                gone = shown.pop(key)
                gone["metadata"]["resourceVersion"] = self._next_version()
                self._history.append((kind, WatchEvent(object=gone, version=self._newest, deleted=True)))
            for key, found in objects.items():
                if key in shown and shown[key] == found:
                    continue
                before = shown[key]["metadata"]["resourceVersion"] if key in shown else None
                found["metadata"].setdefault(
                    "uid", shown[key]["metadata"]["uid"] if key in shown else str(uuid.uuid4())
                )
                if found["metadata"].get("resourceVersion") in (None, before):
                    found["metadata"]["resourceVersion"] = self._next_version()
                shown[key] = _copied(found)
                version = int(found["metadata"]["resourceVersion"])
                self._history.append((kind, WatchEvent(object=_copied(found), version=version)))

    def _objects(self) -> dict[Kind, dict[tuple[str, str], Manifest]]:
        return {
            Kind.JOBS: {(key.namespace, key.name): job for key, job in self.jobs.items()},
            Kind.PODS: {
                key: pod
                for key, pod in self.pods.items()
                if (labels := pod["metadata"].get("labels", {})).get(LABEL_MANAGED_BY) == MANAGED_BY
                and labels.get(LABEL_JOB)
            },
            Kind.NODES: {("", name): node for name, node in self.nodes.items()},
        }

    def _next_version(self) -> str:
        self._newest += 1
        return str(self._newest)

    def _stamped(self, new: Manifest, previous: Manifest | None = None) -> Manifest:
        stored = _copied(new)
        meta = stored["metadata"]
        old = previous["metadata"] if previous else {}
        meta["uid"] = old.get("uid") or meta.get("uid") or str(uuid.uuid4())
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        meta["creationTimestamp"] = old.get("creationTimestamp") or meta.get("creationTimestamp") or now
        meta["resourceVersion"] = self._next_version()
        return stored

    # --- ClusterClient ------------------------------------------------------------------------------------

    async def get_job(self, key: JobKey) -> Manifest | None:
        self.num_reads["jobs"] += 1
        return _copied(self.jobs.get(key))

    async def list_jobs(self) -> list[Manifest]:
        return [_copied(job) for _, job in sorted(self.jobs.items())]

    async def replace_job_status(self, job: Manifest) -> Manifest:
        meta = job["metadata"]
        key = JobKey(namespace=meta["namespace"], name=meta["name"])
        stored = self.jobs.get(key)
        if stored is None or stored["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise ConflictError(f"the TrainingJob {key} has been modified; read it again")
        self.jobs[key] = self._stamped(stored | {"status": job["status"]}, stored)
        return _copied(self.jobs[key])

    async def delete_job(self, key: JobKey, *, uid: str) -> None:
        job = self.jobs.get(key)
        if job is None or job["metadata"]["uid"] != uid:
            return
        self._show()  # watches show a job that came and went at once, too
        del self.jobs[key]
        self.pods = {k: p for k, p in self.pods.items() if not _owned_by(p, uid)}
        self._show()

    async def list_pods(self, namespace: str, *, labels: dict[str, str]) -> list[Manifest]:
        self.num_reads["pods"] += 1
        return [
            _copied(pod)
            for (pod_namespace, _), pod in sorted(self.pods.items())
            if pod_namespace == namespace and labels.items() <= pod["metadata"].get("labels", {}).items()
        ]

    async def create_pod(self, pod: Manifest) -> Manifest:
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        if key in self.pods:
            raise AlreadyExistsError(f'pods "{key[1]}" already exists')
        self.pods[key] = self._stamped(pod) | {"status": {"phase": "Pending"}}
        self._show()
        return _copied(self.pods[key])

    async def delete_pod(
        self, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        pod = self.pods.get((namespace, name))
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        meta = pod["metadata"]
        at_once = grace_seconds == 0 or not pod["spec"].get("nodeName")
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        meta["deletionGracePeriodSeconds"] = 0 if at_once else 30
        meta["resourceVersion"] = self._next_version()
        answer = _copied(pod)
        if at_once:
            del self.pods[namespace, name]
        self._show()
        return answer

    async def annotate_pod(
        self, namespace: str, name: str, *, uid: str, annotations: Mapping[str, str | None]
    ) -> Manifest | None:
        pod = self.pods.get((namespace, name))
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        merged = pod["metadata"].get("annotations", {}) | dict(annotations)
        pod["metadata"]["annotations"] = {key: value for key, value in merged.items() if value is not None}
        pod["metadata"]["resourceVersion"] = self._next_version()
        self._show()
        return _copied(pod)

    async def label_pod(self, namespace: str, name: str, *, labels: Mapping[str, str | None]) -> None:
        pod = self.pods.get((namespace, name))
        if pod is not None:
            merged = pod["metadata"].get("labels", {}) | dict(labels)
            pod["metadata"]["labels"] = {key: value for key, value in merged.items() if value is not None}
            pod["metadata"]["resourceVersion"] = self._next_version()
            self._show()

    async def get_nodes(self, names: Collection[str]) -> list[Manifest]:
        self.num_reads["nodes"] += 1
        return [_copied(self.nodes[name]) for name in sorted(set(names)) if name in self.nodes]

    async def create_event(self, event: Manifest) -> None:
        self.events.append(_copied(event))

    async def events_about(self, namespace: str, *, uid: str) -> list[Manifest]:
        self.num_reads["events"] += 1
        return [_copied(event) for event in self.events if event["involvedObject"].get("uid") == uid]

    # --- WatchClient --------------------------------------------------------------------------------------

    async def list_kind(
        self,
        kind: Kind,
        *,
        namespace: str = "",
        labels: Mapping[str, str] | None = None,
        keep: Callable[[Manifest], Manifest] = lambda item: item,
    ) -> Listing:
        self._refuse_watches()
        self.num_reads[f"list {kind}"] += 1
        self._show()
        found = [
            keep(_copied(item))
            for (item_namespace, _), item in sorted(self._objects()[kind].items())
            if namespace in ("", item_namespace)
            and dict(labels or {}).items() <= item["metadata"].get("labels", {}).items()
        ]
        return Listing(items=tuple(found), version=self._newest)

    async def watch_kind(self, kind: Kind, version: int) -> AsyncIterator[WatchEvent]:
        while True:
            self._refuse_watches()
            if version < self._known_since:
                raise ExpiredError(f"too old resource version: {version} ({self._known_since})")
            self._show()
            for event in [each for of, each in self._history if of is kind and each.version > version]:
                version = event.version
                yield _copied(event)
            await asyncio.sleep(0.001)

    def _refuse_watches(self) -> None:
        if self.watches_fail:
            raise ClusterError("the API server can't be reached")

    # --- TokenReviewer, IssuerClient, LeaseClient, SecretClient, NamespaceClient, HistoryClient and others

    async def review_token(self, token: str, *, audience: str) -> PodIdentity | None:
        return self.tokens.get((token, audience))

    async def read_issuer(self) -> TokenIssuer:
        self.num_issuer_reads += 1
        if self.issuer is None:
            raise ClusterError("the API server publishes no keys")
        return self.issuer

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        return _copied(self.leases.get((namespace, name)))

    async def list_leases(self, name: str) -> list[Manifest]:
        return [_copied(lease) for (_, found), lease in sorted(self.leases.items()) if found == name]

    async def write_lease(self, lease: Manifest) -> Manifest:
        return self._write(self.leases, lease)

    async def get_namespace(self, name: str) -> Manifest | None:
        return _copied(self.namespaces.get(name))

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        return _copied(self.secrets.get((namespace, name)))

    async def write_secret(self, secret: Manifest) -> Manifest:
        return self._write(self.secrets, secret)

    async def create_network_policy(self, policy: Manifest) -> None:
        key = (policy["metadata"]["namespace"], policy["metadata"]["name"])
        if key in self.network_policies:
            raise AlreadyExistsError(f'networkpolicies "{key[1]}" already exists')
        self.network_policies[key] = self._stamped(policy)

    async def read_definition(self, name: str) -> Manifest | None:
        return _copied(self.other_definitions.get(name) or crd.definitions().get(name))

    async def read_history(self, key: JobKey) -> Manifest | None:
        return _copied(self.histories.get((key.namespace, key.name)))

    async def write_history(self, history: Manifest) -> Manifest:
        return self._write(self.histories, history)

    def _write(self, store: dict[tuple[str, str], Manifest], new: Manifest) -> Manifest:
        key = (new["metadata"]["namespace"], new["metadata"]["name"])
        stored = store.get(key)
        stored_version = stored["metadata"]["resourceVersion"] if stored else None
        if new["metadata"].get("resourceVersion") != stored_version:
            raise ConflictError(f"{key[1]} has been modified; read it again")
        store[key] = self._stamped(new, stored)
        return _copied(store[key])


def _copied(item: _T) -> _T:
    """A deep copy, several times as fast as copy.deepcopy."""
    copy: _T = pickle.loads(pickle.dumps(item))
    return copy


def _owned_by(pod: Manifest, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))
