"""Progress of the ranks, from the reports of their agents."""

from __future__ import annotations

from spottrain_api.contract.reports import Progress, TrainerPhase
from spottrain_api.v1alpha1.status import GenerationStatus
from spottrain_operator.core.facts.situation import Situation


def found_commits(generation: GenerationStatus, newest: Progress) -> bool:
    """Whether the generation resumed from a commit that is older than the job.

    The commit is that of an earlier job, or of a fork.
    """
    return generation.resume is None and generation.replicated_step is None and newest.start_step > 0


def reported(situation: Situation, generation: GenerationStatus) -> list[Progress]:
    """Progress that members reported in this generation after their start.

    Reports of members that are gone count, too. A member that ended during its start, drained or not, knows no step.
    """
    said = reported_at_all(situation, generation)
    return [p for p in said if p.phase is not TrainerPhase.STARTING and p.total_steps is not None]


def reported_at_all(situation: Situation, generation: GenerationStatus) -> list[Progress]:
    """Progress that members reported in this generation, also during their start."""
    views = (situation.observed.reports.get(member.pod_uid) for member in generation.members)
    return [
        view.report.progress
        for view in views
        if view is not None
        and view.report.progress is not None
        and view.report.progress.generation == generation.number
    ]


def newest_progress(situation: Situation, generation: GenerationStatus) -> Progress | None:
    """The progress of the furthest member."""
    return max(reported(situation, generation), key=lambda p: (p.step, p.updated_at), default=None)
