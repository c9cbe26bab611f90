"""The course of a job in a ConfigMap beside it, for later reports.

No decision depends on it. If it can't be written, the job continues without it.
"""

from __future__ import annotations

import csv
import io
import logging
import math
from datetime import datetime

from spottrain_api.contract import API_VERSION, KIND, LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY, CapacityType
from spottrain_api.history import HISTORY_KEY, HistoryPoint, history_name, thin_out
from spottrain_api.v1alpha1 import GenerationState, TrainingJobStatus
from spottrain_operator.cluster.client import ClusterError, ConfigMapClient, JobKey, Manifest

logger = logging.getLogger(__name__)

# Between two writes, unless the phase or the generation changes.
WRITE_SECONDS = 10.0


class HistoryKeeper:
    """Collects points of a job's course, and writes them from time to time.

    It adds a point if the job's status has changed.
    """

    def __init__(self, config_maps: ConfigMapClient) -> None:
        self._config_maps = config_maps
        self._points: dict[JobKey, tuple[HistoryPoint, ...]] = {}
        self._written_at: dict[JobKey, float] = {}

    async def keep(self, job: Manifest, status: TrainingJobStatus, now: datetime) -> None:
        key = JobKey(namespace=job["metadata"]["namespace"], name=job["metadata"]["name"])
        try:
            if key not in self._points:
                self._points[key] = parse(await self._config_maps.read_config_map(*_name(key)), job)
            points = self._points[key]
            point = history_point(status, now)
            if points and _same(points[-1], point):
                return
            self._points[key] = thin_out((*points, point))
            turning = not points or (points[-1].phase, points[-1].generation) != (point.phase, point.generation)
            if turning or point.at - self._written_at.get(key, 0.0) >= WRITE_SECONDS:
                await self._write(key, job)
                self._written_at[key] = point.at
        except ClusterError as error:
            logger.warning("the history of %s was not written; the job continues without: %s", key, error)

    async def _write(self, key: JobKey, job: Manifest) -> None:
        stored = await self._config_maps.read_config_map(*_name(key))
        namespace, name = _name(key)
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": key.name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        new: Manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "namespace": namespace,
                "name": name,
                "labels": {LABEL_JOB: key.name, LABEL_MANAGED_BY: MANAGED_BY},
                "ownerReferences": [owner],
            },
            "data": {HISTORY_KEY: "\n".join(point.to_row() for point in self._points[key]) + "\n"},
        }
        if stored is not None:
            new["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        await self._config_maps.write_config_map(new)

    def forget(self, key: JobKey) -> None:
        self._points.pop(key, None)
        self._written_at.pop(key, None)


def history_point(status: TrainingJobStatus, now: datetime) -> HistoryPoint:
    generation, progress = status.generation, status.progress
    training = generation is not None and generation.state is not GenerationState.ENDED
    members = generation.members if generation is not None and training else ()
    num_on_demand = sum(member.capacity_type is CapacityType.ON_DEMAND for member in members)
    return HistoryPoint(
        at=now.timestamp(),
        step=progress.step,
        loss=progress.loss if progress.loss is not None else math.nan,
        tokens_per_second=progress.tokens_per_second or 0.0,
        generation=generation.number if generation else 0,
        on_demand=num_on_demand,
        spot=len(members) - num_on_demand,
        committed_step=status.commit.step if status.commit else 0,
        phase=status.phase.value,
    )


def parse(config_map: Manifest | None, job: Manifest) -> tuple[HistoryPoint, ...]:
    """The points so far.

    None are returned if the ConfigMap is damaged, or belongs to an earlier job of the same name.
    """
    if config_map is None:
        return ()
    owners = config_map["metadata"].get("ownerReferences", ())
    if all(owner["uid"] != job["metadata"]["uid"] for owner in owners):
        return ()
    try:
        rows = csv.reader(io.StringIO(config_map.get("data", {}).get(HISTORY_KEY, "")))
        return tuple(HistoryPoint.from_row(row) for row in rows if row)
    except ValueError as error:
        logger.warning("the history of %s can't be read, and starts again: %s", job["metadata"]["name"], error)
        return ()


def _name(key: JobKey) -> tuple[str, str]:
    return key.namespace, history_name(key.name)


def _same(before: HistoryPoint, after: HistoryPoint) -> bool:
    def essence(point: HistoryPoint) -> tuple[object, ...]:
        return (point.step, point.generation, point.on_demand, point.spot, point.committed_step, point.phase)

    return essence(before) == essence(after)
