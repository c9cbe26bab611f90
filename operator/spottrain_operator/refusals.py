"""What is kept of a job's pods that are refused, so that they are tried ever more seldom.

It is in memory only, so a new operator retries.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import replace
from datetime import datetime

from spottrain_api.contract.assignments import CapacityType
from spottrain_operator.core.model import Action, AnnotatePod, JobView
from spottrain_operator.job_record import JobRecord
from spottrain_operator.kube.errors import RefusedError
from spottrain_operator.kube.identities import JobKey
from spottrain_operator.objects.observe import refusal

logger = logging.getLogger(__name__)


def protects(action: Action) -> bool:
    """Whether it annotates a pod.

    To remove what it has is never put off: it would hold up the drain of a node.
    """
    return isinstance(action, AnnotatePod) and any(action.annotations.values())


def note_unprotected(key: JobKey, record: JobRecord, error: RefusedError | None, now: datetime) -> None:
    """Keep that the job's pods can't be annotated; None if they can.

    Training doesn't depend on it.
    """
    if error is None:
        record.annotating.note_success()
    elif record.annotating.note_refusal(now):
        logger.warning(
            "%s: its pods can't be annotated, so autoscalers may take their nodes; the operator retries: %s. If "
            "it lacks the right, give it the verb patch on pods, as the chart's role does.",
            key,
            error,
        )


def note_refusal(
    record: JobRecord,
    job: JobView,
    tried: Set[CapacityType],
    errors: Mapping[CapacityType, RefusedError],
    now: datetime,
) -> None:
    """Keep why pods of the job are refused, and of which types.

    Args:
        record: What is kept of the job.
        job: Its view.
        tried: Types of the pods that were to be created.
        errors: A refusal for each type of which a pod was refused.
        now: The time.
    """
    known, refused = record.refusal, frozenset(errors)
    if known is not None and known.metadata_generation == job.metadata_generation:
        refused |= known.capacity_types - tried
    if errors:
        known = refusal(next(iter(errors.values())), job, known, now)
    record.refusal = replace(known, capacity_types=refused) if known is not None and refused else None
