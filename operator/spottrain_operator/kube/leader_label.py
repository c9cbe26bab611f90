"""The label by which the Service of the control API finds the leading pod.

Every replica that could lead is ready, so that readiness does not say which one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from spottrain_api.contract.names import LABEL_LEADER
from spottrain_operator.kube.cluster import Cluster
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.resources import PODS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


class LeaderLabel:
    """Keeps the label on the leader's pod, and off the others.

    Args:
        cluster: Where the pods are.
        namespace: That of the operator's pods.
        pod: Name of this process's pod.
        labels: What all of the operator's pods have. Empty: they are unknown, and none is labelled.
        look_seconds: Time between two looks.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        pod: str,
        labels: Mapping[str, str],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._pod = pod
        self._labels = dict(labels)
        self._look_seconds = look_seconds

    async def drop(self) -> None:
        """Remove the label from this pod.

        Another container may have led in it before this one.
        """
        await self._until_done(leads=False)

    async def keep(self) -> None:
        """Keep the label on this pod alone, for ever."""
        while True:
            await self._until_done(leads=True)
            await asyncio.sleep(self._look_seconds)

    async def _until_done(self, *, leads: bool) -> None:
        while self._labels:
            try:
                return await self._put(leads=leads)
            except ClusterError as error:
                logger.warning("the label %s could not be put in order; retrying: %s", LABEL_LEADER, error)
                await asyncio.sleep(self._look_seconds)

    async def _put(self, *, leads: bool) -> None:
        found = await self._cluster.list(PODS, namespace=self._namespace, labels=self._labels)
        for pod in found.items:
            meta = pod["metadata"]
            mine = meta["name"] == self._pod
            if not mine and not leads:
                continue
            wanted = "true" if mine and leads else None
            if meta.get("labels", {}).get(LABEL_LEADER) != wanted:
                patch = {"metadata": {"labels": {LABEL_LEADER: wanted}}}
                await self._cluster.patch(PODS, meta["name"], patch, namespace=self._namespace)
