"""The records of what jobs cost, which stay when the jobs are deleted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from spottrain_api.contract.names import API_VERSION, LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_api.cost_record import COST_KIND, DAYS_KEPT, CostRecord, merge_days, record_name
from spottrain_api.tolerant import read_known
from spottrain_api.v1alpha1.spending import DayCost
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.kube.cluster import Cluster, write
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import COSTS, Manifest

logger = logging.getLogger(__name__)

# Between two writes, unless the job ends or is deleted. Until then, the job's status has the days.
WRITE_SECONDS = 600.0
# A job that was over for so long when it was first seen has its last days.
OVER_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True)
class Spending:
    """What one job cost, as far as it isn't written yet.

    Attributes:
        days: The newest days. Empty: nothing is known.
        written: Whether they are in the record.
        tried_at: When the record was last written, or first seen.
    """

    days: tuple[DayCost, ...] = ()
    written: bool = True
    tried_at: datetime | None = None


class CostKeeper:
    """Copies the days' costs from the status of jobs to their records."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def keep(self, key: JobKey, uid: str, spending: Spending, status: TrainingJobStatus, now: datetime) -> None:
        """Note the days of a status, and write them if it is time."""
        days = status.cost.days if status.cost is not None else ()
        over = status.completion_time
        if days != spending.days:
            spending.days = days
            spending.written = (
                spending.tried_at is None and over is not None and (now - over).total_seconds() > OVER_SECONDS
            )
        if spending.tried_at is None:
            spending.tried_at = now
        waited = (now - spending.tried_at).total_seconds()
        if not spending.written and (over is not None or waited >= WRITE_SECONDS):
            await self.write(key, uid, spending, now)

    async def write(self, key: JobKey, uid: str, spending: Spending, now: datetime) -> None:
        """Write what isn't written yet. If that fails, it is logged, and tried again with the next change."""
        if spending.written:
            return
        spending.tried_at = now
        try:
            await self._write(key, uid, spending.days)
            spending.written = True
        except ClusterError as error:
            logger.warning("what %s cost was not recorded; the operator retries: %s", key, error)

    async def _write(self, key: JobKey, uid: str, days: tuple[DayCost, ...]) -> None:
        name = record_name(key.name, uid)
        stored = await self._cluster.get(COSTS, name, namespace=key.namespace)
        if stored is None:
            await self._delete_old(key.namespace, newest=days[-1])
        recorded, _ = read_known(CostRecord, (stored or {}) | {"job": key.name, "uid": uid})
        record = CostRecord(job=key.name, uid=uid, days=merge_days(recorded.days, days))
        metadata = {
            "namespace": key.namespace,
            "name": name,
            "labels": {LABEL_JOB: key.name, LABEL_MANAGED_BY: MANAGED_BY},
        }
        if stored is not None:
            metadata["resourceVersion"] = stored["metadata"]["resourceVersion"]
        new: Manifest = {"apiVersion": API_VERSION, "kind": COST_KIND, "metadata": metadata}
        await write(self._cluster, COSTS, new | record.model_dump(mode="json", by_alias=True))

    async def _delete_old(self, namespace: str, newest: DayCost) -> None:
        """Delete the records of the namespace that have no day that is kept.

        This happens before each new one, so that they don't add up.
        """
        oldest = newest.day - timedelta(days=DAYS_KEPT)
        listed = await self._cluster.list(COSTS, namespace=namespace)
        for each in listed.items:
            days = each.get("days") or ()
            if days and str(days[-1].get("day")) < oldest.isoformat():
                await self._cluster.delete(
                    COSTS, each["metadata"]["name"], namespace=namespace, uid=each["metadata"]["uid"]
                )
