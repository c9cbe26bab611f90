"""A cluster in this process's memory.

It has the part of the API server's behaviour that the operator relies on. Objects have uids and resource versions,
and stale writes conflict. Deletions with a grace period leave the pod terminating until `finish_deletions`. A deleted
job takes its pods along.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from spottrain_api import crd
from spottrain_operator.control_api.token_review import EXTRA_POD_NAME, EXTRA_POD_UID, SERVICE_ACCOUNT_PREFIX
from spottrain_operator.kube.cluster import ALL, Fields, Keep, Labels, Listing, WatchEvent, as_it_is
from spottrain_operator.kube.errors import AlreadyExistsError, ConflictError, ExpiredError, NotFoundError
from spottrain_operator.kube.identities import PodIdentity
from spottrain_operator.kube.resources import (
    COSTS,
    DEFINITIONS,
    EVENTS,
    HISTORIES,
    JOBS,
    LEASES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODE_POOLS,
    NODES,
    POD_GROUPS,
    PODS,
    PROFILES,
    SECRETS,
    TOKEN_REVIEWS,
    WORKLOADS,
    Manifest,
    Resource,
)
from spottrain_operator.objects.watched_cluster import WATCHED
from world.faults import Hook, Request

_T = TypeVar("_T")
Key = tuple[str, str]
"""Namespace and name."""


class MemoryCluster:
    """Implements Cluster on dictionaries.

    Tests may look into the dictionaries and change them.

    Attributes:
        before, after: What happens to each request before it takes effect, and before its answer.
        num_reads: Objects and lists that were asked for.
        raw: Paths that belong to no resource, with what is there.
        tokens: The pods of tokens, by token and audience.
        other_definitions: CRDs that are not this release's.
    """

    def __init__(self) -> None:
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        self._objects: dict[Resource, dict[Any, Manifest]] = defaultdict(dict)
        self.jobs: dict[Key, Manifest] = self._objects[JOBS]
        self.pods: dict[Key, Manifest] = self._objects[PODS]
        self.leases: dict[Key, Manifest] = self._objects[LEASES]
        self.secrets: dict[Key, Manifest] = self._objects[SECRETS]
        self.histories: dict[Key, Manifest] = self._objects[HISTORIES]
        self.costs: dict[Key, Manifest] = self._objects[COSTS]
        self.network_policies: dict[Key, Manifest] = self._objects[NETWORK_POLICIES]
        self.pod_groups: dict[Key, Manifest] = self._objects[POD_GROUPS]
        self.workloads: dict[Key, Manifest] = self._objects[WORKLOADS]
        self.nodes: dict[str, Manifest] = self._objects[NODES]
        self.node_pools: dict[str, Manifest] = self._objects[NODE_POOLS]
        self.profiles: dict[str, Manifest] = self._objects[PROFILES]
        self.namespaces: dict[str, Manifest] = self._objects[NAMESPACES]
        self.other_definitions: dict[str, Manifest] = self._objects[DEFINITIONS]
        self.raw: Mapping[str, Manifest] = {}
        self.tokens: dict[tuple[str, str], PodIdentity] = {}
        self.num_reads: Counter[Resource | str] = Counter()
        self._newest = 0
        self._shown: dict[Resource, dict[Any, Manifest]] = {each: {} for each in WATCHED}
        self._changes: list[tuple[Resource, Manifest | None, WatchEvent]] = []  # with the object before
        self._known_since = 0

    # --- what tests do ------------------------------------------------------------------------------------

    def put_job(self, job: Manifest) -> Manifest:
        """Create or replace a job, as a user would with kubectl apply."""
        key = _key(JOBS, job)
        previous = self.jobs.get(key)
        self.jobs[key] = self._stamped(_copied(job), previous)
        self.jobs[key]["metadata"]["generation"] = 1 + (previous["metadata"]["generation"] if previous else 0)
        if previous and "status" in previous:
            self.jobs[key]["status"] = previous["status"]
        return _copied(self.jobs[key])

    def put_node(self, node: Manifest) -> None:
        name = node["metadata"]["name"]
        self.nodes[name] = self._stamped(_copied(node), self.nodes.get(name))

    def put_event(self, namespace: str, event: Manifest) -> None:
        """Record an event, as a kubelet would."""
        named = event | {"metadata": {"namespace": namespace, "name": f"event-{len(self.events)}"}}
        self._objects[EVENTS][_key(EVENTS, named)] = self._stamped(named)

    @property
    def events(self) -> list[Manifest]:
        return list(self._objects[EVENTS].values())

    def finish_deletions(self) -> None:
        """Let the terminating pods go, as their kubelets would."""
        for key in [key for key, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]]:
            del self.pods[key]

    def forget_history(self) -> None:
        """Let watches from any version up to now expire."""
        self._show()
        self._known_since = self._newest + 1

    def _show(self) -> None:
        """Make events of what has changed.

        This includes what tests have changed in the dictionaries.
        """
        for resource, shown in self._shown.items():
            objects = self._objects[resource]
            for key in [key for key in shown if key not in objects]:
                gone = shown.pop(key)
                gone["metadata"]["resourceVersion"] = self._next_version()
                event = WatchEvent(object=gone, version=self._newest, deleted=True)
                self._changes.append((resource, gone, event))
            for key, found in objects.items():
                before = shown.get(key)
                if found == before:
                    continue
                old = before["metadata"] if before else {}
                found["metadata"].setdefault("uid", old.get("uid") or str(uuid.uuid4()))
                if found["metadata"].get("resourceVersion") in (None, old.get("resourceVersion")):
                    found["metadata"]["resourceVersion"] = self._next_version()
                shown[key] = _copied(found)
                version = int(found["metadata"]["resourceVersion"])
                self._changes.append((resource, before, WatchEvent(object=_copied(found), version=version)))

    def _next_version(self) -> str:
        self._newest += 1
        return str(self._newest)

    def _stamped(self, new: Manifest, previous: Manifest | None = None) -> Manifest:
        meta = new["metadata"]
        old = previous["metadata"] if previous else {}
        meta["uid"] = old.get("uid") or meta.get("uid") or str(uuid.uuid4())
        meta["creationTimestamp"] = old.get("creationTimestamp") or meta.get("creationTimestamp") or _now()
        meta["resourceVersion"] = self._next_version()
        return new

    # --- Cluster ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asked(
        self, verb: str, resource: Resource, name: str = "", body: Manifest | None = None
    ) -> AsyncIterator[None]:
        request = Request(verb, resource, name, body)
        if verb in ("get", "list"):
            self.num_reads[resource] += 1
        for hook in self.before:
            await hook(request)
        yield
        for hook in self.after:
            await hook(request)

    async def get(self, resource: Resource, name: str, *, namespace: str = "") -> Manifest | None:
        async with self._asked("get", resource, name):
            found = self._found(resource, namespace, name)
            if found is None and resource == DEFINITIONS:
                found = crd.definitions().get(name)
            return _copied(found)

    async def get_raw(self, path: str) -> Manifest:
        self.num_reads[path] += 1
        if path not in self.raw:
            raise NotFoundError(f"there is no {path}")
        return _copied(self.raw[path])

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str = "",
        labels: Labels = ALL,
        fields: Fields = ALL,
        keep: Keep = as_it_is,
    ) -> Listing:
        async with self._asked("list", resource):
            self._show()
            found = [
                keep(_copied(item))
                for _, item in sorted(self._objects[resource].items())
                if namespace in ("", item["metadata"].get("namespace"))
                and _is_selected(item, labels)
                and all(_at(item, path) == value for path, value in fields.items())
            ]
            return Listing(items=tuple(found), version=self._newest)

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        new = _copied(manifest)
        name = new.get("metadata", {}).get("name", "")
        async with self._asked("create", resource, name, new):
            if resource == TOKEN_REVIEWS:
                return self._reviewed(new)
            objects, key = self._objects[resource], _key(resource, new)
            if key in objects:
                raise AlreadyExistsError(f'{resource} "{name}" already exists')
            objects[key] = self._stamped(new)
            if resource == PODS:
                objects[key]["status"] = {"phase": "Pending"}
            self._show()
            return _copied(objects[key])

    async def patch(
        self, resource: Resource, name: str, patch: Manifest, *, namespace: str = "", uid: str = ""
    ) -> Manifest | None:
        async with self._asked("patch", resource, name, patch):
            found = self._found(resource, namespace, name, uid)
            if found is None:
                return None
            _merge(found, patch)
            found["metadata"]["resourceVersion"] = self._next_version()
            self._show()
            return _copied(found)

    async def replace(self, resource: Resource, manifest: Manifest, *, subresource: str = "") -> Manifest:
        new = _copied(manifest)
        async with self._asked("replace", resource, new["metadata"]["name"], new):
            objects, key = self._objects[resource], _key(resource, new)
            stored = objects.get(key)
            if stored is None or stored["metadata"]["resourceVersion"] != new["metadata"]["resourceVersion"]:
                raise ConflictError(f"{resource} {key} has been modified; read it again")
            if subresource:
                new = _copied(stored) | {subresource: new[subresource]}
            objects[key] = self._stamped(new, stored)
            return _copied(objects[key])

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str, grace_seconds: int | None = None
    ) -> Manifest | None:
        async with self._asked("delete", resource, name):
            found = self._found(resource, namespace, name, uid)
            if found is None:
                return None
            self._show()  # watches show an object that came and went at once, too
            if resource == PODS:
                self._terminate(found, at_once=grace_seconds == 0 or not found["spec"].get("nodeName"))
            answer = _copied(found)
            if resource != PODS or found["metadata"]["deletionGracePeriodSeconds"] == 0:
                del self._objects[resource][_key(resource, found)]
            for key in [key for key, pod in self.pods.items() if _is_owned_by(pod, uid)]:
                del self.pods[key]
            self._show()
            return answer

    async def watch(self, resource: Resource, version: int, *, labels: Labels = ALL) -> AsyncIterator[WatchEvent]:
        while True:
            async with self._asked("watch", resource):
                pass
            if version < self._known_since:
                raise ExpiredError(f"too old resource version: {version} ({self._known_since})")
            self._show()
            for before, event in [
                (before, event) for of, before, event in self._changes if of == resource and event.version > version
            ]:
                version = event.version
                if (shown := _selected_event(before, event, labels)) is not None:
                    yield _copied(shown)
            await asyncio.sleep(0.001)

    def _found(self, resource: Resource, namespace: str, name: str, uid: str = "") -> Manifest | None:
        found = self._objects[resource].get((namespace, name) if resource.namespaced else name)
        return found if found is not None and uid in ("", found["metadata"].get("uid")) else None

    def _terminate(self, pod: Manifest, *, at_once: bool) -> None:
        meta = pod["metadata"]
        meta.setdefault("deletionTimestamp", _now())
        meta["deletionGracePeriodSeconds"] = 0 if at_once else 30
        meta["resourceVersion"] = self._next_version()

    def _reviewed(self, review: Manifest) -> Manifest:
        token, [audience] = review["spec"]["token"], review["spec"]["audiences"]
        pod = self.tokens.get((token, audience))
        if pod is None:
            return review | {"status": {"authenticated": False}}
        user = {
            "username": f"{SERVICE_ACCOUNT_PREFIX}{pod.namespace}:default",
            "extra": {EXTRA_POD_NAME: [pod.pod], EXTRA_POD_UID: [pod.uid]},
        }
        return review | {"status": {"authenticated": True, "audiences": [audience], "user": user}}


def _key(resource: Resource, item: Manifest) -> Any:
    meta = item["metadata"]
    return (meta["namespace"], meta["name"]) if resource.namespaced else meta["name"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _copied(item: _T) -> _T:
    """A deep copy, several times as fast as copy.deepcopy."""
    copy: _T = pickle.loads(pickle.dumps(item))
    return copy


def _is_selected(item: Manifest, labels: Labels) -> bool:
    found = item["metadata"].get("labels") or {}
    return all(found.get(key) == value if value is not None else found.get(key) for key, value in labels.items())


def _selected_event(before: Manifest | None, event: WatchEvent, labels: Labels) -> WatchEvent | None:
    """The event as a watch of some objects shows it. One that is no longer selected is gone."""
    assert event.object is not None
    if _is_selected(event.object, labels):
        return event
    if before is not None and _is_selected(before, labels):
        return WatchEvent(object=event.object, version=event.version, deleted=True)
    return None


def _at(item: Manifest, path: str) -> Any:
    found: Any = item
    for part in path.split("."):
        found = found.get(part, {})
    return found


def _merge(found: Manifest, patch: Manifest) -> None:
    """Merge a patch into an object (RFC 7386)."""
    for key, value in patch.items():
        if isinstance(value, dict):
            _merge(found.setdefault(key, {}), value)
        elif value is None:
            found.pop(key, None)
        else:
            found[key] = value


def _is_owned_by(pod: Manifest, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))
