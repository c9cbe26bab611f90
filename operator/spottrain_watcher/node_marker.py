"""Marks the Node for the operator and the scheduler.

The Node gets the notice as an annotation, and a taint against new pods. What its shutdown leaves pods becomes a
label.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from spottrain_api.contract.names import ANNOTATION_NOTICE, ANNOTATION_WATCHER, TAINT_PREEMPTION
from spottrain_api.contract.nodes import LABEL_SHUTDOWN_GRACE
from spottrain_api.contract.notices import Notice
from spottrain_watcher.kubernetes_api import KubernetesApi, KubernetesError

logger = logging.getLogger(__name__)

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 2.0


def desired_change(
    node: dict[str, Any], notice: Notice | None, mark: str, grace_seconds: int | None = None
) -> dict[str, Any] | None:
    """The merge patch that makes the Node show `notice` and `mark`; None if the Node shows them already.

    A recommendation is only annotated, as the node may well stay. Taints are one atomic list, so the patch carries
    the resourceVersion from which it was made. A label with the grace of the node's shutdown stays as it is.
    """
    metadata = node["metadata"]
    shown = metadata.get("annotations") or {}
    annotations = {ANNOTATION_WATCHER: mark, ANNOTATION_NOTICE: notice.to_json() if notice else None}
    changed = {key: value for key, value in annotations.items() if shown.get(key) != value}
    taints = node.get("spec", {}).get("taints") or []
    desired_taints = [taint for taint in taints if taint.get("key") != TAINT_PREEMPTION]
    if notice is not None and notice.makes_drain:
        ours = [taint for taint in taints if taint.get("key") == TAINT_PREEMPTION]
        desired_taints += ours or [{"key": TAINT_PREEMPTION, "effect": "NoSchedule"}]
    patch: dict[str, Any] = {}
    if changed:
        patch["metadata"] = {"annotations": changed}
    if grace_seconds is not None and LABEL_SHUTDOWN_GRACE not in (metadata.get("labels") or {}):
        patch.setdefault("metadata", {})["labels"] = {LABEL_SHUTDOWN_GRACE: str(grace_seconds)}
    if len(desired_taints) != len(taints):
        patch["spec"] = {"taints": desired_taints}
    if patch:
        patch.setdefault("metadata", {})["resourceVersion"] = metadata["resourceVersion"]
    return patch or None


class NodeMarker:
    """Keeps the Node in step with the newest notice, and retries until that succeeds.

    With it goes `mark`, by which agents know the watcher. The mark comes first, and without waiting for a notice.
    """

    def __init__(self, api: KubernetesApi, node: str, mark: str) -> None:
        self._api = api
        self._path = f"/api/v1/nodes/{node}"
        self._mark = mark
        self._notice: Notice | None = None
        self._grace_seconds: int | None = None
        self._shows = False
        self._changed = asyncio.Event()
        self._changed.set()

    def show(self, notice: Notice | None) -> None:
        self._notice, self._shows = notice, True
        self.renew()

    def label_grace(self, seconds: int) -> None:
        """Label a Node that lacks the label with what its shutdown leaves pods.

        It is written with what is shown.
        """
        self._grace_seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Write until a write succeeds, then wait for the next change.

        Runs until it is cancelled.
        """
        retry_seconds = MIN_RETRY_SECONDS
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write()
                retry_seconds = MIN_RETRY_SECONDS
            except KubernetesError as error:
                if error.status == 404:
                    # The Node object is gone: there is nothing left to mark.
                    continue
                logger.warning("the node could not be marked; retrying: %s", error)
                self._changed.set()
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)

    async def _write(self) -> None:
        if not self._shows:
            await self._api.merge_patch(self._path, {"metadata": {"annotations": {ANNOTATION_WATCHER: self._mark}}})
            return
        notice = self._notice
        patch = desired_change(await self._api.get(self._path), notice, self._mark, self._grace_seconds)
        if patch is not None:
            await self._api.merge_patch(self._path, patch)
            logger.info("node marked: %s", notice.to_json() if notice else "no notice")
