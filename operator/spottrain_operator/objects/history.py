"""The course of a job in a TrainingJobHistory beside it, for later reports.

No decision depends on it. If it can't be written, the job continues without it.
"""

from __future__ import annotations

import csv
import io
import logging
import math
from dataclasses import dataclass, replace
from datetime import datetime

from spottrain_api.contract.names import API_VERSION, KIND, LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from spottrain_api.history import HISTORY_FIELD, HISTORY_KIND, HistoryPoint, thin_out
from spottrain_api.v1alpha1.status import TrainingJobStatus
from spottrain_operator.kube.cluster import Cluster, write
from spottrain_operator.kube.errors import ClusterError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.kube.resources import HISTORIES, Manifest
from spottrain_operator.objects.observe import owned_by

logger = logging.getLogger(__name__)

# Between two writes, unless the phase or the generation changes.
WRITE_SECONDS = 10.0
# A job that was over for so long when it was first seen has its last points.
OVER_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True)
class Course:
    """The course of one job, as far as it isn't written yet.

    Attributes:
        newest: The newest point, written or not.
        unwritten: The points that are yet to be written.
        written_at: Unix time of the newest point when points were last written.
    """

    newest: HistoryPoint | None = None
    unwritten: tuple[HistoryPoint, ...] = ()
    written_at: float = 0.0


class HistoryKeeper:
    """Adds the courses of jobs to their histories.

    Each change of a job's status makes a point. Points stay in memory only until they are written, because the
    history of a day has hundreds.
    """

    def __init__(self, cluster: Cluster, *, write_seconds: float = WRITE_SECONDS) -> None:
        self._cluster = cluster
        self._write_seconds = write_seconds

    async def keep(self, job: Manifest, course: Course, status: TrainingJobStatus, now: datetime) -> None:
        over = status.completion_time
        before, point = course.newest, history_point(status, now)
        if before is None and over is not None and (now - over).total_seconds() > OVER_SECONDS:
            return
        if before is not None and _same(before, point):
            return
        course.newest = point
        course.unwritten = thin_out((*course.unwritten, point))
        if before is not None:
            turning = (before.phase, before.generation) != (point.phase, point.generation)
        else:
            turning = status.generation is None or over is not None
            course.written_at = point.at
        if turning or point.at - course.written_at >= self._write_seconds:
            course.written_at = point.at
            key = JobKey.of(job)
            try:
                await self._write(key, job, course)
            except ClusterError as error:
                logger.warning("the history of %s was not written; the job continues without: %s", key, error)

    async def _write(self, key: JobKey, job: Manifest, course: Course) -> None:
        """Add the points that are yet to be written to those that are stored."""
        uid, unwritten = job["metadata"]["uid"], course.unwritten
        points: list[HistoryPoint] = []
        stored = await self._cluster.get(HISTORIES, key.name, namespace=key.namespace)
        if stored is not None:
            if not owned_by(stored, uid):
                # Kubernetes deletes that of an earlier job of this name.
                raise ClusterError(f"another {HISTORY_KIND} has its name; it is left alone")
            # A write whose answer was lost has stored some of the unwritten ones, with times in milliseconds.
            again = {point.to_row() for point in unwritten}
            points = [each for each in _points(stored) if each.to_row() not in again]
            if points:  # by a leader whose clock may be ahead
                unwritten = tuple(replace(each, at=max(each.at, points[-1].at)) for each in unwritten)
                course.unwritten = unwritten
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": key.name, "uid": uid, "controller": True}
        new: Manifest = {
            "apiVersion": API_VERSION,
            "kind": HISTORY_KIND,
            "metadata": {
                "namespace": key.namespace,
                "name": key.name,
                "labels": {LABEL_JOB: key.name, LABEL_MANAGED_BY: MANAGED_BY},
                "ownerReferences": [owner],
            },
            HISTORY_FIELD: "".join(f"{point.to_row()}\n" for point in thin_out((*points, *unwritten))),
        }
        if stored is not None:
            new["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        await write(self._cluster, HISTORIES, new)
        course.unwritten = ()


def history_point(status: TrainingJobStatus, now: datetime) -> HistoryPoint:
    progress = status.progress
    return HistoryPoint(
        at=now.timestamp(),
        step=progress.step,
        loss=progress.loss if progress.loss is not None else math.nan,
        tokens_per_second=progress.tokens_per_second or 0.0,
        generation=status.generation.number if status.generation else 0,
        on_demand=status.members.on_demand,
        spot=status.members.spot,
        committed_step=status.commit.step if status.commit else 0,
        phase=status.phase.value,
    )


def _points(history: Manifest) -> list[HistoryPoint]:
    """The points so far. None are returned if the history is damaged."""
    try:
        rows = csv.reader(io.StringIO(history.get(HISTORY_FIELD, "")))
        return [HistoryPoint.from_row(row) for row in rows if row]
    except (ValueError, csv.Error) as error:
        logger.warning("the history of %s can't be read, and starts again: %s", history["metadata"]["name"], error)
        return []


def _same(before: HistoryPoint, after: HistoryPoint) -> bool:
    def essence(point: HistoryPoint) -> tuple[object, ...]:
        return (point.step, point.generation, point.on_demand, point.spot, point.committed_step, point.phase)

    return essence(before) == essence(after)
