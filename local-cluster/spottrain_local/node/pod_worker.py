"""Runs one pod from its binding to this node until it is deleted."""

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

from spottrain_local.node.api import UNREACHABLE, ApiClient, ApiError, JSONObject
from spottrain_local.node.container_worker import ContainerWorker, PodContext
from spottrain_local.node.containers import (
    ContainerKind,
    ContainerRecord,
    ContainerRun,
    Running,
    SandboxError,
    Terminated,
    Waiting,
)
from spottrain_local.node.events import now_text
from spottrain_local.node.pod_status import TERMINAL_PHASES, compute_status, parse_state
from spottrain_local.node.tasks import background, until
from spottrain_local.node.volumes import VolumeError

logger = logging.getLogger(__name__)

_SETUP_RETRY_SECONDS = 1.0
_PUBLISH_RETRY_SECONDS = 0.5


class PodWorker:
    """The life of one pod: volumes, init containers, containers, status, end.

    `update` replaces `context.pod` whenever the API object changes. `ended` is called when no container will run
    again and the pod's address is free. The folder with the logs stays until the pod is deleted.
    """

    def __init__(self, context: PodContext, client: ApiClient, ended: Callable[[], None]) -> None:
        self.context = context
        self._client = client
        self._ended = ended
        self._published: JSONObject | None = None
        self._start_time = (context.pod.get("status") or {}).get("startTime") or now_text()
        self._failure: tuple[str, str] | None = None
        self._final = False
        self._settled = asyncio.Event()
        self._gone = asyncio.Event()
        self._deleted = asyncio.Event()
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._kill_at = float("inf")
        self._kill_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        context.changed = self._changed.set
        known = context.directory.exists()
        self.workers = [
            ContainerWorker(context, spec, self._record(spec, kind, known)) for kind, spec in _containers(context.pod)
        ]

    @property
    def records(self) -> list[ContainerRecord]:
        """Return the records of all containers, init containers first."""
        return [worker.record for worker in self.workers]

    def running(self, container: str) -> ContainerRun:
        """Return the run of a container.

        Raises:
            LookupError: There is none, or it does not run; the text says why.
        """
        for worker in self.workers:
            if worker.record.name == container:
                return worker.running()
        raise LookupError(f'container "{container}" not found in pod "{self.context.pod["metadata"]["name"]}"')

    def _record(self, spec: JSONObject, kind: ContainerKind, known: bool) -> ContainerRecord:
        record = ContainerRecord(name=spec["name"], image=spec.get("image", ""), kind=kind)
        status = self.context.pod.get("status") or {}
        old = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
        entry = next((s for s in old if s["name"] == spec["name"]), None)
        if entry is None or (kind != "main" and not known):
            waits_for_init = kind == "main" and bool(self.context.pod["spec"].get("initContainers"))
            record.state = Waiting(reason="PodInitializing" if waits_for_init else "ContainerCreating")
            return record
        record.restart_count = entry.get("restartCount", 0)
        record.container_id = entry.get("containerID") or ""
        last = parse_state(entry.get("lastState") or {})
        record.last = last if isinstance(last, Terminated) else None
        record.state = self._state_after_restart(record, parse_state(entry.get("state") or {}))
        return record

    def _state_after_restart(self, record: ContainerRecord, state: Any) -> Any:
        """Record that a container of an earlier node process has ended with it."""
        if not isinstance(state, Running):
            return state or record.state
        directory = self.context.container_directory(record.name) / str(record.restart_count)
        return self.context.runtime.recover(directory, record.container_id) or Terminated(
            exit_code=137,
            reason="ContainerStatusUnknown",
            message="The container could not be located when the node started again.",
            started_at=state.started_at,
            finished_at=now_text(),
            container_id=record.container_id,
        )

    # -- calls of the kubelet --------------------------------------------------------------------------

    def update(self, pod: JSONObject) -> None:
        """Take a new version of the API object."""
        self.context.pod = pod
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            self._deleted.set()
            self.stop(float(metadata.get("deletionGracePeriodSeconds") or 0))
        self._changed.set()

    def removed(self) -> None:
        """End what still runs: the API object is gone.

        A forced deletion has left no time before that. An object that is gone without a deletion, as after a restore
        of etcd from a backup, leaves the pod its grace period.
        """
        self._gone.set()
        self._deleted.set()
        self._changed.set()
        self.stop(self.context.grace_seconds)

    def fail(self, reason: str, message: str, grace_seconds: float) -> None:
        """End the pod as Failed, for a reason of the node's own."""
        if not self._final:
            self._failure = (reason, message)
        self.stop(min(grace_seconds, self.context.grace_seconds))

    def stop(self, grace_seconds: float) -> None:
        """Stop all containers. A later grace period counts only if it is shorter."""
        self._stop.set()
        at = time.monotonic() + grace_seconds
        if at < self._kill_at:
            self._kill_at = at
            if self._kill_timer:
                self._kill_timer.cancel()
            self._kill_timer = asyncio.get_running_loop().call_later(grace_seconds, self._kill.set)

    # -- the life ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the pod from its start to its deletion."""
        if (self.context.pod.get("status") or {}).get("phase") in TERMINAL_PHASES:
            self._settled.set()
        else:
            async with background(self._publish_changes(), self._keep_volumes_fresh(), self._deadline()):
                await self._run_containers()
                self._final = True
                self._changed.set()
                await self._settled.wait()
            self.context.sessions.end()
            await self.context.runtime.remove_pod(self.context.sandbox)
        self._ended()
        await self._deleted.wait()
        await self._delete()
        await asyncio.to_thread(shutil.rmtree, self.context.directory, ignore_errors=True)
        if self._kill_timer:
            self._kill_timer.cancel()

    async def finished(self) -> None:
        """Wait until the final status is written, or the API object is gone."""
        await self._settled.wait()

    async def _run_containers(self) -> None:
        running: list[asyncio.Task[None]] = []
        stopper = asyncio.create_task(self._stop_when_told())
        try:
            await self._set_up()
            if await self._run_init_containers(running):
                mains = [asyncio.create_task(w.run()) for w in self.workers if w.record.kind == "main"]
                for worker in self._of_kind("main"):
                    if worker.record.state == Waiting(reason="PodInitializing"):
                        worker.record.state = Waiting(reason="ContainerCreating")
                self._changed.set()
                await asyncio.gather(*mains)
            self.stop(self.context.grace_seconds)
            await asyncio.gather(stopper, *running)
        finally:
            for task in (stopper, *running):
                task.cancel()

    def _of_kind(self, *kinds: ContainerKind) -> list[ContainerWorker]:
        return [w for w in self.workers if w.record.kind in kinds]

    async def _run_init_containers(self, running: list[asyncio.Task[None]]) -> bool:
        """Run the init containers in order, and return whether the main ones may start.

        A sidecar only has to have started.
        """
        for worker in self._of_kind("init", "sidecar"):
            task = asyncio.create_task(worker.run())
            if worker.record.kind == "sidecar":
                running.append(task)
                await until(self._stop, worker.has_started.wait())
            else:
                await task
                if not worker.record.succeeded:
                    return False
        return not self._stop.is_set()

    async def _stop_when_told(self) -> None:
        """Stop the main containers first, then the sidecars in reverse order."""
        await self._stop.wait()
        await asyncio.gather(*(worker.stop(self._kill) for worker in self._of_kind("init", "main")))
        for worker in reversed(self._of_kind("sidecar")):
            await worker.stop(self._kill)

    async def _set_up(self) -> None:
        while not self._stop.is_set():
            try:
                os.makedirs(self.context.directory, mode=0o700, exist_ok=True)
                await self.context.runtime.add_pod(self.context.sandbox)
                await self.context.volumes.refresh(self.context.pod)
                return
            except SandboxError as error:
                reason, message = "FailedCreatePodSandBox", f"Failed to create pod sandbox: {error}"
            except (VolumeError, ApiError, *UNREACHABLE) as error:
                reason, message = "FailedMount", f"MountVolume.SetUp failed for {error}"
            self.context.events.record(self.context.pod, "Warning", reason, message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETUP_RETRY_SECONDS):
                    await self._stop.wait()

    async def _keep_volumes_fresh(self) -> None:
        while True:
            await asyncio.sleep(self.context.config.volume_sync_seconds)
            if self._final or self._stop.is_set() or not any(isinstance(r.state, Running) for r in self.records):
                continue
            try:
                await self.context.volumes.refresh(self.context.pod)
            except (VolumeError, ApiError, *UNREACHABLE) as error:
                logger.info("volumes of %s stay as they are: %s", self.context.pod["metadata"]["name"], error)

    async def _deadline(self) -> None:
        seconds = self.context.pod["spec"].get("activeDeadlineSeconds")
        if seconds is not None:
            await asyncio.sleep(seconds)
            text = "Pod was active on the node longer than the specified deadline"
            self.fail("DeadlineExceeded", text, self.context.grace_seconds)

    # -- status ------------------------------------------------------------------------------------------

    def _status(self) -> JSONObject:
        pod = self.context.pod
        if self._published:
            conditions = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or []}
            conditions |= {c["type"]: c for c in self._published["conditions"]}
            pod = {**pod, "status": {**(pod.get("status") or {}), "conditions": list(conditions.values())}}
        status = compute_status(
            pod,
            self.records,
            pod_ip=self.context.place.pod_ip,
            host_ip=self.context.place.host_ip,
            start_time=self._start_time,
            now=now_text(),
            final=self._final,
            failure=self._failure,
        )
        if self._failure and self._failure[0] == "Terminated":
            status["conditions"].append(_disruption(self._failure[1], now_text()))
        return status

    async def _publish_changes(self) -> None:
        self._changed.set()
        while not self._settled.is_set():
            await self._changed.wait()
            self._changed.clear()
            final = self._final
            if not await self._publish():
                await asyncio.sleep(_PUBLISH_RETRY_SECONDS)
                self._changed.set()
            elif final or self._gone.is_set():
                self._settled.set()

    async def _publish(self) -> bool:
        """Write the status if it is new. Return False if that has to be retried."""
        status = self._status()
        if self._gone.is_set() or (status == self._published and self._stands(status)):
            return True
        metadata = self.context.pod["metadata"]
        # The pod may have had other addresses, in a cluster that was down. A strategic merge would keep these.
        anew = {name: [{"$patch": "replace"}, *(status[name] or ())] for name in ("hostIPs", "podIPs")}
        body = {"metadata": {"uid": metadata["uid"]}, "status": status | anew}
        try:
            await self._client.patch(f"{self._path()}/status", body)
        except ApiError as error:
            if error.status in (404, 409):
                self._gone.set()
                return True
            logger.warning("the status of pod %s was refused: %s", metadata["name"], error)
            return False
        except UNREACHABLE:
            return False
        self._published = status
        return True

    def _stands(self, status: JSONObject) -> bool:
        """Return whether the API object has this phase and these conditions, too.

        While a node is silent, its pods are marked not ready. After a restore of etcd, all may be older.
        """
        found = self.context.pod.get("status") or {}
        if found.get("phase") != status["phase"]:
            return False
        seen = {c["type"]: c["status"] for c in found.get("conditions") or []}
        return all(seen.get(c["type"], c["status"]) == c["status"] for c in status["conditions"])

    def _path(self) -> str:
        metadata = self.context.pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    async def _delete(self) -> None:
        """Delete the API object, as nothing of the pod is left."""
        uid = self.context.pod["metadata"]["uid"]
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": uid},
        }
        while not self._gone.is_set():
            try:
                await self._client.delete(self._path(), options)
                return
            except ApiError as error:
                if error.status in (404, 409):
                    return
                logger.warning("pod %s cannot be deleted: %s", self._path(), error)
            except UNREACHABLE as error:
                logger.info("pod %s is not deleted yet: %s", self._path(), error)
            await asyncio.sleep(0.5)


def _containers(pod: JSONObject) -> list[tuple[ContainerKind, JSONObject]]:
    inits: list[tuple[ContainerKind, JSONObject]] = [
        ("sidecar" if c.get("restartPolicy") == "Always" else "init", c)
        for c in pod["spec"].get("initContainers") or []
    ]
    return inits + [("main", c) for c in pod["spec"]["containers"]]


def _disruption(message: str, now: str) -> JSONObject:
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "message": message,
        "lastTransitionTime": now,
    }
